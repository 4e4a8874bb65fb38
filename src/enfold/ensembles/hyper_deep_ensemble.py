"""Hyper-deep ensembles: members that differ in hyper-parameters and seeds, picked from a random search.

    1. search    κ networks, each with its own seed and its own λ_k; λ_0 is the plan's       (1)
    2. select    greedily and with replacement, by the validation NLL of
                 p̄ = Σ_k w_k p_k,   w_k = picks of k / all picks,                            (2)
                 until K different networks are picked or nothing gets better
    3. stratify  train each λ that was picked with K new seeds, and select again from these  (3)

F. Wenzel, J. Snoek, D. Tran, R. Jenatton: Hyperparameter Ensembles for Robustness and Uncertainty Quantification,
NeurIPS 2020, arXiv:2006.13570.

`weight_decay` and `lr` are ranges of factors on the plan's values, `label_smoothing` is one of values; all
are drawn log-uniformly, and None leaves the plan's. The published range of the weight decay, 1e-2/N to 1e2/N with
N = 47,500, is 1e-3 to 10 times the published default.

A network that was picked twice counts as two members, so that the plain mean over members is (2): after training
there may be more members than the `num_members` networks that are stored. Where fewer different ones were picked, a
warning says so, and the rest of the room holds networks that count nothing. `counts` says how often each was picked and
`settings` its learning rate, weight decay and label smoothing.

Differs from the paper: a candidate has one weight decay for all layers, not six; there are at most 64 picks; the plan
says which epoch a candidate keeps. The public code leaves out step 3 and, where it is asked to select by accuracy,
selects the worst.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from enfold.data import Data
from enfold.data.dataset import has_examples
from enfold.engines.base import EngineName
from enfold.ensembles.common.search import Chosen, FewerCandidatesWarning, Pool, Setting
from enfold.ensembles.common.sharing import Share, refuse_ties, require_size
from enfold.errors import EnfoldError
from enfold.metrics.greedy import Goal, greedy_selection
from enfold.seeds import generator
from enfold.train import TrainConfig
from enfold.train.diversity import warn_if_alike


@dataclass(frozen=True)
class HyperDeepEnsemble(Share):
    """Members that differ in hyper-parameters and seeds, picked from a random search."""

    num_members: int = 4  # K: how many different networks, at most; in a run, as many as the run has
    candidates: int = 100  # κ: how many networks the search trains
    weight_decay: tuple[float, float] | None = (1e-3, 10.0)  # range of factors on the plan's; None: the plan's
    label_smoothing: tuple[float, float] | None = (1e-5, 0.2)  # range of values; None: the plan's
    lr: tuple[float, float] | None = None  # range of factors on the plan's; None: the plan's
    goal: Goal = "nll"  # what is picked by, on validation data
    stratify: bool = True  # step 3: what was picked is trained again with K new seeds each
    chunk: int = 10  # candidates trained at once
    seed: int = 0
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        if self.candidates < (1 if self.stratify else self.num_members):
            raise EnfoldError(
                f"a search for {self.num_members} members must have as many candidates, or at least 1 and "
                f"stratify: true, got candidates={self.candidates}: raise it"
            )
        if self.chunk < 1:
            raise EnfoldError(f"at least 1 candidate is trained at once, got chunk={self.chunk}: pass chunk >= 1")
        if self.goal not in get_args(Goal):
            raise EnfoldError(f"the goal must be one of {', '.join(get_args(Goal))}, got {self.goal!r}: choose one")
        for name, below in (("weight_decay", math.inf), ("lr", math.inf), ("label_smoothing", 1.0)):
            limits = getattr(self, name)
            if limits is not None and not (len(limits) == 2 and 0 < limits[0] <= limits[1] < below):
                rule = f"(low, high) with 0 < low <= high < {below}"
                raise EnfoldError(f"the range of {name} must be {rule}, got {limits!r}: change it, or pass None")

    def __call__(self, network: nn.Module) -> Chosen:
        """Fresh networks of the network's kind, as many as there is room for, each counting once."""
        refuse_ties(network)
        members = Chosen(network, self.num_members, self.seed, self.engine)
        members.share = self
        return members

    def settings(self, plan: TrainConfig) -> list[Setting]:
        """What the candidates of (1) are trained with; candidate k's draws depend on the seed and k alone."""
        for name in Setting._fields:
            value = getattr(plan, name)
            if isinstance(value, tuple):
                raise EnfoldError(
                    f"a search draws each candidate's values itself, got the plan's {name}={value!r}: pass one number"
                )
        plain = Setting(*(float(getattr(plan, name)) for name in Setting._fields))
        return [plain, *(self._drawn(plain, index) for index in range(1, self.candidates))]

    def _drawn(self, plain: Setting, index: int) -> Setting:
        drawn: dict[str, float] = {}
        for name, value in plain._asdict().items():
            limits = getattr(self, name)
            if limits is not None:
                purpose = "learning_rate" if name == "lr" else name
                place = float(torch.rand((), generator=generator(self.seed, "hyper_deep_ensembles", purpose, index)))
                found = limits[0] * (limits[1] / limits[0]) ** place  # log-uniform
                drawn[name] = found if name == "label_smoothing" else value * found
        return plain._replace(**drawn)

    @property
    def effort(self) -> float:
        """All candidates, and each chosen setting again with K seeds, in trainings of K networks."""
        return (self.candidates + (self.num_members**2 if self.stratify else 0)) / self.num_members

    def train(
        self,
        network: nn.Module,
        data: Data,
        plan: TrainConfig | None = None,
        *,
        checkpoint: Path | None = None,
        title: str | None = None,
        quiet: bool = False,
    ) -> Chosen:
        """The members picked; every chunk of candidates leaves its checkpoint beside `checkpoint`, as `fit` does."""
        plan = self.adapted(plan or TrainConfig())
        if not has_examples(data.val):
            raise EnfoldError("candidates are picked by what they say about validation data, got none: pass some")
        settings, members, name = self.settings(plan), self(network), title or type(self).__name__
        pool = Pool(network, data, plan, self.chunk, self.seed, self.engine, checkpoint, name, quiet)
        candidates = pool.train("search", settings, keep=not self.stratify)  # (1)
        found = greedy_selection(candidates, self.num_members, self.goal)  # (2)
        if self.stratify:
            settings = [settings[index] for index in found.counts for _ in range(self.num_members)]
            found = greedy_selection(pool.train("stratify", settings, keep=True), self.num_members, self.goal)  # (3)
        chosen, counts = list(found.counts), list(found.counts.values())
        members.choose([pool.networks[index] for index in chosen], counts, [settings[index] for index in chosen])
        members.to(plan.device).eval()
        if checkpoint is None:
            pool.clear()
        if members.notice:
            warnings.warn(members.notice, FewerCandidatesWarning, stacklevel=2)
        warn_if_alike(members, data)
        return members
