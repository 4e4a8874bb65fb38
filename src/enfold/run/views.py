"""Views: what each part of a run's landscape is made from, and how much work it is.

Work is counted in examples that one network is asked about; a step of training counts as three.
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
CALIBRATION = 2000  # training examples that batch-norm statistics are measured on
TRIES = 3  # for a random sample that is accurate enough
TRAINED = 3  # examples asked about that one example trained on costs


@dataclass(frozen=True)
class Found:
    """The arrays of one part, and what they say in plain values."""

    arrays: Arrays
    facts: dict[str, Any]


@dataclass(frozen=True)
class Scene:
    """One seed of a run, and how closely it is looked at."""

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
        """What all states are values of."""
        return self.members.member(0)

    @cached_property
    def states(self) -> list[State]:
        """The members one by one."""
        return unstack_states(self.members)

    @cached_property
    def trajectory(self) -> Trajectory:
        """What they passed through; maybe nothing."""
        return self.run.trajectory()

    @property
    def models(self) -> list[str]:
        """The files of the steps and of their predictions that are stored."""
        steps = self.run.recipe.steps
        found = [f"{folder}/{step.label}.safetensors" for folder in ("steps", "predictions") for step in steps]
        return [name for name in found if (self.run.run.path / name).is_file()]

    @property
    def data(self) -> Data:
        """All of it."""
        return self.run.data

    @cached_property
    def few(self) -> Data:
        """Enough to measure batch-norm statistics on, and to see whether a sample is any good."""
        few = sample_split(self.data, "val", self.examples)
        return sample_split(few, "train", CALIBRATION)

    @cached_property
    def last(self) -> int:
        """How many networks of a trajectory are its end: a quarter, as published, but at least two."""
        return max(2, len(self.trajectory.epochs) // 4)

    def path(self, member: int) -> list[State]:
        """The last networks of a member's training, the member itself at its end."""
        if len(self.trajectory.epochs) < 3:
            return [self.states[member]]
        return [*self.trajectory.of_member(member, self.last)[:-1], self.states[member]]

    def averaged(self, member: int) -> State:
        """The mean of those, with batch-norm statistics of its own."""
        network = self.members.network(average_last(self.path(member), self.last))
        reestimate(network, self.few)
        return copy_state(network)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The samples that can be drawn."""
        return SAMPLED if len(self.trajectory.epochs) > 2 else tuple(k for k in SAMPLED if k not in SPREAD)

    def drawn(self, member: int, kind: Kind, **settings: Any) -> list[State]:
        """Samples around a member."""
        # Axes as long as training's own spread: the published unit axes are meant for one size of network.
        chosen = {"tries": TRIES, "seed": self.run.seed + member, "scaled": True, **settings}
        return unstack_states(sample_around(self.network, self.path(member), kind, self.samples, self.few, **chosen))

    def ask(self, states: list[State], data: Data | None = None, **settings: Any) -> Predictions:
        """What networks say about some examples of the test part."""
        return predict_states(self.network, states, data or self.data, examples=self.examples, **settings)


def look_alike(scene: Scene) -> Found:
    """Cosine and disagreement within trainings and between them."""
    if scene.trajectory.epochs:
        seen = load_trajectory(scene.trajectory)
    else:
        count = len(scene.states)
        seen = TrajectoryStates(scene.states, torch.arange(count), torch.full((count,), -1))
    found = compute_similarity(scene.network, seen, scene.data, examples=scene.examples)
    facts: dict[str, Any] = {"trajectory": bool(scene.trajectory.epochs)}
    late = seen.epoch >= (seen.epoch.max() / 2 if scene.trajectory.epochs else -1)
    for name in ("cosine", "disagreement"):
        matrix = getattr(found, name)
        i, j = torch.triu_indices(len(matrix), len(matrix), offset=1)
        kept, same = late[i] & late[j], found.member[i] == found.member[j]
        for where, chosen in (("within", kept & same), ("between", kept & ~same)):
            facts[f"{name}_{where}"] = float(matrix[i, j][chosen].mean()) if bool(chosen.any()) else None
    return Found(vars(found).copy(), facts)


def map_functions(scene: Scene) -> Found:
    """Predictions along trainings, of samples around their ends and of averaged weights, on two maps."""
    seen = load_trajectory(scene.trajectory, start=False)  # untrained networks are far from all others
    states, member, epoch = list(seen.states), seen.member.tolist(), seen.epoch.tolist()
    names, kind = ["training", "averaged", *scene.kinds], [0] * len(states)
    for index in range(len(scene.states)):
        groups = {"averaged": [scene.averaged(index)]}
        groups |= {name: scene.drawn(index, name) for name in scene.kinds}
        for name, group in groups.items():
            states += group
            kind += [names.index(name)] * len(group)
            member += [index] * len(group)
            epoch += [-1] * len(group)
    said = scene.ask(states)
    arrays = {"pca": map_predictions(said, "pca"), "tsne": map_predictions(said, "tsne", seed=scene.run.seed)}
    told = {"member": torch.tensor(member), "epoch": torch.tensor(epoch), "kind": torch.tensor(kind)}
    return Found({**arrays, **told}, {"kinds": names, "last": scene.last})


def diversity_plane(scene: Scene) -> Found:
    """Accuracy and diversity against member 0 of all other members, of samples around it, and of the steps."""
    said = scene.ask(scene.states)
    base = said.member(0)
    groups = {"independent training": said.subset(range(1, said.num_members))} if said.num_members > 1 else {}
    norm = float(torch.stack([t.norm() for t in select_parameters(scene.network, scene.states[0]).values()]).norm())
    # 70 is published for a network whose weights are about as long, and nothing for pca_random.
    far = {**PLOT, "random": norm, "pca_random": PLOT["pca"]}
    for kind in scene.kinds:
        groups[kind] = scene.ask(scene.drawn(0, kind, scale=far[kind], random_scale=True, threshold=None))
    if len(scene.trajectory.epochs) > 2:
        groups["averaged"] = scene.ask([scene.averaged(0)])
    for step in scene.run.recipe.steps:
        stored = scene.run.run.read_predictions(step.label)
        if stored is not None:
            every = stored["test"]
            few = sample_indices(len(every), scene.examples)
            prefix = "ensemble" if step.family == "ensemble" else "step"
            groups[f"{prefix}: {step.label}"] = Predictions(every.log_probs[:, few], every.labels[few])
    arrays: Arrays = {}
    for name, each_said in groups.items():
        arrays[f"{name}/accuracy"], arrays[f"{name}/diversity"] = compute_diversity(base, each_said)
    bounds = compute_limits(accuracy(base), base.num_classes)
    arrays |= {f"limits/{name}": tensor for name, tensor in vars(bounds).items()}
    return Found(arrays, {"groups": list(groups), "base_accuracy": accuracy(base), "num_classes": base.num_classes})


def walk(scene: Scene) -> Found:
    """Straight, matched, bent and relaxed paths between the first two members, and lines inside efficient ensembles."""
    first, second = scene.states[:2]
    asking: dict[str, Any] = {"examples": scene.examples}
    asked = scene.few.replace(test=scene.data.test)
    found: dict[str, PathScores] = {"straight": score_path(scene.network, make_line(first, second), asked, **asking)}
    try:
        other = match_to(scene.network, first, second, scene.data)
        found["matched"] = score_path(scene.network, make_line(first, other), asked, **asking)
    except EnfoldError as problem:
        warnings.warn(f"the matched path is left out: {problem}", stacklevel=2)
    plan = {"seed": scene.run.seed, "device": scene.run.device}
    curve = train_bezier(scene.network, first, second, scene.data, BEZIER.replace(**plan))
    found["bezier"] = score_path(scene.network, curve.path(), asked, **asking)
    relaxed = train_tunnel(scene.network, first, second, scene.data, TUNNEL.replace(**plan))
    found["tunnel"] = score_path(scene.network, relaxed, asked, **asking)
    for spec in scene.run.recipe.steps_of(scene.run.seed):
        if spec.family != "ensemble" or not scene.run.run.is_done("steps", spec.label):
            continue
        shared = scene.run.step(spec, scene.members)
        if isinstance(shared, Ensemble) and shared.is_expandable and shared.num_members > 1:
            one, other = unstack_states(shared)[:2]
            found[f"ensemble: {spec.label}"] = score_path(
                shared.member(0), make_line(one, other), asked, batch_norm="train", **asking
            )
    arrays = {f"{name}/{key}": tensor for name, path in found.items() for key, tensor in vars(path).items()}
    barriers = {name: {key: vars(value) for key, value in path.barrier.items()} for name, path in found.items()}
    return Found(arrays, {"paths": list(found), "barriers": barriers})


def radial_plane(scene: Scene) -> Found:
    """Loss, accuracy and disagreement on the plane through the origin and the first two members."""
    return _mapped(scene, make_radial_plane(scene.network, *scene.states[:2]))


def plane_of_three(scene: Scene) -> Found:
    """The same on the plane through the first three members."""
    return _mapped(scene, make_plane(scene.network, *scene.states[:3]))


def _mapped(scene: Scene, plane: Any) -> Found:
    found = map_plane(scene.network, plane, scene.data, size=scene.size, examples=scene.examples)
    return Found(vars(found).copy(), {"kind": plane.kind, "size": scene.size})


def size_curves(scene: Scene) -> Found:
    """What further members give, for members, averaged members and samples, clean and by severity."""
    modes = _modes(scene)
    shifted = {0: [scene.data], **_shifted(scene)}
    arrays: Arrays = {}
    facts: dict[str, Any] = {"severities": list(shifted), "groups": list(modes), "within": [], "subsets": SUBSETS}
    said: dict[str, dict[int, list[Predictions]]] = {name: {} for name in modes}
    for severity, parts in shifted.items():
        for part in parts:
            for name, states in modes.items():
                asked = [scene.ask(mode, part) for mode in states]
                said[name].setdefault(severity, []).append(over_modes(asked))
                if severity == 0 and len(states[0]) > 1:
                    within, _ = compare_samples_and_modes(asked, limit=SUBSETS)
                    arrays |= {f"{name}/within/{score}": values for score, values in within.items()}
                    facts["within"].append(name)
    for name, by_severity in said.items():
        for severity, curves in compute_curves_by_severity(by_severity, limit=SUBSETS).items():
            arrays |= {f"{name}/{severity}/{score}": values for score, values in curves.items()}
    return Found(arrays, facts)


def _modes(scene: Scene) -> dict[str, list[list[State]]]:
    """The networks of each mode: one for plain and for averaged members, several for samples."""
    count = range(len(scene.states))
    modes = {"original": [[scene.states[k]] for k in count]}
    if len(scene.trajectory.epochs) > 2:
        modes["averaged"] = [[scene.averaged(k)] for k in count]
    for kind in scene.kinds:
        modes[kind] = [scene.drawn(k, kind) for k in count]
    return modes


def _shifted(scene: Scene) -> dict[int, list[Data]]:
    test, spec = scene.data.test, scene.run.recipe.corruptions
    if not isinstance(test, Split) or test.inputs.ndim != 4 or min(test.inputs.shape[-2:]) < 8:
        return {}
    few = sample_split(scene.data, "test", scene.examples)
    kinds = SHIFTED if spec is None else spec.names[:3]
    return {
        severity: [few.replace(test=corrupt_split(few, kind, severity, seed=scene.run.seed)) for kind in kinds]
        for severity in (1, 3, 5)
    }


def at_odds(scene: Scene) -> Found:
    """How far as many networks are at odds, on test data, corrupted data and OOD data.

    The Jensen-Shannon divergence H[p̄] - (1/k) Σ_k H[p_k], mean over examples, over all k of a group and over modes.
    """
    sets = {"test data": [scene.data]}
    sets |= {f"corrupted, severity {severity}": parts for severity, parts in _shifted(scene).items()}
    sets |= {one.name: [scene.data.replace(test=one)] for one in _ood_sets(scene)}
    count = min(len(scene.states), scene.samples)
    arrays: Arrays = {}
    groups = {"independent trainings": [scene.states]}
    groups |= {kind: [scene.drawn(k, kind) for k in range(len(scene.states))] for kind in scene.kinds}
    for name, modes in groups.items():
        for where, parts in sets.items():
            said = [scene.ask(mode, part) for part in parts for mode in modes]
            found = [over_subsets(_divergence, one, count, limit=SUBSETS) for one in said]
            arrays[f"{name}/{where}"] = torch.tensor(found, dtype=torch.float64).mean()
    return Found(arrays, {"groups": list(groups), "sets": list(sets), "networks": count})


def _divergence(said: Predictions) -> float:
    return float(decomposition(said).epistemic.mean())


def _ood_sets(scene: Scene) -> list[Outside]:
    """Return the OOD sets of the recipe, or noise if it names none and inputs are images."""
    if scene.run.ood_sets:
        return [one[sample_indices(len(one), scene.examples)] for one in scene.run.ood_sets]
    try:
        return [noise("uniform", scene.data, scene.examples, scene.run.seed)]
    except EnfoldError:
        return []


@dataclass(frozen=True)
class View:
    """One part of a landscape."""

    make: Callable[[Scene], Found]
    work: Callable[[Scene], float]
    members: int = 2  # it needs
    needs_trajectory: bool = False
    of_models: bool = False  # it shows the steps too, and is made again if there are more
    of_samples: bool = False  # and samples around networks, likewise


def _train_size(scene: Scene) -> int:
    size = length(scene.data.train) or 0
    return size if isinstance(scene.data.train, Split) else 128 * size


def _networks(scene: Scene) -> int:
    return len(scene.states) * max(len(scene.trajectory.epochs), 1)


def _drawing(scene: Scene) -> int:
    """What it takes to find random samples that are accurate enough, those that pca_random is fitted to among them."""
    fitted: int = arguments_of(SubspaceSampling)["fitted"].default
    return TRIES * len(scene.states) * (scene.samples + fitted) * scene.examples


VIEWS: dict[str, View] = {
    "similarity": View(look_alike, lambda s: _networks(s) * s.examples),
    "diversity": View(
        diversity_plane,
        lambda s: (len(s.states) + len(s.kinds) * s.samples) * s.examples,
        of_models=True,
        of_samples=True,
    ),
    "map": View(
        map_functions,
        lambda s: (_networks(s) + len(s.states) * len(s.kinds) * s.samples) * s.examples + _drawing(s),
        needs_trajectory=True,
        of_samples=True,
    ),
    "radial": View(radial_plane, lambda s: s.size**2 * s.examples),
    "three": View(plane_of_three, lambda s: s.size**2 * s.examples, members=3),
    "sizes": View(
        size_curves,
        lambda s: 10 * len(s.states) * (len(s.kinds) * s.samples + 2) * s.examples + _drawing(s),
        of_samples=True,
    ),
    "ood": View(
        at_odds,
        lambda s: 11 * len(s.states) * (len(s.kinds) * s.samples + 1) * s.examples + _drawing(s),
        of_samples=True,
    ),
    "paths": View(walk, lambda s: TRAINED * (BEZIER.epochs + 9 * TUNNEL.epochs) * _train_size(s), of_models=True),
}
