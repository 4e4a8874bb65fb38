"""Ensembles and distillation in the Trainer of transformers, networks from configurations, and datasets as loaders."""

import copy
import sys

import numpy as np
import pytest
import torch
from torch import nn

import enfold
from enfold import DeepEnsemble, EnfoldError, fit
from enfold.errors import MissingExtra
from enfold.seeds import generator

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")
import datasets
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, BertConfig, Trainer
from transformers import TrainingArguments as Arguments

from enfold.integrations.huggingface import DistillTrainer, EnsembleTrainer, ModelFactory, make_loader

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
CONFIG = BertConfig(
    vocab_size=30,
    num_labels=3,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    max_position_embeddings=16,
    **SIZE,
)
FACTORY = ModelFactory(AutoModelForSequenceClassification, CONFIG)


def make_rows(number=48, seed=0):
    words = torch.randint(1, 30, (number, 8), generator=generator(seed, "hugging face"))
    return datasets.Dataset.from_dict(
        {"input_ids": words.tolist(), "label": (words[:, 0] % 3).tolist(), "row": list(range(number))}
    )


TRAIN, VAL = make_rows(), make_rows(24, 1)


def arguments(folder, **options):
    options = {"num_train_epochs": 2, "learning_rate": 1e-2, **options}
    return Arguments(
        str(folder),
        per_device_train_batch_size=16,
        per_device_eval_batch_size=10,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **{"save_strategy": "no", "weight_decay": 0.1, **options},
    )


def distance(first, second):
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


# Trainers


def test_one_member_trains_as_by_a_plain_trainer(tmp_path):
    ensemble = DeepEnsemble(FACTORY, 1)
    network = ensemble.member(0)
    start = copy.deepcopy(network)
    options = {"max_grad_norm": 0.5, "warmup_steps": 2, "lr_scheduler_type": "cosine", "label_smoothing_factor": 0.1}
    ours = EnsembleTrainer(ensemble, arguments(tmp_path, **options), train_dataset=TRAIN, eval_dataset=VAL)
    ours.train()
    theirs = Trainer(network, arguments(tmp_path, **options), train_dataset=TRAIN, eval_dataset=VAL)
    theirs.train()
    assert distance(ensemble.member(0), network) < 1e-5
    assert distance(network, start) > 1e-2
    assert ours.state.log_history[-1]["train_loss"] == pytest.approx(
        theirs.state.log_history[-1]["train_loss"], rel=1e-4
    )


def test_members_train_as_alone_and_as_by_fit(tmp_path):
    ensemble = DeepEnsemble(FACTORY, 3)
    alone = DeepEnsemble([ensemble.member(2)])
    by_fit = copy.deepcopy(ensemble)
    options = {"max_grad_norm": 0.5, "lr_scheduler_type": "constant"}
    for model in (ensemble, alone):
        trainer = EnsembleTrainer(model, arguments(tmp_path, **options), train_dataset=TRAIN)
        trainer.train()
    assert distance(ensemble.member(2), alone.member(0)) < 1e-5
    batches = []  # in the order of the Trainer
    trainer = EnsembleTrainer(copy.deepcopy(by_fit), arguments(tmp_path, **options), train_dataset=TRAIN)
    trainer.loop.losses = lambda batch, *_, losses=trainer.loop.losses: (batches.append(batch), losses(batch, 0.0))[1]
    trainer.train()

    class InOrder:
        def __len__(self):
            return 3

        def __iter__(self):
            return iter(next(epochs))

    epochs = iter([batches[:3], batches[:3], batches[:3], batches[3:]])  # two are read before the training
    fit(
        by_fit,
        InOrder(),
        epochs=2,
        lr=1e-2,
        weight_decay=0.1,
        decay="weights",
        schedule="constant",
        clip_norm=0.5,
        quiet=True,
        select="last",
    )
    assert distance(by_fit, ensemble) < 1e-5


