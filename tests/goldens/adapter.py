"""The only file of the goldens that uses enfold: maps stable names to classes, functions and calls.

Keys are the field's names of methods and never change; a renaming or a new signature is followed here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import enfold
from enfold import cost, metrics, registry
from enfold import merge as merging
from enfold.analysis.interpolation import compute_barriers, interpolate
from enfold.analysis.size_curves import compute_size_curve
from enfold.analysis.states import unstack_states
from enfold.data import Data, Split
from enfold.data.corruptions import KINDS, corrupt
from enfold.data.ood import noise
from enfold.data.splits import stratified_split
from enfold.distill.cached import CachedTeacher
from enfold.engines.initialization import initialize_member
from enfold.ensembles.rank_one import match_units
from enfold.ensembles.rank_one.reconstruct import fit_batch_ensemble
from enfold.ensembles.rank_one.representable import representable
from enfold.evaluate import best_member, mean_member_score, predict
from enfold.merge.common.sinkhorn import sinkhorn
from enfold.metrics.dirichlet import dirichlet_uncertainty
from enfold.metrics.greedy import greedy_selection
from enfold.networks import catalogue
from enfold.symmetry import match_weights, symmetries
from enfold.train import TrainConfig
from enfold.train.batch_norm import reestimate

from . import specimens
from .specimens import CLASSES, MEAN, SHAPE, STD

M = 3
Refusal = enfold.EnfoldError
WARNINGS = {  # the class's name here -> the name in the goldens
    "LowDiversityWarning": "low_diversity",
    "SingleModelWarning": "single_ingredient",
    "DroppedOutputWarning": "dropped_output",
    "FewExamplesWarning": "few_examples",
    "FewerCandidatesWarning": "fewer_candidates",
    "InitialisationWarning": "initialization_scale",
    "PartialCoverageWarning": "partial_coverage",
    "SameTargetsWarning": "same_targets",
    "SeparateModulesWarning": "separate_modules",
    "OverconfidentWarning": "overconfident",
    "UnalignedWarning": "unaligned",
    "UnchangedWarning": "unchanged",
    "BufferMismatchWarning": "different_buffers",
    "UnusedParameterWarning": "unused_parameter",
}
REFUSALS = {  # the name of the exception here -> the name in the goldens; others unchanged
    "EnfoldError": "refused",
    "UnsuitableNetwork": "refused",
}


def warning_name(category: type[Warning]) -> str | None:
    """Return the goldens' name of one of enfold's warnings; None for another library's."""
    return WARNINGS.get(category.__name__, category.__name__) if category.__module__.startswith("enfold") else None


def refusal_name(error: Exception) -> str:
    """Return the goldens' name of a refusal."""
    return REFUSALS.get(type(error).__name__, type(error).__name__)


# Data and training


@cache
def data() -> Data:
    """Return bytes with a mean and a deviation: 24 examples to learn from, 16 to choose by, 24 to test on."""
    train, validation, test = (Split(*specimens.pixels(count, seed)) for count, seed in ((24, 1), (16, 2), (24, 3)))
    return Data(train, validation, test, CLASSES, SHAPE, mean=MEAN, std=STD)


def config(
    *, epochs: int = 1, batch_size: int = 12, optimizer: str = "sgd", lr: Any = 0.05, select: str = "last", **rest: Any
) -> TrainConfig:
    """Return how to train; by default two steps of SGD, which does not amplify rounding as Adam's first step does."""
    return TrainConfig(epochs=epochs, batch_size=batch_size, optimizer=optimizer, lr=lr, select=select, seed=0, **rest)


def fit(model: nn.Module, **settings: Any) -> dict[str, Any]:
    """Train a model in place; return the losses and scores that were recorded, by epoch."""
    history = enfold.fit(model, data(), config=config(**settings), quiet=True)
    losses = [torch.tensor(epoch.train_loss, dtype=torch.float64) for epoch in history.epochs]
    scores = [torch.tensor(epoch.validation_loss, dtype=torch.float64) for epoch in history.epochs]
    return {"loss": torch.stack(losses), "validation_nll": torch.stack(scores), "chosen": list(history.chosen)}


