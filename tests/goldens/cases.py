"""The cases: computations with names that do not change with the code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import adapter, specimens
from .golden import flattened, summarize
from .specimens import NETWORKS

Found = dict[str, Any]
Computation = tuple[str, Callable[[Found], None]]
TOLERANCE = 1e-4  # relative to the scale of a tensor


@dataclass(frozen=True)
class Case:
    """One computation."""

    name: str  # area/...; each area has a file
    compute: Callable[[Found], None]  # writes what it finds into the dictionary
    slow: bool = False
    tolerance: float = TOLERANCE
    note: str = ""  # why the tolerance is wider

    def run(self) -> dict[str, Any]:
        """Return the summary of the results; a refusal is recorded by its type and ends the computation."""
        found: Found = {}
        with adapter.exactly_seeded(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self.compute(found)
            except adapter.Refusal as error:
                found["refusal"] = adapter.refusal_name(error)
        names = sorted({name for each in caught if (name := adapter.warning_name(each.category))})
        return {**summarize(flattened(found)), **({"warnings": names} if names else {})}


def ensemble(key: str, kind: str, found: Found) -> None:
    network = specimens.network(kind)
    made = adapter.ensemble(key, network)
    found["start"] = adapter.outputs(made)
    found |= adapter.counts(made)
    trained = adapter.trained_ensemble(key, network)
    found["outputs"] = adapter.outputs(trained)
    found["parameters"] = adapter.parameters(trained)


def deep_ensemble(kind: str, found: Found) -> None:
    made = adapter.deep_ensemble(NETWORKS[kind])
    found["start"] = adapter.outputs(made)
    found |= adapter.counts(made)
    found |= adapter.fit(made)
    found["outputs"] = adapter.outputs(made)
    found["parameters"] = adapter.parameters(made)
    found["member"] = adapter.outputs(made.member(1))


def reinitialized(scale: float, kind: str, found: Found) -> None:
    network = specimens.network(kind)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(scale)
    found["parameters"] = adapter.parameters(adapter.reinitialized(network))


def mixed_ensemble(found: Found) -> None:
    networks = [specimens.network(kind) for kind in NETWORKS]
    made = adapter.mixed_ensemble(networks)
    found["start"] = adapter.outputs(made)
    found |= adapter.counts(made)
    found["scores"] = adapter.evaluate(made)
    found |= {f"single/{kind}": adapter.fit(each) for kind, each in zip(NETWORKS, networks, strict=True)}
    found["outputs"] = adapter.outputs(made)
    found["distilled"] = adapter.outputs(adapter.distill("kd+student", made))


def training(settings: Mapping[str, Any], kind: str, found: Found) -> None:
    made = adapter.deep_ensemble([specimens.network(kind, seed) for seed in range(adapter.M)])
    found |= adapter.fit(made, **settings)
    found["outputs"] = adapter.outputs(made)
    found["parameters"] = adapter.parameters(made)


def distillation(key: str, kind: str, found: Found) -> None:
    made = adapter.distill(key, adapter.members(kind))
    if adapter.is_dirichlet(key):
        found["distribution"] = adapter.dirichlet(key, made)
    result(made, found)


def from_logits(found: Found) -> None:
    teachers = torch.from_numpy(specimens.draws(11).standard_normal((3, 24, specimens.CLASSES))).float()
    result(adapter.distill_from_logits(teachers), found)


def merge(key: str, kind: str, found: Found) -> None:
    models = adapter.finetuned(kind) if key.startswith("soup") else adapter.members(kind)
    result(adapter.merge(key, models), found)


def result(made: torch.nn.Module, found: Found) -> None:
    found["outputs"] = adapter.outputs(made)
    found["parameters"] = adapter.parameters(made)


def refusal(family: Callable[[str, torch.nn.Module], torch.nn.Module], key: str, found: Found) -> None:
    result(family(key, adapter.mixed_ensemble([specimens.network(kind) for kind in NETWORKS])), found)


def perturbation(key: str, kind: str, found: Found) -> None:
    teachers = adapter.members(kind)
    student = adapter.deep_ensemble([specimens.network(kind, seed) for seed in range(5, 5 + adapter.M)])
    found["moved"] = adapter.perturb(key, teachers, student) - specimens.inputs()


def symmetry(kind: str, found: Found) -> None:
    found |= adapter.groups(specimens.network(kind))


def matching(kind: str, found: Found) -> None:
    found["orders"] = adapter.matching(specimens.network(kind, 0), specimens.network(kind, 1))


def sinkhorn(iterations: int, found: Found) -> None:
    scores = torch.from_numpy(specimens.draws(4).standard_normal((2, 6, 6))).float()
    found["matrices"] = adapter.doubly_stochastic(5 * scores, iterations)


def evaluation(kind: str, found: Found) -> None:
    members = adapter.members(kind)
    found["ensemble"] = adapter.evaluate(members)
    found["mean_member"] = adapter.mean_member(members)
    found["network"] = adapter.evaluate(members.member(0), members)
    found["cost"] = {"network": adapter.counts(specimens.network(kind)), "ensemble": adapter.counts(members)}


def table(functions: Mapping[str, Callable[[Any], Any]], found: Found) -> None:
    p = adapter.predictions(*specimens.logits())
    found |= {name: function(p) for name, function in functions.items()}


def scores(found: Found) -> None:
    p = adapter.predictions(*specimens.logits())
    found |= {"ensemble": adapter.scores(p), "member": adapter.scores(p.member(1))}


def ood(found: Found) -> None:
    (inside, labels), (outside, others) = specimens.logits(), specimens.logits(seed=8)
    outside = 0.4 * outside
    pairs = [(adapter.predictions(given, known), given) for given, known in ((inside, labels), (outside, others))]
    found |= adapter.ood(*pairs)


def uncertainty(found: Found) -> None:
    found |= adapter.uncertainty(adapter.predictions(*specimens.logits()))
    found["dirichlet"] = adapter.dirichlet_measures(specimens.logits()[0][0].exp())


def calibration(found: Found) -> None:
    found |= adapter.calibration(*(adapter.predictions(*specimens.logits(seed=seed)) for seed in (12, 13)))


def theory(found: Found) -> None:
    found |= adapter.theory()


def built_in(key: str, found: Found) -> None:
    made = adapter.built_in(key)
    images = torch.from_numpy(specimens.draws(6).standard_normal((2, 3, 32, 32))).float()
    found["outputs"] = adapter.outputs(made, images)
    found["names"] = sorted(made.state_dict())


def data_set(name: str, found: Found) -> None:
    found |= adapter.built_in_data(name)


def corruptions(found: Found) -> None:
    images = torch.from_numpy(specimens.draws(6).integers(256, size=(2, 3, 16, 16))).to(torch.uint8)
    found |= {kind: adapter.corruption(kind, images) for kind in adapter.CORRUPTIONS}


def transforms(found: Found) -> None:
    images = torch.from_numpy(specimens.draws(6).integers(256, size=(2, 3, 16, 16))).to(torch.uint8)
    found["augmented"] = adapter.augmented(images)
    found["noise"] = adapter.ood_noise()
    found["held_out"] = adapter.split(specimens.pixels(60, 1)[1])


def interpolation(kind: str, found: Found) -> None:
    found |= adapter.interpolated(adapter.members(kind))


def batch_ensemble_fit(kind: str, found: Found) -> None:
    found |= adapter.batch_ensemble_fit(adapter.members(kind))


TRAINING: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw", "decay": "weights"},
    "no_momentum": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    "cosine_restarts": {"epochs": 4, "cycles": 2, "final_factor": 0.1},
    "step_schedule": {"epochs": 4, "schedule": "step", "milestones": (0.5, 0.75)},
    "constant_with_warmup": {"epochs": 3, "schedule": "constant", "warmup_epochs": 1.5},
    "triangular_tail": {"epochs": 6, "batch_size": 24, "tail": "triangular", "tail_start": 0.5, "tail_cycle": 2.0},
    "label_smoothing": {"label_smoothing": (0.0, 0.1, 0.2)},
    "lr_per_member": {"lr": (0.01, 0.05, 0.1), "weight_decay": (0.0, 0.01, 0.1)},
    "clip_norm": {"clip_norm": 0.1},
    "shared_order": {"order": "shared"},
    "split_order": {"order": "split"},
    "bootstrap": {"bootstrap": True},
    "augmentation": {"augment": ("pad-crop", "flip")},
    "best_epoch": {"epochs": 4, "select": "best", "lr": 0.5},
    "patience": {"epochs": 6, "select": "best", "lr": 0.5, "patience": 1},
    "bfloat16": {"precision": "bfloat16"},
    "seeds": {"first_member": 2},
}
# Tolerances that must be wider, as name: (tolerance, reason). With 1 and 2 threads, oneDNN on and off, no case deviated
# by more than a quarter of its tolerance (`python -m tests.goldens.record --spread`).
WIDER: dict[str, tuple[float, str]] = {}
SLOW = ("data/digits",)  # beginnings of names
PRECISE = 1e-7  # of float64 metrics: what nine digits represent, with a margin


def computations() -> Iterator[Computation]:
    """Yield names and functions."""
    yield from of_methods("ensembles", ensemble, adapter.ENSEMBLES)
    yield from over({f"ensembles/deep_ensemble/{kind}": kind for kind in NETWORKS}, deep_ensemble)
    for name, scale in (("reinitialized", 1.0), ("reinitialized_scaled", 5.0)):
        yield from over(
            {f"ensembles/deep_ensemble+{name}/{kind}": kind for kind in NETWORKS}, partial(reinitialized, scale)
        )
    yield "ensembles/mixed_ensemble/all", mixed_ensemble
    for key, settings in TRAINING.items():
        yield f"training/{key}/mlp", partial(training, settings, "mlp")
    yield from of_methods("distill", distillation, adapter.DISTILLATIONS)
    yield "distill/kd+cached_logits/mlp", from_logits
    yield from of_methods("merge", merge, adapter.MERGES)
    yield from of_methods("perturb", perturbation, adapter.PERTURBATIONS)
    for family, keys in ((adapter.distill, adapter.DISTILLATIONS), (adapter.merge, adapter.MERGES)):
        yield from over(
            {f"refusals/{key}/mixed_ensemble": key for key in keys if "+" not in key}, partial(refusal, family)
        )
    for name, function in BY_NETWORK.items():
        yield from over({f"{name}/{kind}": kind for kind in NETWORKS}, function)
    yield from over({f"symmetry/sinkhorn/{iterations}": iterations for iterations in (5, 100)}, sinkhorn)
    yield from over({f"networks/{key}": key for key in adapter.BUILT_IN}, built_in)
    yield from over({f"data/{name}": name for name in ("fashion-mini", "digits")}, data_set)
    yield from SINGLE.items()


BY_NETWORK: dict[str, Callable[[str, Found], None]] = {
    "symmetry/groups": symmetry,
    "symmetry/weight_matching": matching,
    "evaluate/scores": evaluation,
    "analysis/interpolation": interpolation,
    "analysis/batch_ensemble_fit": batch_ensemble_fit,
}
SINGLE: dict[str, Callable[[Found], None]] = {
    "metrics/scores": scores,
    "metrics/more_scores": partial(table, adapter.MORE_SCORES),
    "metrics/diversity": partial(table, adapter.DIVERSITY),
    "metrics/ood": ood,
    "metrics/uncertainty": uncertainty,
    "metrics/calibration": calibration,
    "metrics/theory": theory,
    "data/corruptions": corruptions,
    "data/transforms": transforms,
}


def of_methods(area: str, function: Callable[[str, str, Found], None], keys: Iterable[str]) -> Iterator[Computation]:
    """Yield each method with all networks; its variants, marked by '+', with one that shows what they change."""
    for key in keys:
        kinds = NETWORKS if "+" not in key else shown(key)
        yield from over({f"{area}/{key}/{kind}": kind for kind in kinds}, partial(function, key))


def over(values: Mapping[str, Any], function: Callable[[Any, Found], None]) -> Iterator[Computation]:
    """Yield the function with each value."""
    for name, value in values.items():
        yield name, partial(function, value)


def shown(key: str) -> tuple[str, ...]:
    """Return the network for a variant: with batch norm where the variant is about it."""
    if key.startswith("lora_ensemble"):
        return ("vit",)
    about_norms = (
        "norms",
        "film",
        "stored_statistics",
        "mixture",
        "repair",
        "closed_form",
        "rescale",
        "groups",
        "latent",
    )
    return ("cnn",) if any(word in key for word in about_norms) else ("mlp",)


def cases() -> list[Case]:
    """Return all cases."""
    found = []
    for name, compute in computations():
        precise = PRECISE if name.startswith("metrics/") else TOLERANCE
        tolerance, note = WIDER.get(name, (precise, ""))
        found.append(Case(name, compute, name.startswith(SLOW), tolerance, note))
    return found