def test_evaluation_is_that_of_the_mean_prediction(tmp_path):
    ensemble = DeepEnsemble(FACTORY, 3)

    def compute_metrics(prediction):
        assert prediction.predictions.shape == (24, 3)
        return {"own": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}

    trainer = EnsembleTrainer(
        ensemble, arguments(tmp_path), train_dataset=TRAIN, eval_dataset=VAL, compute_metrics=compute_metrics
    )
    trainer.train()
    found = trainer.evaluate()
    row = enfold.evaluate(ensemble, make_loader(VAL, 24, columns=["input_ids"]))
    for name in ("accuracy", "nll", "brier", "ece"):
        assert found[f"eval_{name}"] == pytest.approx(row.scores[name], abs=1e-5)
    assert found["eval_own"] == pytest.approx(row.scores["accuracy"])
    assert found["eval_loss"] == pytest.approx(row.scores["nll"], abs=1e-5)
    unlabelled = trainer.predict(VAL.remove_columns("label"))
    inputs = {"input_ids": torch.tensor(VAL["input_ids"][:])}
    expected = ensemble.predict(**inputs).mean
    np.testing.assert_allclose(np.exp(unlabelled.predictions), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [lambda: DeepEnsemble(FACTORY, 2), lambda: enfold.SWAG(FACTORY(), 2, start=0.0)],
    ids=["DeepEnsemble", "SWAG"],
)
def test_training_resumes_from_a_checkpoint_which_enfold_can_load(make, tmp_path):
    torch.manual_seed(0)
    start = make()
    whole, first, second = (copy.deepcopy(start) for _ in range(3))
    options = {"num_train_epochs": 4, "save_strategy": "epoch"}
    EnsembleTrainer(whole, arguments(tmp_path / "whole", **options), train_dataset=TRAIN).train()
    EnsembleTrainer(first, arguments(tmp_path / "part", **options), train_dataset=TRAIN).train()
    middle = tmp_path / "part" / "checkpoint-6"
    EnsembleTrainer(second, arguments(tmp_path / "again", **options), train_dataset=TRAIN).train(str(middle))
    assert distance(whole, second) < 1e-6
    assert distance(start, second) > 1e-2
    loaded = enfold.load(tmp_path / "part" / "checkpoint-12" / "model.safetensors", FACTORY)
    assert type(loaded) is type(start)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    options = {"num_train_epochs": 1, "save_strategy": "epoch"}
    EnsembleTrainer(DeepEnsemble(FACTORY, 2), arguments(tmp_path, **options), train_dataset=TRAIN).train()
    other = EnsembleTrainer(DeepEnsemble(FACTORY, 3), arguments(tmp_path), train_dataset=TRAIN)
    with pytest.raises(EnfoldError):
        other.train(str(tmp_path / "checkpoint-3"))


def test_an_ensemble_with_its_own_schedule_uses_it(tmp_path):
    rates = []
    ensemble = enfold.SnapshotEnsemble(FACTORY(), 2)
    trainer = EnsembleTrainer(ensemble, arguments(tmp_path, num_train_epochs=4), train_dataset=TRAIN)
    trainer.loop.end_step = lambda step: rates.append(trainer.optimizer.param_groups[0]["lr"])
    trainer.train()
    assert rates[5] == pytest.approx(1e-2)  # a restart after two epochs of three steps
    assert rates[4] < 1e-3
    assert ensemble(torch.tensor(VAL["input_ids"][:4])).shape == (2, 4, 3)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1.0, 0.7])
def test_a_student_learns_the_targets_of_the_teacher(alpha, tmp_path):
    teacher = DeepEnsemble(FACTORY, 3)
    fit(teacher, make_loader(TRAIN, 16, columns=["input_ids"]), epochs=2, lr=1e-2, quiet=True)
    student, before = FACTORY(), copy.deepcopy(teacher.state_dict())
    plain = copy.deepcopy(student)
    loss = enfold.KD(temperature=2.0, alpha=alpha)
    DistillTrainer(student, arguments(tmp_path), teacher=teacher, loss=loss, train_dataset=TRAIN).train()

    class Written(Trainer):  # the loss by hand
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs = dict(inputs)
            labels, logits = inputs.pop("labels"), model(**{k: v for k, v in inputs.items() if k != "labels"}).logits
            with torch.no_grad():
                soft = (teacher(inputs["input_ids"]) / 2).softmax(-1).mean(0)
            divergence = nn.functional.kl_div((logits / 2).log_softmax(-1), soft, reduction="batchmean")
            return alpha * 4 * divergence + (1 - alpha) * nn.functional.cross_entropy(logits, labels)

    trainer = Written(plain, arguments(tmp_path), train_dataset=TRAIN)
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    assert distance(student, plain) < 1e-4
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())


def test_a_student_needs_no_labels(tmp_path):
    teacher = DeepEnsemble(FACTORY, 2)
    fit(teacher, make_loader(TRAIN, 16, columns=["input_ids"]), epochs=1, lr=1e-2, quiet=True)
    start = FACTORY()
    students = [copy.deepcopy(start) for _ in range(2)]
    for student, rows in zip(students, (TRAIN, TRAIN.remove_columns("label")), strict=True):
        DistillTrainer(student, arguments(tmp_path), teacher=teacher, train_dataset=rows).train()
    assert distance(*students) == 0
    assert distance(students[0], start) > 1e-3