def outputs(model: nn.Module, inputs: Tensor | None = None) -> Tensor:
    """Return a model's outputs in eval mode: (M, B, C), or (B, C) of a network."""
    model.eval()
    with torch.no_grad():
        found: Tensor = model(specimens.inputs() if inputs is None else inputs)
    return found


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers under their names in the user's network, with a member axis if M exist."""
    if isinstance(model, enfold.Ensemble) and model.is_expandable:
        with torch.no_grad():
            return dict(model.expand())
    if hasattr(model, "module"):  # members that are passes through one network
        return {f"network.{name}": tensor for name, tensor in model.module.state_dict().items()}
    return dict(model.state_dict())


# Ensembles

ENSEMBLES: dict[str, Callable[[nn.Module], nn.Module]] = {  # of three members
    "bagging": lambda network: enfold.Bagging(network, M),
    "batch_ensemble": lambda network: enfold.BatchEnsemble(network, M),
    "batch_ensemble+rank2": lambda network: enfold.BatchEnsemble(network, M, rank=2),
    "batch_ensemble+signs": lambda network: enfold.BatchEnsemble(network, M, init="signs", bias="shared_post"),
    "batch_ensemble+own_norms": lambda network: enfold.BatchEnsemble(
        network, M, init="ones", batch_norm="own", norms="own"
    ),
    "batch_ensemble+joint_norms": lambda network: enfold.BatchEnsemble(
        network, M, batch_norm="joint", bias="shared_pre"
    ),
    "batch_ensemble+tabm": lambda network: enfold.BatchEnsemble(
        network, M, init="tabm", bias_start="zeros", fast_decay=1.0
    ),
    "batch_ensemble+tabm_normal": lambda network: enfold.BatchEnsemble(network, M, init="tabm_normal"),
    "fge": lambda network: enfold.FGE(network, M),
    "film_ensemble": lambda network: enfold.FiLMEnsemble(network, M),
    "film_ensemble+signs": lambda network: enfold.FiLMEnsemble(network, M, init="signs"),
    "film_ensemble+around": lambda network: enfold.FiLMEnsemble(network, M, init="around"),
    "hydra": lambda network: enfold.HydraEnsemble(network, M),
    "hyper_batch_ensemble": lambda network: enfold.HyperBatchEnsemble(network, M, tune_every=1),
    "hyper_deep_ensemble": lambda network: enfold.HyperDeepEnsemble(network, 2, candidates=4),
    "lora_ensemble": lambda network: enfold.LoRAEnsemble(network, M, rank=2),
    "lora_ensemble+normal": lambda network: enfold.LoRAEnsemble(
        network, M, rank=2, init="normal", alpha=4.0, head="drawn"
    ),
    "lora_ensemble+unfrozen": lambda network: enfold.LoRAEnsemble(network, M, rank=2, frozen=False, head="shared"),
    "masksembles": lambda network: enfold.Masksembles(network, M),
    "masksembles+joint": lambda network: enfold.Masksembles(network, M, masks="joint", scale=1.5),
    "mc_dropout": lambda network: enfold.MCDropout(network, M, inject=0.2),
    "mc_dropout+batch_mask": lambda network: enfold.MCDropout(network, M, inject=0.2, channels=True, per_example=False),
    "mimo": lambda network: enfold.MIMO(network, M),
    "mimo+repeated": lambda network: enfold.MIMO(network, M, input_repetition=0.5, batch_repetition=2),
    "mixture_ensemble": lambda network: enfold.MixtureEnsemble(network, M, budget=1.0),
    "mixture_ensemble+own": lambda network: enfold.MixtureEnsemble(network, M, budget=1.0, batches="own"),
    "mixture_ensemble+large": lambda network: enfold.MixtureEnsemble(
        network, M, budget=2.0, assignment="disjoint_greedy"
    ),
    "mixture_ensemble+network": lambda network: enfold.MixtureEnsemble(
        network, M, init="network", thin=True, counts="templates"
    ),
    "mixture_ensemble+blob": lambda network: enfold.MixtureEnsemble(
        network, M, budget=0.7, single_blob=True, batch_norm="joint"
    ),
    "multi_head": lambda network: enfold.MultiHead(network, M),
    "multi_swa": lambda network: enfold.MultiSWA(network, M, start=0.5),
    "packed_ensemble": lambda network: enfold.PackedEnsemble(network, M),
    "packed_ensemble+groups": lambda network: enfold.PackedEnsemble(network, 2, alpha=2.0, gamma=2),
    "papa": lambda network: enfold.PAPA(network, M, every_steps=1, keep=0.9),
    "papa+all": lambda network: enfold.PAPA(network, M, kind="all", every_epochs=1, start="own"),
    "papa+pairs": lambda network: enfold.PAPA(network, M, kind="pairs", every_epochs=1, start="own"),
    "snapshot_ensemble": lambda network: enfold.SnapshotEnsemble(network, M),
    "subspace_sampling": lambda network: enfold.SubspaceSampling(network, M, threshold=None),
    "subspace_sampling+dropout": lambda network: enfold.SubspaceSampling(network, M, kind="dropout"),
    "subspace_sampling+gaussian": lambda network: enfold.SubspaceSampling(network, M, kind="gaussian", checkpoints=4),
    "subspace_sampling+pca": lambda network: enfold.SubspaceSampling(network, M, kind="pca", checkpoints=4, rank=2),
    "subspace_sampling+pca_random": lambda network: enfold.SubspaceSampling(
        network, M, kind="pca_random", rank=2, fitted=4, threshold=0.1
    ),
    "swa": lambda network: enfold.SWA(network, 1, start=0.5),
    "swag": lambda network: enfold.SWAG(network, M, start=0.5, rank=2),
    "swag+diagonal": lambda network: enfold.SWAG(network, M, start=0.5, diagonal=True),
    "tree_net": lambda network: enfold.TreeNet(network, M),
    "tree_net+copies": lambda network: enfold.TreeNet(network, M, branches="copies"),
    "tree_net+best": lambda network: enfold.TreeNet(network, M, choice="best", warmup_epochs=0),
    "wash": lambda network: enfold.WASH(network, M, probability=0.5),
    "wash+optimizer_state": lambda network: enfold.WASH(
        network, M, probability=0.5, schedule="constant", optimizer_state=True, start="own"
    ),
}
NEEDS_EPOCHS = ("fge", "multi_swa", "snapshot_ensemble", "subspace_sampling", "swa", "swag", "papa+")
EPOCHS = 6


