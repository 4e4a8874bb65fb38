"""`fit`: train a network or an ensemble on the user's data, in this process or in blocks on workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from enfold.data.convert import Examples, as_data, require
from enfold.data.unpack import Unpack
from enfold.engines.call import require_network
from enfold.engines.modes import refuse_inference_mode
from enfold.ensemble import called_network, set_model_output
from enfold.executors import ExecutorLike
from enfold.loggers import Log, LoggerLike, as_log, with_log
from enfold.tasks import training_task
from enfold.train.blocks import fit_blocks, refuse_arguments
from enfold.train.config import TrainConfig, as_config
from enfold.train.history import Epoch, History
from enfold.train.loop import train_model
from enfold.train.objective import Objective
from enfold.train.trajectory import Trajectory


@with_log
def fit(
    model: nn.Module,
    train: Examples,
    val: Examples | None = None,
    config: TrainConfig | None = None,
    *,
    objective: Objective | None = None,
    checkpoint: str | Path | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    logger: LoggerLike | Log = None,
    title: str = "training",
    quiet: bool = False,
    evaluated_model: Callable[[nn.Module], nn.Module] | None = None,
    trajectory: Trajectory | str | Path | None = None,
    unpack: Unpack | None = None,
    outputs: Callable[[Any], Tensor] | None = None,
    executor: ExecutorLike = None,
    **settings: Any,
) -> History:
    """Train a network or an ensemble in place.

    ``fit(model, train, val, epochs=20, lr=1e-3)`` is short for ``fit(model, train, val, TrainConfig(epochs=20,
    lr=1e-3))``.

    Args:
        model: A network, or an `Ensemble`, whose members are trained together.
        train: Training examples: a DataLoader, a Dataset, a pair (inputs, targets) of tensors or arrays, or the data of
            `enfold.data.load`, whose validation split is then used as well.
        val: Validation examples in the same formats; they select the best epoch and are evaluated after every epoch,
            in eval mode.
        config: Settings of the training; the default is `TrainConfig()`.
        objective: The loss to minimize; the default is the loss of the task, such as cross-entropy.
        checkpoint: File to save to after every epoch. If it exists, training resumes from it with bitwise equal
            results; other data, initial weights or settings are refused.
        on_epoch: Function called with the record of every epoch, an `Epoch`.
        logger: Where settings and metrics are logged to: "tensorboard", "wandb", "mlflow", an object with the methods
            of `enfold.loggers.Logger`, or a list of these.
        title: Title of the progress bar.
        quiet: Show no progress bar.
        evaluated_model: Function that maps the model to the one that is evaluated on validation examples.
        trajectory: Folder to save the networks to after every epoch, or a `Trajectory` that selects epochs.
        unpack: Function that splits a batch of a loader into (inputs, target) or (inputs, target, weights); None for
            the usual structures: tuples, dictionaries with `labels`, objects with `y`.
        outputs: Function that selects the output that is trained from what the network returns; None for a tensor, a
            tuple of one tensor, or the entry `logits`.
        executor: Where blocks of independent members are trained: "serial", "local", "ray", "auto", an executor of
            `concurrent.futures`, or `enfold.executors.Parallel` with its options; None to train all members together
            in this process.
        **settings: Fields of `TrainConfig` that override those of `config`.

    Returns:
        The history of the training: losses, validation scores and times of every epoch.

    Raises:
        EnfoldError: If an argument is invalid; the model is unchanged then.
        NonFiniteLoss: If a loss becomes NaN or infinite.
        FailedMembers: If members fail on an executor; the model is unchanged, and the error has the others.
    """
    refuse_inference_mode("training")
    require_network(model)
    require(train, "train", "fit")
    config = as_config(config).update(settings)
    config = config.replace(task=training_task(model, config.task))
    data = as_data(train, val, batch_size=config.batch_size, unpack=unpack, network=called_network(model))
    if outputs is not None:
        set_model_output(model, outputs)
    file = Path(checkpoint) if checkpoint else None
    if executor is not None:
        refuse_arguments(on_epoch=on_epoch, evaluated_model=evaluated_model, trajectory=trajectory)
        return fit_blocks(model, data, config, objective, file, executor, title=title, quiet=quiet, log=as_log(logger))
    return train_model(
        model,
        data,
        config,
        objective,
        file,
        on_epoch=on_epoch,
        log=as_log(logger),
        title=title,
        quiet=quiet,
        evaluated_model=evaluated_model,
        trajectory=Trajectory(trajectory) if isinstance(trajectory, str | Path) else trajectory,
    )
