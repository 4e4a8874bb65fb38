"""What is measured: each row is a table of functions that do the same work; the first is the reference of the ratios.

Networks: one plain float32 network in its default memory format is the reference, "plain loop" calls four of them.
Whoever has no function for the work is left out of the row; who fails is recorded with the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from enfold import BatchEnsemble, DeepEnsemble, MCDropout, fit
from enfold.ensembles import MIMO, PackedEnsemble
from enfold.networks import MLP, ViT, WideResNet
from enfold.train import TrainConfig
from timing import BATCH, FactorsByHand, PythonLoop, cnn, inference, training_step
from versus.neighbours import batch_ensemble, load, packed_cnn, tabm_mlp

M = 4
Call = Callable[[], object]
Maker = Callable[[], Call]  # makes a function to measure; it may raise, and then the case is recorded as failed
BF16 = torch.bfloat16
NAMES = {"jpeg_compression": "JPEGCompression", "elastic_transform": "Elastic"}  # of torch-uncertainty


@dataclass(frozen=True)
class Row:
    """A table of functions that do the same work.

    Attributes:
        cases: What makes the functions, by name; the first is the reference.
        flops: Operations of the work, for the limits of the machine; 0 for work that is no arithmetic of networks.
        shortest: Seconds of a sample at least.
    """

    cases: dict[str, Maker]
    flops: float = 0.0
    shortest: float = 0.05


def sequential_mlp(dropout: float = 0.0) -> nn.Module:
    """Return the MLP 784-256-256-10 as nn.Sequential."""
    layers: list[nn.Module] = []
    for inputs in (784, 256):
        layers += [nn.Linear(inputs, 256), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def dropout_cnn() -> nn.Module:
    """Return the CNN with dropout after each of its blocks."""
    layers: list[nn.Module] = []
    for layer in cnn():  # type: ignore[attr-defined]
        layers += [layer, nn.Dropout(0.1)] if isinstance(layer, nn.MaxPool2d) else [layer]
    return nn.Sequential(*layers)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (sequential_mlp, (784,), BATCH),
    "cnn": (cnn, (3, 32, 32), BATCH),
    "wrn-16-2": (lambda: WideResNet(depth=16, widen_factor=2), (3, 32, 32), 64),
    "vit": (ViT, (3, 32, 32), 64),
}
DROPOUT: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: sequential_mlp(0.1),
    "cnn": dropout_cnn,
    "wrn-16-2": lambda: WideResNet(depth=16, widen_factor=2, dropout=0.1),
    "vit": lambda: ViT(dropout=0.1),
}


def repeated_step(model: nn.Module, inputs: Tensor, labels: Tensor, *, repeat_inputs: bool = False) -> Call:
    """Return a training step of a network whose outputs are those of M members one after the other, (M B, C)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    labels = labels.repeat(M)
    given = inputs.repeat(M, *(1,) * (inputs.ndim - 1)) if repeat_inputs else inputs
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(given), labels).backward()
        optimizer.step()

    return step