def ensemble(key: str, network: nn.Module) -> nn.Module:
    """Make an ensemble from a network, before training."""
    return ENSEMBLES[key](network)


def trained_ensemble(key: str, network: nn.Module, **settings: Any) -> nn.Module:
    """Train an ensemble by the method's own procedure, for two steps, or for epochs where it needs several."""
    if key.startswith(NEEDS_EPOCHS):
        settings = {"epochs": EPOCHS, "batch_size": 24, **settings}
    made = ENSEMBLES[key](network)
    enfold.fit(made, data(), config=config(**settings), quiet=True)
    return made


def deep_ensemble(networks: Sequence[nn.Module] | Callable[[], nn.Module], count: int = M) -> nn.Module:
    """Make a deep ensemble from networks, or from a factory by seeds."""
    return enfold.DeepEnsemble(networks, count, seed=0) if callable(networks) else enfold.DeepEnsemble(networks)


def reinitialized(network: nn.Module, count: int = M) -> nn.Module:
    """Make a deep ensemble of networks drawn again like this one."""
    return enfold.DeepEnsemble(network, count, seed=0)


def mixed_ensemble(networks: Sequence[nn.Module]) -> nn.Module:
    """Make an ensemble of different architectures."""
    return enfold.MixedEnsemble(networks)


@cache
def members(kind: str) -> nn.Module:
    """Return three networks of different initialisations, trained for two steps; never to be changed."""
    return _trained([specimens.network(kind, seed) for seed in range(M)])


@cache
def finetuned(kind: str) -> nn.Module:
    """Return three networks trained from one checkpoint, each in its own order of the data; never to be changed."""
    return _trained([specimens.network(kind)] * M)


def _trained(networks: Sequence[nn.Module]) -> nn.Module:
    made = deep_ensemble(networks)
    with warnings.catch_warnings():  # they would belong to whichever case comes first
        warnings.simplefilter("ignore")
        fit(made)
    return made


# Distillation


def _batch_ensemble(models: nn.Module) -> nn.Module:
    return enfold.BatchEnsemble(models.member(best_member(models, data())), M)


