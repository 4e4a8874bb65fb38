"""Lightning: a Trainer trains and distils an ensemble; a data module is data for enfold, a callback collects SWAG."""

import logging
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import enfold
from enfold.integrations.lightning import CollectCallback, DistillModule, EnsembleModule


class Mini(pl.LightningDataModule):
    """Small images of clothes."""

    def setup(self, stage: str) -> None:
        """Read the images."""
        self.data = enfold.data.load("fashion-mini", train_size=1000)

    def _loader(self, part: enfold.Split, shuffle: bool = False) -> DataLoader:
        rows = TensorDataset(self.data.prepare(part.inputs), part.targets)
        return DataLoader(rows, batch_size=100, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader:
        """Return the training batches."""
        return self._loader(self.data.train, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return the validation batches."""
        return self._loader(self.data.val)

    def test_dataloader(self) -> DataLoader:
        """Return the test batches."""
        return self._loader(self.data.test)


def make_net() -> nn.Module:
    """Return a small network."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


class Classifier(pl.LightningModule):
    """A module with its own training."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the cross-entropy."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.net.parameters(), 0.1)


def make_trainer(epochs: int, **options: object) -> pl.Trainer:
    """Return a Trainer without output."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(max_epochs=epochs, accelerator="cpu", enable_model_summary=False, **quiet, **options)


def main() -> None:
    """Train, distil, collect and compare."""
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(0)
    data = Mini()
    module = EnsembleModule(enfold.DeepEnsemble(make_net, 3), lr=3e-3)
    make_trainer(6).fit(module, data)
    student = DistillModule(module.ensemble.member(0), module.ensemble, loss=enfold.KD(temperature=2.0), lr=3e-3)
    make_trainer(6).fit(student, data)

    own = Classifier()
    swag = enfold.SWAG(own.net, 5, start=0.5)
    make_trainer(6, callbacks=[CollectCallback(swag, "net")]).fit(own, data)

    for name, model in {"ensemble": module.ensemble, "distilled": student.network, "SWAG": swag}.items():
        print(enfold.evaluate(model, data, reference=module.ensemble, name=name))


if __name__ == "__main__":
    main()
