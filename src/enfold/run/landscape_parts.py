"""Parts of a run's landscape: how each is computed, and an estimate of its cost.

The cost is counted in forward passes of one example through one network; an example of a training step counts as three.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from enfold.analysis.diversity_plane import compute_diversity, compute_limits
from enfold.analysis.paths import (
    BEZIER,
    TUNNEL,
    PathScores,
    make_line,
    match_to,
    score_path,
    train_bezier,
    train_tunnel,
)
from enfold.analysis.size_curves import compare_samples_and_modes, compute_curves_by_severity
from enfold.analysis.states import (
    copy_state,
    predict_states,
    sample_indices,
    sample_split,
    select_parameters,
    unstack_states,
)
from enfold.analysis.trajectory import (
    TrajectoryStates,
    average_last,
    compute_similarity,
    load_trajectory,
    map_predictions,
    sample_around,
)
from enfold.analysis.weight_planes import make_plane, make_radial_plane, map_plane
from enfold.arguments import arguments_of
from enfold.data import Data, Split, corrupt_split
from enfold.data.dataset import length
from enfold.data.ood import Outside, noise
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.subspace_sampling import PLOT, Kind, SubspaceSampling
from enfold.errors import EnfoldError
from enfold.metrics import accuracy, decomposition, over_modes, over_subsets
from enfold.metrics.predictions import Predictions
from enfold.run.seed_run import SeedRun
from enfold.train import Trajectory
from enfold.train.batch_norm import reestimate

Arrays = dict[str, Tensor]
SAMPLED: tuple[Kind, ...] = ("random", "dropout", "gaussian", "pca", "pca_random")
SPREAD: tuple[Kind, ...] = ("gaussian", "pca")  # which need what training passed through
SHIFTED = ("gaussian_noise", "fog", "contrast")  # corruptions, where the recipe names none
SUBSETS = 70  # of one size: all of up to 8 networks
CALIBRATION = 2000  # training examples for batch-norm statistics
TRIES = 3  # attempts to draw a random sample that is accurate enough
TRAINED = 3  # cost of training on one example, in forward passes


@dataclass(frozen=True)
class PartResult:
    """The arrays of one part and a summary in plain values."""

    arrays: Arrays
    facts: dict[str, Any]


@dataclass(frozen=True)
class LandscapeContext:
    """One seed of a run, and the resolution of its analysis."""

    run: SeedRun
    examples: int = 500
    size: int = 41
    samples: int = 8  # of each kind around each network

    @cached_property
    def members(self) -> DeepEnsemble:
        """The trained members."""
        return self.run.members()

    @cached_property
    def network(self) -> nn.Module:
        """A network that every state can be loaded into."""
        return self.members.member(0)

    @cached_property
    def states(self) -> list[State]:
        """The weights of the members."""
        return unstack_states(self.members)

    @cached_property
    def trajectory(self) -> Trajectory:
        """The networks stored along the training of the members; empty if none are stored."""
        return self.run.trajectory()

    @property
    def models(self) -> list[str]:
        """The files of the steps and of their predictions that are stored."""
        steps = self.run.recipe.steps
        found = [f"{folder}/{step.label}.safetensors" for folder in ("steps", "predictions") for step in steps]
        return [name for name in found if (self.run.run.path / name).is_file()]

    @property
    def data(self) -> Data:
        """The data of the run."""
        return self.run.data

    @cached_property
    def subset(self) -> Data:
        """A subset for batch-norm statistics and for rejecting inaccurate samples."""
        few = sample_split(self.data, "val", self.examples)
        return sample_split(few, "train", CALIBRATION)

    @cached_property
    def last(self) -> int:
        """The number of networks at the end of a trajectory to average: a quarter, as published, but at least two."""
        return max(2, len(self.trajectory.epochs) // 4)

    def last_states(self, member: int) -> list[State]:
        """Return the last networks of a member's training; the last one is the member."""
        if len(self.trajectory.epochs) < 3:
            return [self.states[member]]
        return [*self.trajectory.of_member(member, self.last)[:-1], self.states[member]]

    def average_state(self, member: int) -> State:
        """Return the mean of the last networks, with batch-norm statistics of its own."""
        network = self.members.network(average_last(self.last_states(member), self.last))
        reestimate(network, self.subset)
        return copy_state(network)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of samples that can be drawn."""
        return SAMPLED if len(self.trajectory.epochs) > 2 else tuple(k for k in SAMPLED if k not in SPREAD)

    def draw_samples(self, member: int, kind: Kind, **settings: Any) -> list[State]:
        """Return samples around a member."""
        # Axes scaled to the spread of the training: the published unit axes are meant for one size of network.
        chosen = {"tries": TRIES, "seed": self.run.seed + member, "scaled": True, **settings}
        return unstack_states(
            sample_around(self.network, self.last_states(member), kind, self.samples, self.subset, **chosen)
        )

    def predict(self, states: list[State], data: Data | None = None, **settings: Any) -> Predictions:
        """Return the predictions of networks on examples of the test split."""
        return predict_states(self.network, states, data or self.data, examples=self.examples, **settings)


def analyse_similarity(context: LandscapeContext) -> PartResult:
    """Compute cosine similarity and disagreement within and between trainings."""
    if context.trajectory.epochs:
        seen = load_trajectory(context.trajectory)
    else:
        count = len(context.states)
        seen = TrajectoryStates(context.states, torch.arange(count), torch.full((count,), -1))
    found = compute_similarity(context.network, seen, context.data, examples=context.examples)
    facts: dict[str, Any] = {"trajectory": bool(context.trajectory.epochs)}
    late = seen.epoch >= (seen.epoch.max() / 2 if context.trajectory.epochs else -1)
    for name in ("cosine", "disagreement"):
        matrix = getattr(found, name)
        i, j = torch.triu_indices(len(matrix), len(matrix), offset=1)
        late_pairs, same = late[i] & late[j], found.member[i] == found.member[j]
        for where, chosen in (("within", late_pairs & same), ("between", late_pairs & ~same)):
            facts[f"{name}_{where}"] = float(matrix[i, j][chosen].mean()) if bool(chosen.any()) else None
    return PartResult(vars(found).copy(), facts)


def map_functions(context: LandscapeContext) -> PartResult:
    """Map predictions along trainings, of samples around the members, and of averaged weights, to two dimensions."""
    seen = load_trajectory(context.trajectory, start=False)  # untrained networks are far from all others
    states, member, epoch = list(seen.states), seen.member.tolist(), seen.epoch.tolist()
    names, kind = ["training", "averaged", *context.kinds], [0] * len(states)
    for index in range(len(context.states)):
        groups = {"averaged": [context.average_state(index)]}
        groups |= {name: context.draw_samples(index, name) for name in context.kinds}
        for name, group in groups.items():
            states += group
            kind += [names.index(name)] * len(group)
            member += [index] * len(group)
            epoch += [-1] * len(group)
    predictions = context.predict(states)
    arrays = {
        "pca": map_predictions(predictions, "pca"),
        "tsne": map_predictions(predictions, "tsne", seed=context.run.seed),
    }
    labels = {"member": torch.tensor(member), "epoch": torch.tensor(epoch), "kind": torch.tensor(kind)}
    return PartResult({**arrays, **labels}, {"kinds": names, "last": context.last})


def analyse_diversity(context: LandscapeContext) -> PartResult:
    """Compute the accuracy and diversity, relative to member 0, of other members, samples and steps."""
    predictions = context.predict(context.states)
    base = predictions.member(0)
    groups = (
        {"independent training": predictions.subset(range(1, predictions.num_members))}
        if predictions.num_members > 1
        else {}
    )
    norm = float(torch.stack([t.norm() for t in select_parameters(context.network, context.states[0]).values()]).norm())
    # 70 is published for a network whose weights have about this norm; there is no published value for pca_random.
    far = {**PLOT, "random": norm, "pca_random": PLOT["pca"]}
    for kind in context.kinds:
        groups[kind] = context.predict(
            context.draw_samples(0, kind, scale=far[kind], random_scale=True, threshold=None)
        )
    if len(context.trajectory.epochs) > 2:
        groups["averaged"] = context.predict([context.average_state(0)])
    for step in context.run.recipe.steps:
        stored = context.run.run.read_predictions(step.label)
        if stored is not None:
            every = stored["test"]
            few = sample_indices(len(every), context.examples)
            prefix = "ensemble" if step.family == "ensemble" else "step"
            groups[f"{prefix}: {step.label}"] = Predictions(every.log_probs[:, few], every.labels[few])
    arrays: Arrays = {}
    for name, each in groups.items():
        arrays[f"{name}/accuracy"], arrays[f"{name}/diversity"] = compute_diversity(base, each)
    bounds = compute_limits(accuracy(base), base.num_classes)
    arrays |= {f"limits/{name}": tensor for name, tensor in vars(bounds).items()}
    return PartResult(
        arrays, {"groups": list(groups), "base_accuracy": accuracy(base), "num_classes": base.num_classes}
    )


def analyse_paths(context: LandscapeContext) -> PartResult:
    """Evaluate straight, matched, curved and relaxed paths of two members, and lines within efficient ensembles."""
    first, second = context.states[:2]
    options: dict[str, Any] = {"examples": context.examples}
    data = context.subset.replace(test=context.data.test)
    found: dict[str, PathScores] = {"straight": score_path(context.network, make_line(first, second), data, **options)}
    try:
        other = match_to(context.network, first, second, context.data)
        found["matched"] = score_path(context.network, make_line(first, other), data, **options)
    except EnfoldError as problem:
        warnings.warn(f"the matched path is omitted: {problem}", stacklevel=2)
    plan = {"seed": context.run.seed, "device": context.run.device}
    curve = train_bezier(context.network, first, second, context.data, BEZIER.replace(**plan))
    found["bezier"] = score_path(context.network, curve.path(), data, **options)
    relaxed = train_tunnel(context.network, first, second, context.data, TUNNEL.replace(**plan))
    found["tunnel"] = score_path(context.network, relaxed, data, **options)
    for spec in context.run.recipe.steps_of(context.run.seed):
        if spec.family != "ensemble" or not context.run.run.is_done("steps", spec.label):
            continue
        shared = context.run.step(spec, context.members)
        if isinstance(shared, Ensemble) and shared.is_expandable and shared.num_members > 1:
            one, other = unstack_states(shared)[:2]
            found[f"ensemble: {spec.label}"] = score_path(
                shared.member(0), make_line(one, other), data, batch_norm="train", **options
            )
    arrays = {f"{name}/{key}": tensor for name, path in found.items() for key, tensor in vars(path).items()}
    barriers = {name: {key: vars(value) for key, value in path.barrier.items()} for name, path in found.items()}
    return PartResult(arrays, {"paths": list(found), "barriers": barriers})


def map_radial_plane(context: LandscapeContext) -> PartResult:
    """Compute loss, accuracy and disagreement on the plane through the origin and the first two members."""
    return _map_plane(context, make_radial_plane(context.network, *context.states[:2]))


def map_plane_of_three(context: LandscapeContext) -> PartResult:
    """Compute loss, accuracy and disagreement on the plane through the first three members."""
    return _map_plane(context, make_plane(context.network, *context.states[:3]))


def _map_plane(context: LandscapeContext, plane: Any) -> PartResult:
    found = map_plane(context.network, plane, context.data, size=context.size, examples=context.examples)
    return PartResult(vars(found).copy(), {"kind": plane.kind, "size": context.size})


def analyse_sizes(context: LandscapeContext) -> PartResult:
    """Compute scores by ensemble size for members, averaged members and samples, clean and by severity."""
    modes = _modes(context)
    shifted = {0: [context.data], **_load_shifted(context)}
    arrays: Arrays = {}
    facts: dict[str, Any] = {"severities": list(shifted), "groups": list(modes), "within": [], "subsets": SUBSETS}
    predictions: dict[str, dict[int, list[Predictions]]] = {name: {} for name in modes}
    for severity, parts in shifted.items():
        for part in parts:
            for name, states in modes.items():
                of_modes = [context.predict(mode, part) for mode in states]
                predictions[name].setdefault(severity, []).append(over_modes(of_modes))
                if severity == 0 and len(states[0]) > 1:
                    within, _ = compare_samples_and_modes(of_modes, limit=SUBSETS)
                    arrays |= {f"{name}/within/{score}": values for score, values in within.items()}
                    facts["within"].append(name)
    for name, by_severity in predictions.items():
        for severity, curves in compute_curves_by_severity(by_severity, limit=SUBSETS).items():
            arrays |= {f"{name}/{severity}/{score}": values for score, values in curves.items()}
    return PartResult(arrays, facts)


def _modes(context: LandscapeContext) -> dict[str, list[list[State]]]:
    """Return the networks of each mode: one for members and averaged members, several for samples."""
    count = range(len(context.states))
    modes = {"original": [[context.states[k]] for k in count]}
    if len(context.trajectory.epochs) > 2:
        modes["averaged"] = [[context.average_state(k)] for k in count]
    for kind in context.kinds:
        modes[kind] = [context.draw_samples(k, kind) for k in count]
    return modes


def _load_shifted(context: LandscapeContext) -> dict[int, list[Data]]:
    test, spec = context.data.test, context.run.recipe.corruptions
    if not isinstance(test, Split) or test.inputs.ndim != 4 or min(test.inputs.shape[-2:]) < 8:
        return {}
    few = sample_split(context.data, "test", context.examples)
    kinds = SHIFTED if spec is None else spec.names[:3]
    return {
        severity: [few.replace(test=corrupt_split(few, kind, severity, seed=context.run.seed)) for kind in kinds]
        for severity in (1, 3, 5)
    }


def analyse_disagreement(context: LandscapeContext) -> PartResult:
    """Compute the disagreement of equally many networks on test data, corrupted data and OOD data.

    The Jensen-Shannon divergence H[p̄] - (1/k) Σ_k H[p_k], mean over examples, over all k of a group and over modes.
    """
    sets = {"test data": [context.data]}
    sets |= {f"corrupted, severity {severity}": parts for severity, parts in _load_shifted(context).items()}
    sets |= {one.name: [context.data.replace(test=one)] for one in _ood_sets(context)}
    count = min(len(context.states), context.samples)
    arrays: Arrays = {}
    groups = {"independent trainings": [context.states]}
    groups |= {kind: [context.draw_samples(k, kind) for k in range(len(context.states))] for kind in context.kinds}
    for name, modes in groups.items():
        for where, parts in sets.items():
            predictions = [context.predict(mode, part) for part in parts for mode in modes]
            found = [over_subsets(_divergence, one, count, limit=SUBSETS) for one in predictions]
            arrays[f"{name}/{where}"] = torch.tensor(found, dtype=torch.float64).mean()
    return PartResult(arrays, {"groups": list(groups), "sets": list(sets), "networks": count})


def _divergence(predictions: Predictions) -> float:
    return float(decomposition(predictions).epistemic.mean())


def _ood_sets(context: LandscapeContext) -> list[Outside]:
    """Return the OOD sets of the recipe, or noise if it names none and inputs are images."""
    if context.run.ood_sets:
        return [one[sample_indices(len(one), context.examples)] for one in context.run.ood_sets]
    try:
        return [noise("uniform", context.data, context.examples, context.run.seed)]
    except EnfoldError:
        return []


@dataclass(frozen=True)
class LandscapePart:
    """One part of a landscape."""

    make: Callable[[LandscapeContext], PartResult]
    work: Callable[[LandscapeContext], float]
    members: int = 2  # minimum number
    needs_trajectory: bool = False
    of_models: bool = False  # computed again if there are new steps
    of_samples: bool = False  # computed again if there are new kinds of samples


def _train_size(context: LandscapeContext) -> int:
    size = length(context.data.train) or 0
    return size if isinstance(context.data.train, Split) else 128 * size


def _networks(context: LandscapeContext) -> int:
    return len(context.states) * max(len(context.trajectory.epochs), 1)


def _drawing(context: LandscapeContext) -> int:
    """Return the cost of drawing samples that are accurate enough, including those that pca_random is fitted to."""
    fitted: int = arguments_of(SubspaceSampling)["fitted"].default
    return TRIES * len(context.states) * (context.samples + fitted) * context.examples


LANDSCAPE_PARTS: dict[str, LandscapePart] = {
    "similarity": LandscapePart(analyse_similarity, lambda s: _networks(s) * s.examples),
    "diversity": LandscapePart(
        analyse_diversity,
        lambda s: (len(s.states) + len(s.kinds) * s.samples) * s.examples,
        of_models=True,
        of_samples=True,
    ),
    "map": LandscapePart(
        map_functions,
        lambda s: (_networks(s) + len(s.states) * len(s.kinds) * s.samples) * s.examples + _drawing(s),
        needs_trajectory=True,
        of_samples=True,
    ),
    "radial": LandscapePart(map_radial_plane, lambda s: s.size**2 * s.examples),
    "three": LandscapePart(map_plane_of_three, lambda s: s.size**2 * s.examples, members=3),
    "sizes": LandscapePart(
        analyse_sizes,
        lambda s: 10 * len(s.states) * (len(s.kinds) * s.samples + 2) * s.examples + _drawing(s),
        of_samples=True,
    ),
    "ood": LandscapePart(
        analyse_disagreement,
        lambda s: 11 * len(s.states) * (len(s.kinds) * s.samples + 1) * s.examples + _drawing(s),
        of_samples=True,
    ),
    "paths": LandscapePart(
        analyse_paths, lambda s: TRAINED * (BEZIER.epochs + 9 * TUNNEL.epochs) * _train_size(s), of_models=True
    ),
}
