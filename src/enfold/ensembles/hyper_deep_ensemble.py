"""HyperDeepEnsemble: members that differ in hyper-parameters and seeds, selected from a random search.

    1. search    κ networks, each with its own seed and λ_k; λ_0 is that of the training     (1)
    2. select    greedily and with replacement, by the validation NLL of
                 p̄ = Σ_k w_k p_k,   w_k = selections of k / all selections,                  (2)
                 until K different networks are selected or nothing improves
    3. stratify  train each selected λ with K new seeds, and select again from these         (3)

F. Wenzel, J. Snoek, D. Tran, R. Jenatton: Hyperparameter Ensembles for Robustness and Uncertainty Quantification,
NeurIPS 2020, arXiv:2006.13570.

All hyper-parameters are drawn log-uniformly. The published range of the weight decay, 1e-2/N to 1e2/N with N = 47,500,
is 1e-3 to 10 times the published default.

A network that was selected twice counts as two members, so that the mean over members is (2): after training there may
be more members than the K networks that are stored. If fewer than K different networks were selected, a warning is
given, and the remaining ones count as 0 members.

Differs from the paper: a candidate has one weight decay for all layers, not six; there are at most 64 selections; the
training configuration determines the epoch of a candidate. The public code omits step 3 and, if it selects by accuracy,
selects the worst.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveInt
from torch import nn

from enfold.arguments import checked
from enfold.data import Data
from enfold.data.dataset import has_examples
from enfold.engines.base import EngineName
from enfold.engines.copying import copy_network
from enfold.ensembles.common.efficient import refuse_ties
from enfold.ensembles.common.search import FewerCandidatesWarning, Pool, Setting, WeightedEnsemble
from enfold.ensembles.deep_ensemble import Factory
from enfold.errors import EnfoldError, level_outside
from enfold.loggers import Log, LoggerLike, as_log
from enfold.metrics.greedy import Goal, greedy_selection
from enfold.seeds import generator
from enfold.tasks import may_have_classes
from enfold.train import Epoch, History, TrainConfig
from enfold.train.diversity import warn_if_similar


@checked
class HyperDeepEnsemble(WeightedEnsemble):
    """Members that differ in hyper-parameters and seeds, selected from a random search.

    After training, `counts` has how often each network was selected, and `settings` its learning rate, weight decay and
    label smoothing.

    Args:
        network: The network, or a function that makes one.
        num_members: K: the largest number of different networks.
        candidates: κ: the number of networks that the search trains.
        weight_decay: The range of factors on the weight decay of the training; None: no search.
        label_smoothing: The range of label smoothing; None: that of the training.
        lr: The range of factors on the learning rate of the training; None: no search.
        goal: The score by which networks are selected on validation data.
        stratify: Step 3: the selected hyper-parameters are trained again with K new seeds each.
        chunk: The number of candidates that are trained together.
        seed: The seed of the search.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module | Factory,
        num_members: PositiveInt = 4,
        *,
        candidates: PositiveInt = 100,
        weight_decay: tuple[float, float] | None = (1e-3, 10.0),
        label_smoothing: tuple[float, float] | None = (1e-5, 0.2),
        lr: tuple[float, float] | None = None,
        goal: Goal = "nll",
        stratify: bool = True,
        chunk: PositiveInt = 10,
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        if not stratify and candidates < num_members:
            raise EnfoldError(
                f"candidates must be at least num_members={num_members} without stratify, got {candidates}: raise it"
            )
        ranges = {"weight_decay": weight_decay, "lr": lr, "label_smoothing": label_smoothing}
        for name, limits in ranges.items():
            below = 1.0 if name == "label_smoothing" else math.inf
            if limits is not None and not 0 < limits[0] <= limits[1] < below:
                rule = f"(low, high) with 0 < low <= high < {below}"
                raise EnfoldError(f"{name} must be {rule}, got {limits!r}: change it, or pass None")
        if isinstance(network, nn.Module):
            refuse_ties(network)
        super().__init__(network, num_members, seed, engine)
        self.size = num_members  # K; num_members is the number of selections after training
        self.candidates, self.goal, self.stratify, self.chunk, self.seed = candidates, goal, stratify, chunk, seed
        self.weight_decay, self.label_smoothing, self.lr = weight_decay, label_smoothing, lr
        # In a tuple, so that it is not a submodule: candidates are drawn from what was given.
        self._source = (copy_network(network) if isinstance(network, nn.Module) else network,)

    def options(self) -> dict[str, Any]:
        """Return the options of the constructor; `num_members` is K."""
        return {**super().options(), "num_members": self.size}

    @property
    def training_cost(self) -> float:
        """All candidates, and each selected setting again with K seeds, relative to training K networks."""
        return (self.candidates + (self.size**2 if self.stratify else 0)) / self.size

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Refuse tasks without classes, whose candidates have neither label smoothing nor a goal."""
        if not may_have_classes(config.task):
            raise EnfoldError(
                "HyperDeepEnsemble selects candidates by predictions of classes, got task='regression': use "
                "DeepEnsemble, or HyperBatchEnsemble"
            )
        return config

    def candidate_settings(self, config: TrainConfig) -> list[Setting]:
        """Return the hyper-parameters of the candidates, (1); those of candidate k depend on the seed and k only."""
        for name in Setting._fields:
            value = getattr(config, name)
            if isinstance(value, tuple):
                raise EnfoldError(f"{name} must be one number for a search, got {value!r}: pass a number")
        plain = Setting(*(float(getattr(config, name)) for name in Setting._fields))
        return [plain, *(self._draw_setting(plain, index) for index in range(1, self.candidates))]

    def _draw_setting(self, plain: Setting, index: int) -> Setting:
        drawn: dict[str, float] = {}
        for name, value in plain._asdict().items():
            limits = getattr(self, name)
            if limits is not None:
                purpose = "learning_rate" if name == "lr" else name
                place = float(torch.rand((), generator=generator(self.seed, "hyper_deep_ensembles", purpose, index)))
                sampled = limits[0] * (limits[1] / limits[0]) ** place  # log-uniform
                drawn[name] = sampled if name == "label_smoothing" else value * sampled
        return plain._replace(**drawn)

    def fit_members(
        self,
        data: Data,
        config: TrainConfig,
        *,
        checkpoint: Path | None,
        title: str,
        quiet: bool,
        on_epoch: Callable[[Epoch], None] | None = None,
        logger: LoggerLike | Log = None,
    ) -> History:
        """Search, select and store the members; every chunk of candidates has a file beside `checkpoint`.

        Args:
            data: The data.
            config: The training settings.
            checkpoint: File of the training checkpoint, from which an interrupted training continues.
            title: The title of the progress bar.
            quiet: Show no progress bar.
            on_epoch: Function called with the record of every epoch of every chunk.
            logger: Where settings and metrics are logged to, with a part for each chunk.
        """
        if not has_examples(data.val):
            raise EnfoldError("val must be given, as candidates are selected on validation data, got None: pass val")
        settings = self.candidate_settings(config)
        network = self._source[0]
        pool = Pool(network, data, config, self.chunk, self.seed, self.engine, checkpoint, title, quiet)
        pool.on_epoch, pool.log = on_epoch, as_log(logger)
        candidates = pool.train("search", settings, keep=not self.stratify)  # (1)
        selection = greedy_selection(candidates, self.size, self.goal)  # (2)
        if self.stratify:
            settings = [settings[index] for index in selection.counts for _ in range(self.size)]
            candidates = pool.train("stratify", settings, keep=True)
            selection = greedy_selection(candidates, self.size, self.goal)  # (3)
        chosen, counts = list(selection.counts), list(selection.counts.values())
        self.set_networks([pool.networks[index] for index in chosen], counts, [settings[index] for index in chosen])
        self.to(config.device).eval()
        if checkpoint is None:
            pool.clear()
        if self.notice:
            warnings.warn(self.notice, FewerCandidatesWarning, stacklevel=level_outside())
        warn_if_similar(self, data)
        return pool.history