def _average(models: nn.Module) -> nn.Module:
    network = models.network(models.mean_state())
    reestimate(network, data())
    return network


def _nearest_batch_ensemble(models: nn.Module) -> nn.Module:
    found = fit_batch_ensemble(models).ensemble
    found.reestimate_batch_norm(data())
    return found


def _mimo(models: nn.Module) -> nn.Module:
    return enfold.MIMO(initialize_member(models.member(0), 0, -1, trained=True)[0], M)


Options = Callable[[nn.Module], dict[str, Any]]  # the arguments of `distill`, given the teachers
DISTILLATIONS: dict[str, Options] = {
    "kd": lambda models: {"loss": enfold.KD()},
    "kd+fresh": lambda models: {"init": "random"},
    "kd+average": lambda models: {"init": _average(models)},
    "kd+matched": lambda models: {"init": _average(match_units(models, example=specimens.inputs(), seed=0))},
    "kd+als": lambda models: {"student": _nearest_batch_ensemble(models), "lr": 1e-4},
    "kd+student": lambda models: {"student": specimens.MLP},
    "kd+labels": lambda models: {"loss": enfold.KD(alpha=0.5, temperature=4.0)},
    "kd+mean_logits": lambda models: {"loss": enfold.KD(temperature=2.0, reduction="mean_logits")},
    "kd+softened_mean": lambda models: {"loss": enfold.KD(temperature=2.0, reduction="mean_probs_then_soften")},
    "kd+batch_ensemble": lambda models: {"student": _batch_ensemble(models)},
    "kd+batch_ensemble_mean": lambda models: {"student": _batch_ensemble(models), "loss": enfold.KD(fit="ensemble")},
    "kd+gaussian": lambda models: {"perturb": enfold.Gaussian(step=8.0)},
    "kd+ods": lambda models: {"perturb": enfold.ODS(step=8.0)},
    "kd+conf_ods": lambda models: {"perturb": enfold.ConfODS(step=8.0)},
    "kd+augment": lambda models: {"augment": ("pad-crop", "flip")},
    "ae_kd": lambda models: {"loss": enfold.AEKD()},
    "ae_kd+normalised": lambda models: {"loss": enfold.AEKD(normalise=True, alpha=0.7, temperature=2.0)},
    "ae_kd+features": lambda models: {"loss": enfold.AEKD(feature="head")},
    "end2": lambda models: {"loss": enfold.EnD2()},
    "end2+annealed": lambda models: {"loss": enfold.EnD2(start_temperature=4.0, anneal=1.0, offset=1.0)},
    "proxy_end2": lambda models: {"loss": enfold.ProxyEnD2()},
    "proxy_end2+forward": lambda models: {"loss": enfold.ProxyEnD2(direction="forward")},
    "hydra_distillation": lambda models: {"loss": enfold.Hydra()},
    "hydra_distillation+frozen": lambda models: {"loss": enfold.Hydra(body="frozen")},
    "latent_be": lambda models: {"loss": enfold.LatentBE()},
    "latent_be+outer_mean": lambda models: {
        "loss": enfold.LatentBE(average="outer_mean", batch_norm="own", bias="member")
    },
    "latent_be+sum": lambda models: {"loss": enfold.LatentBE(average="sum", bias="shared_post")},
    "one_to_one": lambda models: {"loss": enfold.OneToOne()},
    "one_to_one+tdiv_sdiv": lambda models: {"loss": enfold.OneToOne(), "perturb": enfold.TDivSDiv(step=8.0)},
    "one_to_one+weight_penalty": lambda models: {"loss": enfold.OneToOne(), "weight_penalty": 0.1},
    "one_to_one+weight_penalty_sum": lambda models: {
        "loss": enfold.OneToOne(),
        "weight_penalty": 0.01,
        "penalty_reduction": "sum",
    },
    "one_to_one+mimo": lambda models: {"loss": enfold.OneToOne(), "student": _mimo(models)},
    "control": lambda models: {},
}

# Merging