def test_a_student_is_saved_as_a_model_of_transformers(tmp_path):
    teacher = DeepEnsemble(FACTORY, 2)
    trainer = DistillTrainer(FACTORY(), arguments(tmp_path), teacher=teacher, train_dataset=TRAIN, eval_dataset=VAL)
    trainer.train()
    assert {"eval_nll", "eval_accuracy", "eval_loss"} <= trainer.evaluate().keys()
    trainer.save_model(str(tmp_path / "student"))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "student")
    assert distance(again, trainer.network) == 0


def test_tokens_with_ignored_labels_train_and_evaluate(tmp_path):
    words = torch.randint(1, 30, (32, 6), generator=generator(2, "tokens"))
    labels = torch.where(words > 20, -100, words % 3)
    rows = datasets.Dataset.from_dict({"input_ids": words.tolist(), "labels": labels.tolist()})
    ensemble = DeepEnsemble(ModelFactory(AutoModelForTokenClassification, CONFIG), 2)
    trainer = EnsembleTrainer(ensemble, arguments(tmp_path), train_dataset=rows, eval_dataset=rows)
    trainer.train()
    found = trainer.evaluate()
    row = enfold.evaluate(ensemble, make_loader(rows, 8))
    assert found["eval_nll"] == pytest.approx(row.scores["nll"], abs=1e-5)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda to: EnsembleTrainer(FACTORY(), arguments(to)), "model"),
        (lambda to: EnsembleTrainer(DeepEnsemble(FACTORY, 2), "folder"), "args"),
        (
            lambda to: EnsembleTrainer(DeepEnsemble(FACTORY, 2), arguments(to), compute_loss_func=len),
            "compute_loss_func",
        ),
        (lambda to: EnsembleTrainer(DeepEnsemble(FACTORY, 2), arguments(to), task="classes"), "task"),
        (lambda to: DistillTrainer("student", arguments(to), teacher=FACTORY()), "student"),
        (lambda to: DistillTrainer(FACTORY(), arguments(to), teacher=None), "teacher"),
        (lambda to: DistillTrainer(FACTORY(), arguments(to), teacher=FACTORY(), loss="kd"), "loss"),
        (
            lambda to: EnsembleTrainer(
                DeepEnsemble(FACTORY, 2), arguments(to), train_dataset=TRAIN.remove_columns("label")
            ).train(),
            "labels",
        ),
        (
            lambda to: EnsembleTrainer(enfold.Bagging(FACTORY, 2), arguments(to), train_dataset=TRAIN).train(),
            "fit",
        ),
        (
            lambda to: EnsembleTrainer(
                DeepEnsemble(FACTORY, 2), arguments(to, label_names=["starts", "ends"]), train_dataset=TRAIN
            ),
            "label_names",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, name, tmp_path):
    with pytest.raises(EnfoldError, match=name):
        call(tmp_path)


# Networks and data


def test_a_factory_makes_a_network_for_the_seed_of_each_member():
    ensemble = DeepEnsemble(FACTORY, 3)
    assert not torch.equal(*(dict(ensemble.member(k).named_parameters())["classifier.weight"] for k in (0, 1)))
    torch.manual_seed(ensemble.seeds[1])
    assert distance(AutoModelForSequenceClassification.from_config(CONFIG), ensemble.member(1)) == 0
    assert ensemble.member(0).config is not CONFIG


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ModelFactory(nn.Linear, CONFIG), "auto"),
        (lambda: ModelFactory(AutoModelForTokenClassification, {}), "config"),
    ],
)
def test_a_factory_of_something_else_is_refused(make, name):
    with pytest.raises(EnfoldError, match=name):
        make()


