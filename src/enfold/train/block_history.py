"""The history of an ensemble from those of blocks of its members."""

from __future__ import annotations

from collections.abc import Sequence

from enfold.train.history import Epoch, History


def join_histories(histories: Sequence[History], sizes: Sequence[int]) -> History:
    """Return the history of all members.

    Losses and scores of the ensemble are not known, as no process has all members while they are trained. A block that
    stopped earlier keeps the values of its last epoch.

    Args:
        histories: The history of each block.
        sizes: The number of members of each.
    """
    first = histories[0]
    count = max(len(history.epochs) for history in histories)
    epochs = [
        _join([history.epochs[min(index, len(history.epochs) - 1)] for history in histories], index)
        for index in range(count)
    ]
    starts = [history.start for history in histories if history.start is not None]
    start = _join(starts, -1) if len(starts) == len(histories) else None
    chosen = [
        epoch for history, size in zip(histories, sizes, strict=True) for epoch in _expanded(history.chosen, size)
    ]
    return History(epochs, chosen, start, first.criterion, first.score)


def _join(records: Sequence[Epoch], index: int) -> Epoch:
    longest = max(records, key=lambda record: record.epoch)
    return Epoch(
        index,
        [value for record in records for value in record.train_loss],
        [value for record in records for value in record.validation_loss],
        [value for record in records for value in record.validation_score],
        ensemble_loss=None,
        lr=longest.lr,
        seconds=sum(record.seconds for record in records),
        steps=longest.steps,
        calibrated_loss=[value for record in records for value in record.calibrated_loss],
    )


def _expanded(chosen: list[int], size: int) -> list[int]:
    return chosen * size if len(chosen) == 1 < size else chosen
