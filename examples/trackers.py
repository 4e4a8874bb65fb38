"""Trackers: members and a student in TensorBoard, with a logger of your own beside it and a function for each epoch."""

from pathlib import Path

import enfold
from enfold.loggers import TensorBoard
from enfold.networks import MLP


class BestEpoch:
    """A logger: any object with these three methods."""

    def __init__(self) -> None:
        self.best = {}

    def log_settings(self, settings: dict) -> None:
        """Receive the settings of a training."""
        self.settings = settings

    def log_metrics(self, metrics: dict, step: int) -> None:
        """Record the epoch with the lowest validation NLL."""
        nll = metrics.get("val/nll", float("inf"))
        if nll < self.best.get("nll", float("inf")):
            self.best = {"nll": nll, "epoch": step}

    def close(self) -> None:
        """Print the best epoch at the end of a training."""
        print(f"best epoch: {self.best['epoch']} with NLL {self.best['nll']:.4f}")


def main() -> None:
    """Train, distill and evaluate with two loggers."""
    data = enfold.data.load("digits")
    ensemble = enfold.DeepEnsemble(lambda: MLP(64, [32], 10), 3)
    seconds = []
    enfold.fit(
        ensemble,
        data,
        epochs=15,
        lr=1e-2,
        logger=[TensorBoard("runs/trackers/members"), BestEpoch()],
        on_epoch=lambda epoch: seconds.append(epoch.seconds),
    )
    settings = {"epochs": 15, "lr": 3e-3, "logger": [TensorBoard("runs/trackers/student"), BestEpoch()]}
    student = enfold.distill(ensemble, data, **settings)
    print(f"epochs: {len(seconds)}")
    print(f"ensemble: {enfold.evaluate(ensemble, data.test)}")
    print(f"distilled: {enfold.evaluate(student, data.test, reference=ensemble)}")
    files = sorted(Path("runs/trackers").rglob("events*"))
    print(f"tensorboard --logdir runs/trackers  # {len(files)} files")


if __name__ == "__main__":
    main()