def by_member_step(model: nn.Module, inputs: Tensor, labels: Tensor) -> Call:
    """Return a training step of a network whose outputs are (B, M, C), as those of tabm."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    labels = labels.repeat_interleave(M)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), labels).backward()
        optimizer.step()

    return step


def in_bf16(call: Call) -> Call:
    """Return the function under autocast."""

    def run() -> None:
        with torch.autocast("cpu", dtype=BF16):
            call()

    return run


def operations(network: nn.Module, inputs: Tensor, task: str) -> float:
    """Return the operations of M networks for a training step or for a forward pass."""
    counter = FlopCounterMode(display=False)
    with counter:
        outputs = network(inputs)
        if task == "step":
            outputs.sum().backward()
    return float(M * counter.get_total_flops())


def plain(make: Callable[[], nn.Module], run: Callable[[nn.Module], Call]) -> Maker:
    """Return what makes a network and the function that runs it."""
    return lambda: run(make())


@dataclass(frozen=True)
class Work:
    """A network, a batch, and what is done with it: "step", "inference" or "batch 1" (inference of one example)."""

    name: str
    task: str
    inputs: Tensor
    labels: Tensor

    @property
    def is_step(self) -> bool:
        """Whether it is a training step."""
        return self.task == "step"

    def run(self, model: nn.Module) -> Call:
        """Return the function for a network, an ensemble of enfold, or a list of networks."""
        return training_step(model, self.inputs, self.labels) if self.is_step else inference(model, self.inputs)

    def run_bf16(self, model: nn.Module) -> Call:
        """Return the same in bf16."""
        if self.is_step:
            return training_step(model, self.inputs, self.labels, precision="bf16")
        return in_bf16(inference(model, self.inputs))

    def repeated(self, model: nn.Module, *, repeat_inputs: bool = False) -> Call:
        """Return the function for a network whose outputs are (M B, C)."""
        if self.is_step:
            return repeated_step(model, self.inputs, self.labels, repeat_inputs=repeat_inputs)
        return inference(model, self.inputs)

    def by_member(self, model: nn.Module) -> Call:
        """Return the function for a network whose outputs are (B, M, C)."""
        return by_member_step(model, self.inputs, self.labels) if self.is_step else inference(model, self.inputs)


def deep_ensembles(make: Callable[[], nn.Module], work: Work) -> dict[str, Maker]:
    """Return the cases of M independent networks; probly and torchensemble train by a loop of their own."""
    methods = partial(load, "torch_uncertainty.methods")
    cases = {"torch-uncertainty": plain(lambda: methods().deep_ensembles(make(), M), work.repeated)}
    if work.name == "mlp":
        cases["tabm"] = plain(lambda: tabm_mlp(M, "packed"), work.by_member)
    if not work.is_step:
        cases["probly"] = plain(lambda: load("probly.representation").Ensemble(make(), M), work.run)
        cases["torchensemble"] = plain(lambda: _voting(make), work.run)
    return {**cases, **_own(lambda: DeepEnsemble(make, M), work)}


def batch_ensembles(make: Callable[[], nn.Module], work: Work) -> dict[str, Maker]:
    """Return the cases of BatchEnsemble."""
    cases = {"torch-uncertainty": plain(lambda: batch_ensemble(make(), M), work.repeated)}
    if work.name == "mlp":
        cases["tabm"] = plain(lambda: tabm_mlp(M, "batch"), work.by_member)
        cases["by hand"] = plain(lambda: FactorsByHand(M), work.run)
    return {**cases, **_own(lambda: BatchEnsemble(make(), M), work)}


def mc_dropout(make: Callable[[], nn.Module], work: Work) -> dict[str, Maker]:
    """Return the cases of M samples of MC dropout."""
    methods = partial(load, "torch_uncertainty.methods")
    cases = {"plain loop": plain(make, lambda model: _samples(model, work.inputs))}
    for kind, on_batch in (("repeated batch", True), ("loop", False)):
        sample = partial(lambda on_batch: methods().mc_dropout(make(), M, on_batch=on_batch), on_batch)
        cases[f"torch-uncertainty, {kind}"] = plain(sample, work.run)
    return {**cases, **_own(lambda: MCDropout(make(), M), work)}


def mimos(make: Callable[[], nn.Module], work: Work) -> dict[str, Maker]:
    """Return the cases of MIMO."""
    mlps = partial(load, "torch_uncertainty.models.mlp")
    cases = {}
    if work.name == "mlp":
        run = partial(work.repeated, repeat_inputs=True)
        cases["torch-uncertainty"] = plain(lambda: mlps().mimo_mlp(784, 10, [256, 256], M), run)
    return {**cases, **_own(lambda: MIMO(make(), M, batch_repetition=1), work)}


def packed_ensembles(make: Callable[[], nn.Module], work: Work) -> dict[str, Maker]:
    """Return the cases of Packed-Ensembles with alpha = 2."""
    mlps = partial(load, "torch_uncertainty.models.mlp")
    cases = {}
    if work.name == "mlp":
        cases["torch-uncertainty"] = plain(lambda: mlps().packed_mlp(784, 10, [256, 256], M, alpha=2), work.repeated)
    if work.name == "cnn":
        cases["torch-uncertainty"] = plain(lambda: packed_cnn(M, 2.0), work.repeated)
    return {**cases, **_own(lambda: PackedEnsemble(make, M, alpha=2.0), work)}


def _own(make: Callable[[], nn.Module], work: Work) -> dict[str, Maker]:
    """Return the cases of enfold; MIMO trains by a loss of its own, which shuffles the batch for each member."""

    def made() -> nn.Module:
        return make()

    def run(model: nn.Module, precision: str = "float32") -> Call:
        if work.is_step:
            objective = model.objective(TrainConfig())  # type: ignore[operator]
            return training_step(model, work.inputs, work.labels, objective=objective, precision=precision)
        return work.run(model) if precision == "float32" else work.run_bf16(model)

    return {"enfold": plain(made, run), "enfold, bf16": plain(made, partial(run, precision="bf16"))}


METHODS = {
    "deep ensemble": deep_ensembles,
    "BatchEnsemble": batch_ensembles,
    "MIMO": mimos,
    "packed": packed_ensembles,
    "MC dropout": mc_dropout,
}


def members(name: str, task: str, method: str) -> Row:
    """Return the row of one method on one network."""
    make, shape, batch = NETWORKS[name]
    make = DROPOUT[name] if method == "MC dropout" else make
    size = 1 if task == "batch 1" else batch
    work = Work(name, task, torch.randn(size, *shape), torch.randint(10, (size,)))
    cases = {
        "one network": plain(make, work.run),
        "one network, bf16": plain(make, work.run_bf16),
        "plain loop": plain(lambda: PythonLoop(make, M), work.run),
        "plain loop, bf16": plain(lambda: PythonLoop(make, M), work.run_bf16),
    }
    if method == "MC dropout":
        del cases["plain loop"], cases["plain loop, bf16"]
    return Row({**cases, **METHODS[method](make, work)}, operations(make(), work.inputs, task))


def _voting(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the ensemble of torchensemble without its training."""
    ensemble: nn.Module = load("torchensemble").VotingClassifier(estimator=make(), n_estimators=M, cuda=False)
    ensemble.estimators_ = nn.ModuleList(make() for _ in range(M))
    return ensemble


