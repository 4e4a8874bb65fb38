"""Learn the soft permutations of permAVG, in one training or by adding members one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from enfold.data import Data
from enfold.engines.modes import eval_mode
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.io.files import digest, part_file
from enfold.loggers import Log
from enfold.merge.common.ensemble_loss import EnsembleLoss
from enfold.merge.common.sinkhorn import Gradient
from enfold.merge.common.soft import Balance, SoftAverage
from enfold.merge.common.soft_permutations import (
    AnnealedObjective,
    Mixing,
    distinct_members,
    find_mixable,
    identity_matrices,
    matching_matrices,
    random_matrices,
    warn_if_singular,
)
from enfold.merge.common.solve import Inverse
from enfold.progress import part
from enfold.symmetry import Symmetry
from enfold.train import Epoch, Objective, TaskLoss, TrainConfig, fit

LearningOrder = Literal["sequential", "joint"]
Start = Literal["identity", "random"]
PUBLISHED = TrainConfig(epochs=20, optimizer="adam", lr=0.1, schedule="cosine", weight_decay=0.0)


@dataclass(frozen=True)
class PermutationOptions:
    """The options of `enfold.merge.perm_avg` that concern learning; they are documented and checked there."""

    temperature: float = 1.0
    final_temperature: float | None = None
    iterations: int = 100
    tolerance: float = 1e-8
    gradient: Gradient = "unrolled"
    warm: bool = False
    ridge: float = 0.0
    matched: float | None = None
    start: Start = "identity"
    inverse: Inverse = "exact"
    order: LearningOrder = "sequential"
    universe: bool = False
    alpha: float = 0.0
    mixing: Mixing = "equal"
    gain: bool = False
    measure_statistics: bool = True
    config: TrainConfig = PUBLISHED

    def stages(self, count: int) -> list[tuple[int, int]]:
        """Return the first of the members that are learned in each training, and one after the last."""
        first = 0 if self.universe else 1
        if self.order == "joint":
            return [(first, count)]
        return [(first, 2), *((k, k + 1) for k in range(2, count))]


def find_groups(ensemble: Ensemble, data: Data, options: PermutationOptions) -> tuple[Ensemble, Symmetry]:
    """Return the members, with units matched that only permutations may move, and the groups that may be mixed."""
    return find_mixable(ensemble, data, options.config.seed, matched=options.matched is not None)


def learn_permutations(
    ensemble: Ensemble,
    data: Data,
    symmetry: Symmetry,
    options: PermutationOptions,
    *,
    checkpoint: str | Path | None = None,
    quiet: bool = False,
    on_epoch: Callable[[Epoch], None] | None = None,
    log: Log | None = None,
) -> SoftAverage | None:
    """Return the members of `find_groups` with learned soft permutations, or None if there is nothing to learn.

    Args:
        ensemble: The ensemble.
        data: The data.
        symmetry: The groups of units.
        options: The options of permAVG.
        checkpoint: File of the training checkpoint, from which an interrupted training continues.
        quiet: Show no progress bar.
        on_epoch: Function called with the record of every epoch.
        log: Where settings and metrics are logged to, with a part for each training.
    """
    states, counts = distinct_members(ensemble)
    if not symmetry.groups or len(states) == 1:  # members that differ in statistics only
        return None
    checkpoint = None if checkpoint is None else Path(checkpoint)
    stages, config = options.stages(len(states)), options.config
    files = [checkpoint and part_file(checkpoint, last) if last < len(states) else checkpoint for _, last in stages]
    begin = max((k for k, file in enumerate(files) if file is not None and file.exists()), default=0)
    model: SoftAverage | None = None
    with eval_mode(ensemble):
        inner = _loss(ensemble, data, options)
        ends = options.temperature, options.final_temperature or options.temperature
        for (first, last), file in list(zip(stages, files, strict=True))[begin:]:
            model = _stage(ensemble, states[:last], counts[:last], symmetry, options, first, model)
            if options.measure_statistics:
                model.measure_statistics(data)
            model.made_from = digest(tensor for state in states[:last] for tensor in state.values())
            objective = AnnealedObjective(inner, repr(options), last, ends, options.mixing)
            with part(f"members 1 to {last}" if first < 2 else f"member {last} is added"):
                fit(
                    model,
                    data,
                    config=config,
                    objective=objective,
                    checkpoint=file,
                    on_epoch=on_epoch,
                    logger=log if log is None or len(stages) == 1 else log.part(f"members_to_{last}"),
                    title="perm_avg",
                    quiet=quiet,
                )
            if options.inverse == "exact":
                warn_if_singular(model)
    for file in filter(None, files[:-1]):
        file.unlink(missing_ok=True)
    return model


def _stage(
    ensemble: Ensemble,
    states: Sequence[State],
    counts: Sequence[int],
    symmetry: Symmetry,
    options: PermutationOptions,
    first: int,
    before: SoftAverage | None,
) -> SoftAverage:
    """Return the model of one training; if it continues from a checkpoint, fixed matrices are read from there."""
    own, learned = states[first:], set(ensemble.skeleton.parameters)
    like = states[0][symmetry.groups[0].axes[0].name]
    scores = identity_matrices(symmetry, len(own), like)
    if options.start == "random":
        scores = random_matrices(symmetry, range(first, len(states)), options.config.seed, like)
    if options.matched is not None:
        seed = options.config.seed
        scores = [options.matched * each for each in matching_matrices(states[0], own, symmetry, learned, seed, like)]
    settled = identity_matrices(symmetry, first if options.universe else first - 1, like)
    gains = [torch.ones(group.size).to(like) for group in symmetry.groups] if options.gain else []
    if before is not None:
        settled, gains = before.all_matrices(), [gain.detach() for gain in before.gains]
    return SoftAverage(
        ensemble,
        states,
        [count / sum(counts) for count in counts],
        symmetry.groups,
        scores,
        settled,
        gains,
        temperature=options.temperature,
        balance=Balance(options.iterations, options.tolerance, options.gradient, options.warm, options.ridge),
        inverse=options.inverse,
    )


def _loss(ensemble: Ensemble, data: Data, options: PermutationOptions) -> Objective:
    config = options.config
    smoothing = config.per_member("label_smoothing", 1)
    if not options.alpha:
        return TaskLoss(config.task, smoothing[0])
    is_constant = not config.augment
    return EnsembleLoss(ensemble, data, options.alpha, smoothing[0], constant_inputs=is_constant, task=config.task)