FORMATS = {
    "python": lambda rows: rows,
    "numpy": lambda rows: rows.with_format("numpy"),
    "torch": lambda rows: rows.with_format("torch"),
    "pandas": lambda rows: rows.with_format("pandas"),
    "columns": lambda rows: rows.with_format("torch", columns=["input_ids", "label"]),
    "stream": lambda rows: rows.to_iterable_dataset(),
    "transform": lambda rows: rows.with_transform(
        lambda batch: {"input_ids": torch.tensor(batch["input_ids"]), "label": torch.tensor(batch["label"])}
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_dataset_of_any_format_is_a_loader(kind):
    loader = make_loader(FORMATS[kind](TRAIN), 20, columns=["input_ids"])
    batches = list(loader)
    assert [len(batch["label"]) for batch in batches] == [20, 20, 8]
    for name in ("input_ids", "label"):
        found = torch.cat([batch[name] for batch in batches])
        assert torch.equal(found, torch.tensor(TRAIN[name][:]))
    assert set(batches[0]) == {"input_ids", "label"}


def test_fit_distill_and_evaluate_read_a_dataset():
    train, val = (make_loader(rows, 16, columns=["input_ids"]) for rows in (TRAIN, VAL))
    ensemble = DeepEnsemble(FACTORY, 2)
    twin = copy.deepcopy(ensemble)
    fit(ensemble, train, val, epochs=1, quiet=True)
    tensors = [
        {"input_ids": torch.tensor(rows["input_ids"]), "labels": torch.tensor(rows["label"])}
        for rows in (TRAIN[:16], TRAIN[16:32], TRAIN[32:48])
    ]
    fit(twin, tensors, val, epochs=1, quiet=True)
    assert distance(ensemble, twin) == 0
    student = enfold.distill(ensemble, train, val, epochs=1, quiet=True)
    row = enfold.evaluate(student, val, reference=ensemble)
    assert row.scores["nll"] > 0


def test_the_label_may_have_any_name_and_pixels_become_numbers():
    rows = datasets.Dataset.from_dict(
        {"image": np.full((4, 2, 3, 3), 255, np.uint8), "kind": [0, 1, 0, 1]},
        features=datasets.Features(
            {"image": datasets.Array3D((2, 3, 3), "uint8"), "kind": datasets.ClassLabel(names=["a", "b"])}
        ),
    )
    batch = next(iter(make_loader(rows, 4, label="kind", shuffle=True)))
    assert batch["image"].shape == (4, 2, 3, 3)
    assert bool((batch["image"] == 1).all())
    assert sorted(batch["labels"].tolist()) == [0, 0, 1, 1]


def test_images_are_read_as_numbers():
    image = pytest.importorskip("PIL.Image")
    pictures = [image.fromarray(np.full((5, 4, 3), 51 * k, np.uint8)) for k in range(3)]
    rows = datasets.Dataset.from_dict(
        {"image": pictures, "label": [0, 1, 0]},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}),
    )
    batch = next(iter(make_loader(rows, 3)))
    assert batch["image"].shape == (3, 3, 5, 4)
    torch.testing.assert_close(batch["image"][:, 0, 0, 0], torch.tensor([0.0, 0.2, 0.4]))


def test_rows_of_several_lengths_need_a_collate_function():
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]], "label": [0, 1]})
    with pytest.raises(EnfoldError, match="collate"):
        list(make_loader(rows, 2))

    def pad(rows):
        longest = max(len(row["input_ids"]) for row in rows)
        words = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
        return {"input_ids": torch.tensor(words), "labels": torch.tensor([row["label"] for row in rows])}

    assert next(iter(make_loader(rows, 2, collate=pad)))["input_ids"].tolist() == [[1, 2], [3, 0]]


TEXT = datasets.Dataset.from_dict({"text": ["a", "b"], "number": [1.0, 2.0], "label": ["x", "y"], "y": [0, 1]})


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: make_loader(datasets.DatasetDict(train=TRAIN)), "train"),
        (lambda: make_loader([1, 2]), "dataset"),
        (lambda: make_loader(TRAIN, label="labels"), "label"),
        (lambda: make_loader(TRAIN.remove_columns("label")), "label"),
        (lambda: make_loader(TRAIN, columns=["words"]), "columns"),
        (lambda: make_loader(TRAIN, columns=[]), "columns"),
        (lambda: make_loader(TEXT), "class_encode_column"),
        (lambda: make_loader(TEXT.remove_columns("label")), "columns"),
        (lambda: make_loader(TRAIN.to_iterable_dataset(), shuffle=True), "shuffle"),
    ],
)
def test_datasets_that_cannot_be_read_are_refused_by_name(call, name):
    with pytest.raises(EnfoldError, match=name):
        call()


def test_a_missing_package_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"enfold\[hf\]"):
        make_loader(TRAIN)
    monkeypatch.delitem(sys.modules, "enfold.integrations.huggingface")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtra, match=r"enfold\[hf\]"):
        import enfold.integrations.huggingface  # noqa: F401