def _samples(network: nn.Module, inputs: Tensor) -> Call:
    network.eval()
    for layer in network.modules():
        if isinstance(layer, nn.Dropout):
            layer.train()

    def call() -> None:
        with torch.inference_mode():
            torch.stack([network(inputs) for _ in range(M)])

    return call


def growth(num_members: int, kind: str) -> Row:
    """Return the row of a training step of M members of an MLP."""
    make = sequential_mlp if kind == "mlp" else (lambda: MLP(32, [64, 64], 10))
    inputs, labels = torch.randn(BATCH, 784 if kind == "mlp" else 32), torch.randint(10, (BATCH,))
    run = partial(training_step, inputs=inputs, labels=labels)
    cases: dict[str, Maker] = {
        "one network": plain(make, run),
        "plain loop": plain(lambda: PythonLoop(make, num_members), run),
        "torch-uncertainty": plain(
            lambda: load("torch_uncertainty.methods").deep_ensembles(make(), num_members),
            lambda model: _repeated_by(num_members, model, inputs, labels),
        ),
        "enfold": plain(lambda: DeepEnsemble(make, num_members), run),
        "enfold, bf16": plain(lambda: DeepEnsemble(make, num_members), partial(run, precision="bf16")),
    }
    return Row(cases, operations(make(), inputs, "step") * num_members / M)