MERGES: dict[str, Callable[[Any], nn.Module]] = {
    "average": lambda models: merging.average(models, data()),
    "average+stored_statistics": lambda models: merging.average(models, repair="none"),
    "weight_matching": lambda models: merging.weight_matching(models, data()),
    "weight_matching+no_correction": lambda models: merging.weight_matching(models, data(), repair="none"),
    "weight_matching+reference": lambda models: merging.weight_matching(models, data(), reference=2),
    "weight_matching+repair": lambda models: _matched_and_repaired(models),
    "weight_matching+rescale": lambda models: merging.weight_matching(models, data(), repair="rescale"),
    "weight_matching+closed_form": lambda models: merging.weight_matching(models, data(), repair="closed_form"),
    "weight_matching+repair+kd": lambda models: _distilled_from(_matched_and_repaired(models), models),
    "average+repair": lambda models: merging.repair(
        merging.average(models, data()), models, data(), weights=(0.5, 0.3, 0.2)
    ),
    "average+kd": lambda models: _distilled_from(merging.average(models, data()), models),
    "activation_matching": lambda models: merging.activation_matching(models, data()),
    "activation_matching+moment": lambda models: merging.activation_matching(
        models, data(), likeness="second_moment", watch="outputs"
    ),
    "c2m3": lambda models: merging.c2m3(models, data(), iterations=30),
    "c2m3+uniform": lambda models: merging.c2m3(models, data(), start="uniform", iterations=30),
    "cca_merge": lambda models: merging.cca_merge(models, data()),
    "merge_many": lambda models: merging.merge_many(models, data()),
    "ot_fusion": lambda models: merging.ot_fusion(models, data()),
    "ot_fusion+weights": lambda models: merging.ot_fusion(models, data(), cost="weights"),
    "ot_fusion+regularised": lambda models: merging.ot_fusion(models, data(), regularisation=0.1),
    "perm_avg": lambda models: merging.perm_avg(models, data(), config=config(lr=1.0)),
    "perm_avg+joint": lambda models: merging.perm_avg(
        models, data(), config=config(lr=5.0), order="joint", gradient="implicit", alpha=0.5
    ),
    "perm_avg+universe": lambda models: merging.perm_avg(
        models, data(), config=config(lr=5.0), order="joint", universe=True, project=True
    ),
    "perm_avg+dirichlet": lambda models: merging.perm_avg(
        models, data(), config=config(lr=5.0), mixing="dirichlet", gain=True, matched=10.0
    ),
    "perm_avg+short": lambda models: merging.perm_avg(
        models, data(), config=config(lr=5.0), iterations=2, final_temperature=0.5, ridge=0.01
    ),
    "straight_through": lambda models: merging.straight_through(models, data(), epochs=2),
    "zipit": lambda models: merging.zipit(models, data()),
    "zipit+wide": lambda models: merging.zipit(models, data(), discount=0.9, budget=1.0, watch="outputs"),
    "soup": lambda models: merging.soup(models, data()),
    "soup+uniform": lambda models: merging.soup(models, data(), kind="uniform"),
    "soup+nll": lambda models: merging.soup(models, data(), score="nll"),
    "soup+learned": lambda models: merging.soup(models, data(), kind="learned", epochs=2),
    "soup+repair": lambda models: merging.repair(
        merging.soup(models, data(), score="nll"),
        models,
        data(),
        weights=merging.soup_weights(models, data(), score="nll"),
    ),
}


def _matched_and_repaired(models: Any) -> nn.Module:
    return merging.repair(merging.weight_matching(models, data()), models, data())


def _distilled_from(network: nn.Module, models: Any) -> nn.Module:
    """Distil with a student that starts from a network."""
    made: nn.Module = enfold.distill(models, data(), init=network, config=config(), quiet=True)
    return made


# Perturbations

PERTURBATIONS: dict[str, Callable[[], Any]] = {
    "gaussian": lambda: enfold.Gaussian(step=8.0),
    "ods": lambda: enfold.ODS(step=8.0),
    "conf_ods": lambda: enfold.ConfODS(step=8.0),
    "tdiv_sdiv": lambda: enfold.TDivSDiv(step=8.0),
    "tdiv_sdiv+all_pairs": lambda: enfold.TDivSDiv(step=8.0, pairs="all", divergence="kl"),
    "tdiv_sdiv+js": lambda: enfold.TDivSDiv(step=8.0, divergence="js"),
}


