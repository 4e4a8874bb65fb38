"""The control of a distillation or merge: one member with the same extra training, on the labels.

Without it, extra training is mistaken for an effect of the ensemble: only what exceeds the control comes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from enfold.data.convert import Examples, as_data, require
from enfold.data.unpack import Unpack
from enfold.distill.teacher import as_teacher, starting_member
from enfold.ensemble import called_network
from enfold.loggers import Log, LoggerLike, with_log
from enfold.tasks import first_batch_task, task_of
from enfold.train import TrainConfig, fit
from enfold.train.config import as_config
from enfold.train.history import Epoch, warn_if_unchanged


@with_log
def train_control(
    members: nn.Module | Sequence[nn.Module],
    train: Examples,
    val: Examples | None = None,
    config: TrainConfig | None = None,
    *,
    checkpoint: str | Path | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    logger: LoggerLike | Log = None,
    title: str = "control",
    quiet: bool = False,
    unpack: Unpack | None = None,
    outputs: Callable[[Any], Tensor] | None = None,
    **settings: Any,
) -> nn.Module:
    """Train the best member on validation data further with the labels.

    Args:
        members: An ensemble of networks of one architecture, or a list of networks; they are not changed.
        train: Training examples, as for `fit`.
        val: Validation examples, as for `fit`; without them member 0 is trained.
        config: Training settings; use those of the method that the control is compared with.
        checkpoint: A file from which an interrupted training continues to the same bits.
        on_epoch: Called with the record of every epoch, an `Epoch`.
        logger: Where settings and metrics are logged to, as for `fit`.
        title: The name on the progress bar.
        quiet: Show no progress bar.
        unpack: A function that splits a batch, as for `fit`.
        outputs: A function that selects the output of a network, as for `fit`.
        **settings: Fields of `TrainConfig`, which replace those of `config`.

    Returns:
        The trained member, a network of the user's class.

    Raises:
        EnfoldError: If an argument is of the wrong kind.
    """
    require(train, "train", "train_control")
    models = as_teacher(members)
    config = as_config(config).update(settings)
    config = config.replace(task=first_batch_task(config.task or task_of(models)))
    called = called_network(models) if isinstance(models, nn.Module) else None
    data = as_data(train, val, batch_size=config.batch_size, unpack=unpack, network=called)
    network, index = starting_member(models, data, config.task)
    history = fit(
        network,
        data,
        config=config,
        checkpoint=checkpoint,
        on_epoch=on_epoch,
        logger=logger,
        title=title,
        quiet=quiet,
        outputs=outputs,
    )
    remedy = "further training on the labels does not help, or the learning rate is too high"
    warn_if_unchanged(history, "the control", f"member {index}", remedy)
    return network
