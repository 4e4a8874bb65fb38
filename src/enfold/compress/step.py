"""compress as a step of a recipe: a search on validation examples for the network to ship.

Merges and distillations of the members are tried, and the best on validation examples is the result; see
`enfold.compress`. Its table and explanation are written beside the run's results, in the folder `compress`.
"""

from __future__ import annotations

from pathlib import Path

from enfold.compress.call import compress
from enfold.compress.result import Compression
from enfold.compress.search import Effort
from enfold.data import Data
from enfold.ensemble import Ensemble
from enfold.train import TrainConfig


def compress_members(
    models: Ensemble,
    train: Data,
    *,
    time: str | None = None,
    routes: Effort = "default",
    train_longer: bool = False,
    config: TrainConfig | None = None,
    checkpoint: Path | None = None,
    quiet: bool = False,
) -> Compression:
    """Find the network to ship in place of the members.

    Args:
        models: The members.
        train: The data.
        time: Limit of the search, such as "30 min"; None for none.
        routes: "default", or "all" to include routes that take several times as long.
        train_longer: Train members longer first if that helps a member more than the ensemble does.
        config: Settings of training.
        checkpoint: Folder in which finished trials are stored.
        quiet: Show no progress bars.
    """
    return compress(
        models,
        train,
        time=time,
        routes=routes,
        train_longer=train_longer,
        folder=checkpoint,
        config=config,
        quiet=quiet,
    )