def unlisted() -> list[str]:
    """Return the registered methods that no golden uses."""
    tables = (ENSEMBLES, DISTILLATIONS, MERGES, PERTURBATIONS)
    used = {part for table in tables for key in table for part in key.split("+")}
    known = [name for kind in registry.PACKAGES for name in registry.methods(kind)]
    return [name for name in known if name not in used]


def distill(key: str, teachers: nn.Module) -> nn.Module:
    """Distil with a method, or train the control."""
    if key == "control":
        return enfold.train_control(teachers, data(), config=config(), quiet=True)
    made: nn.Module = enfold.distill(teachers, data(), config=config(), quiet=True, **DISTILLATIONS[key](teachers))
    return made


def distill_from_logits(logits: Tensor) -> nn.Module:
    """Distil into an MLP from teachers' logits on the training data, without the teachers."""
    made: nn.Module = enfold.distill(CachedTeacher(logits), data(), student=specimens.MLP, config=config(), quiet=True)
    return made


def merge(key: str, models: nn.Module) -> nn.Module:
    """Merge with a method."""
    made: nn.Module = MERGES[key](models)
    return made


def perturb(key: str, teachers: nn.Module, student: nn.Module) -> Tensor:
    """Move inputs; the draws come from a seed."""
    source = torch.Generator().manual_seed(0)
    moved: Tensor = PERTURBATIONS[key]()(specimens.inputs(), data(), teachers, student, source)
    return moved


def is_dirichlet(key: str) -> bool:
    """Whether a distillation's network gives concentrations."""
    return key.startswith(("end2", "proxy_end2"))


def dirichlet(key: str, network: nn.Module) -> dict[str, Tensor]:
    """Return what a Dirichlet student says about the inputs."""
    reading = DISTILLATIONS[key](network)["loss"].as_predictor(network)
    return {"outputs": outputs(reading), **reading.uncertainties(specimens.inputs())}


# Symmetry


def groups(network: nn.Module) -> dict[str, Any]:
    """Return the groups of axes that may be permuted together, and the axes that may not."""
    found = symmetries(network, specimens.inputs(), seed=0)
    return {
        "groups": [
            {"name": group.name, "size": group.size, "axes": sorted(map(_axis, group.axes))} for group in found.groups
        ],
        "fixed": sorted(f"{fixed.name}[{fixed.axis}]" for fixed in found.fixed),
    }


def _axis(axis: Any) -> str:
    numbers = [axis.offset, axis.outer, axis.inner, *(place for part in axis.within for place in part)]
    return " ".join([f"{axis.name}[{axis.axis}]", axis.role, *map(str, numbers)])


def matching(network: nn.Module, target: nn.Module) -> dict[str, list[int]]:
    """Return the orders of units that weight matching finds."""
    found = symmetries(network, specimens.inputs(), seed=0)
    orders = match_weights(target.state_dict(), network.state_dict(), found, seed=0)
    return {name: order.tolist() for name, order in orders.items()}


def doubly_stochastic(scores: Tensor, iterations: int) -> Tensor:
    """Return Sinkhorn's matrices."""
    return sinkhorn(scores, iterations)


# Evaluation and cost


def evaluate(model: nn.Module, reference: nn.Module | None = None) -> dict[str, Any]:
    """Return the scores on test data, among them the fitted temperature, and the gain recovered."""
    row = enfold.evaluate(model, data(), reference=reference)
    return {**row.scores, **({} if row.gain_recovered is None else {"gain_recovered": row.gain_recovered})}


def mean_member(model: nn.Module) -> dict[str, float]:
    """Return the mean over members of their own scores."""
    return mean_member_score(predict(model, data().test), predict(model, data().val))


def counts(model: nn.Module) -> dict[str, int]:
    """Return the costs that do not depend on time."""
    return {
        "parameters": cost.parameters(model),
        "trainable": cost.parameters(model, trainable_only=True),
        "flops": cost.flops(model.eval(), specimens.inputs(4)),
    }


# Metrics


def predictions(logits: Tensor, labels: Tensor) -> Any:
    """Return what metrics look at."""
    return enfold.Predictions.from_logits(logits, labels)


def scores(p: Any) -> dict[str, float]:
    """Return all metrics of the table."""
    return {name: metric(p) for name, metric in metrics.METRICS.items()}


