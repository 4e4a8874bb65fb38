"""Hugging Face: a Trainer trains an ensemble made from a configuration and distils it; a dataset is data for enfold."""

import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, BertConfig, TrainingArguments
from transformers.utils import logging

import enfold
from enfold.integrations.huggingface import DistillTrainer, EnsembleTrainer, ModelFactory, make_loader

CLASSES, WORDS = 3, 31


def make_rows(number: int, seed: int) -> Dataset:
    """Draw sentences of 9 words; the class is that of which most words occur, and some labels are wrong."""
    rng = torch.Generator().manual_seed(seed)
    words = torch.randint(1, WORDS, (number, 9), generator=rng)
    labels = torch.stack([(words % CLASSES == k).sum(1) for k in range(CLASSES)], dim=1).argmax(1)
    noise = torch.rand(number, generator=rng) < 0.1
    labels[noise] = torch.randint(CLASSES, (int(noise.sum()),), generator=rng)
    return Dataset.from_dict({"input_ids": words.tolist(), "label": labels.tolist()})


def main() -> None:
    """Train, distil and compare."""
    logging.set_verbosity_error()
    train, val, test = make_rows(600, 0), make_rows(200, 1), make_rows(600, 2)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    factory = ModelFactory(AutoModelForSequenceClassification, BertConfig(vocab_size=WORDS, num_labels=CLASSES, **size))
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no", "report_to": []}
        args = TrainingArguments(
            folder, num_train_epochs=6, learning_rate=5e-3, per_device_train_batch_size=50, use_cpu=True, **quiet
        )
        data = {"train_dataset": train, "eval_dataset": val}
        ensemble = enfold.DeepEnsemble(factory, 3)
        trainer = EnsembleTrainer(ensemble, args, **data)
        trainer.train()
        print(f"validation: NLL {trainer.evaluate()['eval_nll']:.4f}")

        student = DistillTrainer(ensemble.member(0), args, teacher=ensemble, loss=enfold.KD(temperature=2.0), **data)
        student.train()

    for name, model in {"ensemble": ensemble, "distilled": student.network}.items():
        print(enfold.evaluate(model, make_loader(test, 100), reference=ensemble, name=name))


if __name__ == "__main__":
    main()
