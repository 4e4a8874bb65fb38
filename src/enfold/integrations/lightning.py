"""Lightning: modules that train and distil ensembles, and a callback that collects members.

    module = EnsembleModule(DeepEnsemble(make_net, 4), lr=1e-3)
    Trainer(max_epochs=20).fit(module, datamodule)            # module.ensemble is trained
    student = DistillModule(make_net(), module.ensemble, loss=KD(temperature=2.0))
    Trainer(max_epochs=20).fit(student, datamodule)           # student.network is one network
    Trainer(max_epochs=20, callbacks=[CollectCallback(SWAG(mine.net), "net")]).fit(mine, datamodule)

`enfold.integrations.pytorch_lightning` has the same classes for the package `pytorch_lightning`.
"""

from __future__ import annotations

from enfold.errors import MissingExtra
from enfold.integrations.lightning_base import CollectHooks, DistillHooks, EnsembleHooks

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise MissingExtra("lightning", "lightning", "enfold.integrations.lightning") from error


class EnsembleModule(EnsembleHooks, pl.LightningModule):  # type: ignore[misc]
    """An ensemble that is trained by the Trainer of Lightning.

    The number of epochs is `max_epochs` of the Trainer, and the order of the examples is that of the loader, for all
    members. The loss is the sum of the members' losses. Metrics of all validation examples are logged as `val_nll` and
    so on, for the mean prediction.

    Args:
        ensemble: The ensemble; it is trained in place, and its callbacks are called as by `fit`.
        config: Settings of optimizer, schedule, loss and task; the default is `TrainConfig()`.
        unpack: A function that splits a batch, as for `fit`.
        outputs: A function that selects the output of a network, as for `fit`.
        **settings: Fields of `TrainConfig`, which replace those of `config`.

    Raises:
        EnfoldError: If a setting is one of the Trainer, or the ensemble is not trained on batches.
    """


class DistillModule(DistillHooks, pl.LightningModule):  # type: ignore[misc]
    """A student that is trained by the Trainer of Lightning to match a teacher.

    Args:
        student: What is trained, in place: a network with its weights, or an ensemble.
        teacher: An ensemble, a network or a list of networks. It is not trained and not part of checkpoints.
        config: Settings of optimizer, schedule, loss and task; the default is `TrainConfig()`.
        loss: The distillation loss; the default is `KD()`.
        perturb: A perturbation of the inputs, the same for teacher and student.
        unpack: A function that splits a batch, as for `fit`.
        outputs: A function that selects the output of the student, as for `fit`.
        **settings: Fields of `TrainConfig`, which replace those of `config`.

    Raises:
        EnfoldError: If an argument is of the wrong kind, or a setting is one of the Trainer.
    """


class CollectCallback(CollectHooks, pl.Callback):  # type: ignore[misc]
    """Collect the members of an ensemble while the Trainer trains a module of your own.

    For `SWA`, `SWAG`, `SnapshotEnsemble`, `FGE` and others whose members are collected along one training. The module
    has its own loss, optimizer and schedule: for snapshots use one with restarts, for SWA a constant rate at the end.

    Args:
        ensemble: The ensemble, made from the network of the module: ``SWAG(module.net)``.
        network: The name of the network in the module, or a function from the module to the network.
        unpack: A function that splits a batch, as for `fit`; used where batch-norm statistics are estimated.

    Raises:
        EnfoldError: If the members are not collected along one training.
    """