MORE_SCORES: dict[str, Callable[[Any], Any]] = {
    "ace": metrics.ace,
    "tace": metrics.tace,
    "debiased_ece": metrics.debiased_ece,
    "mce_mass": lambda p: metrics.mce(p, 10, "mass"),
    "top_2_accuracy": lambda p: metrics.top_k_accuracy(p, 2),
    "vote_accuracy": metrics.vote_accuracy,
    "mean_member_nll": lambda p: metrics.mean_member(metrics.nll, p),
    "example_nll": metrics.example_nll,
    "example_brier": metrics.example_brier,
    "example_rank": metrics.example_rank,
    "majority_vote": metrics.majority_vote,
    "jensen_gap": metrics.jensen_gap,
    "selective": metrics.selective,
    "greedy_picks": lambda p: list(greedy_selection(p, 3).picks),
    "subsets_of_2": lambda p: metrics.over_subsets(metrics.nll, p, 2),
    "gain_interval": metrics.gain_interval,
    "bootstrap_nll": lambda p: metrics.replicates("nll", p, metrics.draw_counts(len(p), 20, seed=0)),
    "bootstrap_ece": lambda p: metrics.replicates("ece", p, metrics.draw_counts(len(p), 20, seed=0)),
    "paired_difference": lambda p: dataclasses.asdict(
        metrics.paired_difference([p], [p.member(0)], "nll", replicates=50, seed=0)
    ),
    "reliability": lambda p: dataclasses.asdict(metrics.reliability(p)),
    "reliability_band": lambda p: dataclasses.asdict(metrics.reliability_band(p, 10)),
    "size_curve": compute_size_curve,
}
DIVERSITY: dict[str, Callable[[Any], Any]] = {
    "disagreement": metrics.disagreement,
    "agreement": metrics.agreement,
    "disagreement_matrix": metrics.disagreement_matrix,
    "normalized_disagreement": metrics.normalised_disagreement,
    "pairwise_kl": metrics.pairwise_kl,
    "cosine_similarity": metrics.cosine_similarity,
    "cka": metrics.cka,
    "double_fault": metrics.double_fault,
    "q_statistic": metrics.q_statistic,
    "error_correlation": metrics.error_correlation,
    "bregman_variance": metrics.bregman_variance,
    "masegosa_variance": metrics.masegosa_variance,
}


def ood(inside: tuple[Any, Tensor], outside: tuple[Any, Tensor]) -> dict[str, Any]:
    """Return OOD scores of (predictions, logits) inside, and how well each tells them from those outside."""
    here, there = (metrics.ood_scores(p, logits) for p, logits in (inside, outside))
    return {name: {"scores": here[name], **metrics.detection(here[name], there[name])} for name in here}


def uncertainty(p: Any) -> dict[str, Any]:
    """Return the decomposition, and how much of it one member has."""
    kept = dataclasses.asdict(metrics.uncertainty_correlation(p.member(0), p))
    return {**dataclasses.asdict(metrics.decomposition(p)), "retained": kept}


def dirichlet_measures(alphas: Tensor) -> dict[str, Tensor]:
    """Return the uncertainties of Dirichlet distributions."""
    return dataclasses.asdict(dirichlet_uncertainty(alphas))


def calibration(validation: Any, test: Any) -> dict[str, Any]:
    """Return the fitted temperature, and test probabilities after each calibrator."""
    scalers = {
        "temperature_scaling": metrics.TemperatureScaler(),
        "vector_scaling": metrics.VectorScaler(),
        "matrix_scaling": metrics.MatrixScaler(),
    }
    return {
        "temperature": metrics.fit_temperature(validation),
        "calibrated_nll": metrics.evaluate_calibrated(metrics.nll, test, validation),
        **{name: scaler.fit(validation)(test).log_probs for name, scaler in scalers.items()},
    }


def theory() -> dict[str, Any]:
    """Return decompositions of the squared error and of votes."""
    source = specimens.draws(5)
    given, target = torch.from_numpy(source.standard_normal((4, 50))), torch.from_numpy(source.standard_normal(50))
    many = torch.from_numpy(source.standard_normal((6, 4, 50)))
    return {
        "ambiguity": dataclasses.asdict(metrics.ambiguity_decomposition(given, target)),
        "bias_variance_covariance": dataclasses.asdict(metrics.bias_variance_covariance(many, target)),
        "majority_vote_accuracy": metrics.majority_vote_accuracy(7, 0.3),
        "left_out_fraction": metrics.left_out_fraction(100),
    }