def _repeated_by(num_members: int, model: nn.Module, inputs: Tensor, labels: Tensor) -> Call:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    labels = labels.repeat(num_members)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def epoch(name: str) -> Row:
    """Return the row of one epoch as a user trains it: 64 batches from tensors, cross-entropy, SGD with momentum."""
    from torch.utils.data import DataLoader, TensorDataset

    make, shape, batch = NETWORKS[name]
    steps = 64 if name == "mlp" else 16
    inputs, labels = torch.randn(steps * batch, *shape), torch.randint(10, (steps * batch,))
    loader = DataLoader(TensorDataset(inputs, labels), batch, shuffle=True)
    settings: dict[str, Any] = {"epochs": 1, "lr": 1e-3, "batch_size": batch, "optimizer": "sgd", "quiet": True}
    settings |= {"select": "last", "weight_decay": 0.0, "nesterov": False}

    def by_hand(networks: list[nn.Module]) -> Call:
        optimizers = [torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9) for network in networks]

        def run() -> None:
            for network, optimizer in zip(networks, optimizers, strict=True):
                network.train()
                for rows, targets in loader:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(network(rows), targets)
                    loss.backward()
                    optimizer.step()

        return run

    def by_fit(model: nn.Module, **more: Any) -> Call:
        return lambda: fit(model, (inputs, labels), **settings, **more)

    def by_lightning(network: nn.Module, **options: Any) -> Call:
        lightning, routines = load("lightning"), load("torch_uncertainty.routines")

        def run() -> None:
            optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
            routine = routines.ClassificationRoutine(
                network, 10, nn.CrossEntropyLoss(), optim_recipe=optimizer, **options
            )
            trainer = lightning.Trainer(
                max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(routine, loader)

        return run

    def by_routine(model: nn.Module) -> Call:
        repeat = load("torch_uncertainty.transforms").RepeatTarget(M)
        return by_lightning(model, is_ensemble=True, format_batch_fn=repeat)

    def by_voting() -> Call:
        voting = load("torchensemble").VotingClassifier(estimator=make(), n_estimators=M, cuda=False, n_jobs=1)
        voting.set_optimizer("SGD", lr=1e-3, momentum=0.9)
        voting.set_criterion(nn.CrossEntropyLoss())
        return lambda: voting.fit(loader, epochs=1, log_interval=10**9, save_model=False)

    ensembles = partial(load, "torch_uncertainty.methods")
    cases: dict[str, Maker] = {
        "one network": lambda: by_hand([make()]),
        "one network by enfold.fit": plain(make, by_fit),
        "plain loop": lambda: by_hand([make() for _ in range(M)]),
        "torch-uncertainty": plain(lambda: ensembles().deep_ensembles(make(), M), by_routine),
        "torchensemble": by_voting,
        "enfold": plain(lambda: DeepEnsemble(make, M), by_fit),
        "enfold, bf16": plain(lambda: DeepEnsemble(make, M), partial(by_fit, precision="bf16")),
    }
    return Row(cases, operations(make(), inputs[:batch], "step") * steps, shortest=0.0)


def distillation(name: str) -> Row:
    """Return the row of one epoch of distillation from four teachers, whose outputs are computed in every step."""
    from enfold import distill

    make, shape, batch = NETWORKS[name]
    steps = 64 if name == "mlp" else 16
    inputs, labels = torch.randn(steps * batch, *shape), torch.randint(10, (steps * batch,))
    teachers = PythonLoop(make, M).eval()

    def by_hand(cached: bool) -> Call:
        student = make().train()
        optimizer = torch.optim.SGD(student.parameters(), lr=1e-3, momentum=0.9)

        def soft(rows: Tensor) -> Tensor:
            with torch.no_grad():
                return teachers(rows).softmax(-1).mean(0)  # type: ignore[no-any-return]

        def run() -> None:
            targets = torch.cat([soft(part) for part in inputs.split(512)]) if cached else None
            for index in torch.randperm(len(inputs)).split(batch):
                rows = inputs[index]
                optimizer.zero_grad()
                loss = F.cross_entropy(student(rows), soft(rows) if targets is None else targets[index])
                loss.backward()
                optimizer.step()

        return run

    def by_enfold(**more: Any) -> Call:
        ensemble, student = DeepEnsemble(list(teachers.networks)), make()
        settings: dict[str, Any] = {"epochs": 1, "lr": 1e-3, "batch_size": batch, "optimizer": "sgd", "quiet": True}
        settings |= {"select": "last", "weight_decay": 0.0, "nesterov": False}
        return lambda: distill(ensemble, (inputs, labels), student=student, **settings, **more)

    cases: dict[str, Maker] = {
        "plain loop": lambda: by_hand(cached=False),
        "plain loop, teacher outputs computed once": lambda: by_hand(cached=True),
        "enfold": by_enfold,
        "enfold, bf16": lambda: by_enfold(precision="bf16"),
    }
    return Row(cases, shortest=0.0)


def matching() -> Row:
    """Return the row of matching the units of two MLPs 784-512-256-128-10 and permuting the second."""
    from matching import ours, theirs

    torch.set_num_threads(1)
    one, other = MLP(784, (512, 256, 128), 10).eval(), MLP(784, (512, 256, 128), 10).eval()
    example = torch.randn(2, 784)
    load("rebasin")
    return Row({
        "enfold": lambda: lambda: ours(one, other, example),
        "rebasin": lambda: lambda: theirs(one, other, example),
    }, shortest=0.0)  # fmt: skip


def metrics() -> Row:
    """Return the row of ECE, NLL, Brier score and accuracy of 4 members, from logits 4 x 10,000 x 100."""
    from enfold.metrics import Predictions, accuracy, brier, ece, nll

    logits, labels = torch.randn(M, 10_000, 100), torch.randint(100, (10_000,))

    def by_enfold() -> None:
        found = Predictions(logits.log_softmax(-1), labels)
        [metric(found) for metric in (ece, nll, brier, accuracy)]

    def by_hand() -> None:
        mean = logits.softmax(-1).mean(0)
        confidence, predicted = mean.max(-1)
        right = (predicted == labels).double()
        bins = (confidence * 15).long().clamp_max(14)
        gap = torch.zeros(15, dtype=torch.float64).index_add_(0, bins, right - confidence.double())
        float(gap.abs().sum() / len(labels))
        float(-mean[torch.arange(len(labels)), labels].log().mean())
        float((mean - F.one_hot(labels, 100)).square().sum(-1).mean())
        float(right.mean())

    def by_uncertainty() -> Call:
        theirs = load("torch_uncertainty.metrics.classification")
        multiclass = load("torchmetrics.classification").MulticlassAccuracy
        found = [
            theirs.CalibrationError(task="multiclass", num_classes=100, num_bins=15), theirs.CategoricalNLL(),
            theirs.BrierScore(num_classes=100), multiclass(100, average="micro"),
        ]  # fmt: skip

        def run() -> None:
            mean = logits.softmax(-1).mean(0)
            for metric in found:
                metric.reset()
                metric.update(mean, labels)
                metric.compute()

        return run

    def by_torchmetrics() -> Call:
        functional = load("torchmetrics.functional.classification")

        def run() -> None:
            mean = logits.softmax(-1).mean(0)
            functional.multiclass_calibration_error(mean, labels, 100, n_bins=15)
            F.nll_loss(mean.log(), labels)
            (mean - F.one_hot(labels, 100)).square().sum(-1).mean()
            functional.multiclass_accuracy(mean, labels, 100, average="micro")

        return run

    return Row({
        "plain torch": lambda: by_hand,
        "torch-uncertainty": by_uncertainty,
        "torchmetrics, NLL and Brier score by hand": by_torchmetrics,
        "enfold": lambda: by_enfold,
    })  # fmt: skip


def corruption(kind: str) -> Row:
    """Return the row of one corruption at severity 3 of 100 images of 32 x 32 x 3."""
    import numpy as np

    from corruptions import smooth_images
    from enfold.data.corruptions import corrupt

    images = smooth_images()[:100]

    def by_uncertainty() -> Call:
        names = load("torch_uncertainty.transforms.corruption")
        apply = getattr(names, NAMES.get(kind, "".join(part.capitalize() for part in kind.split("_"))))(3)
        scaled = list(images.float() / 255)
        return lambda: [apply(image) for image in scaled]

    def by_imagecorruptions() -> Call:
        package = load("imagecorruptions")
        arrays = list(images.permute(0, 2, 3, 1).contiguous().numpy())
        np.random.seed(0)  # the package draws from this one
        return lambda: [package.corrupt(array, 3, kind) for array in arrays]

    return Row({
        "enfold": lambda: lambda: corrupt(images, kind, 3),
        "torch-uncertainty": by_uncertainty,
        "imagecorruptions": by_imagecorruptions,
    })  # fmt: skip


def all_rows() -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the names of all rows and what makes them."""
    from enfold.data.corruptions import STANDARD

    for name in NETWORKS:
        for method in ("deep ensemble", "BatchEnsemble", "MIMO", "packed"):
            for task in ("step", "inference", "batch 1"):
                yield f"{name}, {method}, {task}", partial(members, name, task, method)
        for task in ("inference", "batch 1"):
            yield f"{name}, MC dropout, {task}", partial(members, name, task, "MC dropout")
    for kind in ("mlp", "tiny mlp"):
        for num_members in (1, 2, 4, 8, 16, 32):
            yield f"{kind}, deep ensemble of {num_members}, step", partial(growth, num_members, kind)
    for name in ("mlp", "cnn"):
        yield f"{name}, an epoch", partial(epoch, name)
        yield f"{name}, an epoch of distillation", partial(distillation, name)
    yield "weight matching", matching
    yield "metrics", metrics
    for kind in STANDARD:
        yield f"corruption, {kind}", partial(corruption, kind)