# Networks, data, analyses

BUILT_IN: dict[str, Any] = {
    "mlp": {"name": "mlp", "widths": [8, 8]},
    "small_cnn": "small-cnn",
    "medium_cnn": {"name": "medium-cnn", "channels": [4, 8]},
    "resnet": {"name": "resnet", "depth": 8, "width": 4},
    "wide_resnet": "wrn-10-1",
    "vit": {"name": "vit", "width": 16, "depth": 1},
}


def built_in(key: str) -> nn.Module:
    """Make a network of enfold's own from seed 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return catalogue.make(BUILT_IN[key], (3, 32, 32), CLASSES)


def built_in_data(name: str) -> dict[str, Any]:
    """Return the splits of a data set that ships with enfold."""
    found = enfold.data.load(name)
    splits = {"train": found.train, "val": found.val, "test": found.test}
    return {
        **{f"{key}/inputs": split.inputs.double() for key, split in splits.items()},
        **{f"{key}/labels": split.labels for key, split in splits.items()},
        "mean": list(found.mean or ()),
        "std": list(found.std or ()),
    }


CORRUPTIONS = KINDS


def corruption(kind: str, images: Tensor) -> Tensor:
    """Return images corrupted at severity 3."""
    return corrupt(images, kind, 3, seed=0)


def ood_noise() -> dict[str, Tensor]:
    """Return images of noise."""
    images = Split(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.arange(4))
    known = Data(images, images, images, CLASSES, (3, 8, 8), mean=(0.5,) * 3, std=(0.25,) * 3)
    return {kind: noise(kind, known, 4).inputs.double() for kind in ("gaussian", "uniform")}


def augmented(images: Tensor) -> Tensor:
    """Return images after padding, cropping and flipping."""
    return enfold.data.augmentation(("pad-crop", "flip"))(images, torch.Generator().manual_seed(0))


def split(labels: Tensor) -> list[int]:
    """Return which examples a stratified split holds out."""
    held: list[int] = stratified_split(labels, 12, seed=0)[1].tolist()
    return held


def interpolated(models: nn.Module) -> dict[str, Any]:
    """Return loss and accuracy between the first two members, and the barrier."""
    first, second, *_ = unstack_states(models)
    line = interpolate(models.member(0), first, second, data(), points=5)
    return {"loss": line.loss, "accuracy": line.accuracy, "barrier": dataclasses.asdict(compute_barriers(line)["loss"])}


def batch_ensemble_fit(models: nn.Module) -> dict[str, Any]:
    """Return the BatchEnsemble nearest to the members, and how far each layer is from being one."""
    found = fit_batch_ensemble(models, sweeps=20)
    defects = {layer.name: layer.defect for layer in representable(models).layers}
    return {
        "outputs": outputs(found.ensemble),
        "residuals": {name: values[-1] for name, values in found.residuals.items()},
        "rank_defects": defects,
    }


@contextmanager
def exactly_seeded() -> Iterator[None]:
    """Leave the global random state as it was, so that no case depends on those before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


DEMO_ROWS = {"mean member": "mean_member"}  # others as they are
DEMO_SCORES = ("accuracy", "nll", "brier", "ece", "temperature", "cnll")


def demo(folder: Path) -> dict[str, Any]:
    """Run the demo as a user does and return its table: each score by seed, and the costs that are not timed."""
    command = [sys.executable, "-c", "from enfold.cli import main; main()", "demo", str(folder), "--json"]
    one = {**os.environ, "OMP_NUM_THREADS": "1"}  # with another number, convolutions train to other weights
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=one).stdout
    return demo_table(json.loads(text))


def demo_table(content: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a run's results that the goldens hold."""
    found = {}
    for label, row in content["rows"].items():
        key = DEMO_ROWS.get(label, label)
        found |= {f"{key}/{name}": row["scores"][name]["values"] for name in DEMO_SCORES}
        found[f"{key}/gain_recovered"] = row["gain_recovered"]["values"]
        found[f"{key}/parameters"], found[f"{key}/flops"] = row["cost"]["parameters"], row["cost"]["flops"]
    return found
