"""enfold: the quality of an ensemble at the price of one network.

data = enfold.data.load("fashion-mini")
ensemble = enfold.DeepEnsemble(make_net, 4)      # 4 networks behind one call: (B, ...) -> (4, B, classes)
enfold.fit(ensemble, data, epochs=8)             # trains all members at once
net = enfold.distill(ensemble, data, epochs=8)   # one network of your own class
print(enfold.evaluate(net, data, reference=ensemble))
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from enfold import data, metrics, networks
from enfold.cost import Cost, measure
from enfold.data import Data, Split
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble, Prediction
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError, UnchangedWarning
from enfold.evaluate import Row, evaluate, predict, score
from enfold.metrics.predictions import Predictions
from enfold.saving import load, save
from enfold.train import History, TrainConfig, fit

if TYPE_CHECKING:
    from enfold import merge
    from enfold.distill.cached import CachedTeacher
    from enfold.distill.control import train_control
    from enfold.distill.dirichlet import Dirichlet, DirichletEnsemble
    from enfold.distill.distill import distill
    from enfold.distill.loss import DistillationLoss
    from enfold.distill.losses.ae_kd import AEKD
    from enfold.distill.losses.end2 import EnD2
    from enfold.distill.losses.hydra import Hydra
    from enfold.distill.losses.kd import KD
    from enfold.distill.losses.latent_be import LatentBE
    from enfold.distill.losses.one_to_one import OneToOne
    from enfold.distill.losses.proxy_end2 import ProxyEnD2
    from enfold.distill.perturb.conf_ods import ConfODS
    from enfold.distill.perturb.cutmix import CutMix
    from enfold.distill.perturb.gaussian import Gaussian
    from enfold.distill.perturb.mixup import Mixup
    from enfold.distill.perturb.ods import ODS
    from enfold.distill.perturb.tdiv_sdiv import TDivSDiv
    from enfold.distill.perturbation import Perturbation
    from enfold.distill.weight_penalty import WeightPenalty
    from enfold.ensembles.bagging import Bagging
    from enfold.ensembles.batch_ensemble import BatchEnsemble
    from enfold.ensembles.fge import FGE
    from enfold.ensembles.film_ensemble import FiLMEnsemble
    from enfold.ensembles.hydra_ensemble import HydraEnsemble
    from enfold.ensembles.hyper_batch_ensemble import HyperBatchEnsemble
    from enfold.ensembles.hyper_deep_ensemble import HyperDeepEnsemble
    from enfold.ensembles.lora_ensemble import LoRAEnsemble
    from enfold.ensembles.masksembles import Masksembles
    from enfold.ensembles.mc_dropout import MCDropout
    from enfold.ensembles.mimo import MIMO
    from enfold.ensembles.mixture_ensemble import MixtureEnsemble
    from enfold.ensembles.multi_head import MultiHead
    from enfold.ensembles.multi_swa import MultiSWA
    from enfold.ensembles.packed_ensemble import PackedEnsemble
    from enfold.ensembles.papa import PAPA
    from enfold.ensembles.rank_one import match_units
    from enfold.ensembles.rank_one.reconstruct import Reconstruction, reconstruct
    from enfold.ensembles.rank_one.representable import Representability, representable
    from enfold.ensembles.snapshot_ensemble import SnapshotEnsemble
    from enfold.ensembles.subspace_sampling import SubspaceSampling
    from enfold.ensembles.swa import SWA
    from enfold.ensembles.swag import SWAG
    from enfold.ensembles.tree_net import TreeNet
    from enfold.ensembles.wash import WASH
    from enfold.symmetry import Symmetry, symmetries

__version__ = version("enfold")

__all__ = [
    "AEKD",
    "FGE",
    "KD",
    "MIMO",
    "ODS",
    "PAPA",
    "SWA",
    "SWAG",
    "WASH",
    "Bagging",
    "BatchEnsemble",
    "CachedTeacher",
    "ConfODS",
    "Cost",
    "CutMix",
    "Data",
    "DeepEnsemble",
    "Dirichlet",
    "DirichletEnsemble",
    "DistillationLoss",
    "EnD2",
    "EnfoldError",
    "Ensemble",
    "FiLMEnsemble",
    "Gaussian",
    "History",
    "Hydra",
    "HydraEnsemble",
    "HyperBatchEnsemble",
    "HyperDeepEnsemble",
    "LatentBE",
    "LoRAEnsemble",
    "MCDropout",
    "Masksembles",
    "MixedEnsemble",
    "MixtureEnsemble",
    "Mixup",
    "MultiHead",
    "MultiSWA",
    "OneToOne",
    "PackedEnsemble",
    "Perturbation",
    "Prediction",
    "Predictions",
    "ProxyEnD2",
    "Reconstruction",
    "Representability",
    "Row",
    "SnapshotEnsemble",
    "Split",
    "State",
    "SubspaceSampling",
    "Symmetry",
    "TDivSDiv",
    "TrainConfig",
    "TreeNet",
    "UnchangedWarning",
    "WeightPenalty",
    "data",
    "distill",
    "evaluate",
    "fit",
    "load",
    "match_units",
    "measure",
    "merge",
    "metrics",
    "networks",
    "predict",
    "reconstruct",
    "representable",
    "save",
    "score",
    "symmetries",
    "train_control",
]

_LAZY = {
    "AEKD": "enfold.distill.losses.ae_kd",
    "Bagging": "enfold.ensembles.bagging",
    "BatchEnsemble": "enfold.ensembles.batch_ensemble",
    "CachedTeacher": "enfold.distill.cached",
    "ConfODS": "enfold.distill.perturb.conf_ods",
    "CutMix": "enfold.distill.perturb.cutmix",
    "Dirichlet": "enfold.distill.dirichlet",
    "DirichletEnsemble": "enfold.distill.dirichlet",
    "DistillationLoss": "enfold.distill.loss",
    "EnD2": "enfold.distill.losses.end2",
    "FGE": "enfold.ensembles.fge",
    "FiLMEnsemble": "enfold.ensembles.film_ensemble",
    "Gaussian": "enfold.distill.perturb.gaussian",
    "Hydra": "enfold.distill.losses.hydra",
    "HydraEnsemble": "enfold.ensembles.hydra_ensemble",
    "HyperBatchEnsemble": "enfold.ensembles.hyper_batch_ensemble",
    "HyperDeepEnsemble": "enfold.ensembles.hyper_deep_ensemble",
    "KD": "enfold.distill.losses.kd",
    "LatentBE": "enfold.distill.losses.latent_be",
    "LoRAEnsemble": "enfold.ensembles.lora_ensemble",
    "MCDropout": "enfold.ensembles.mc_dropout",
    "MIMO": "enfold.ensembles.mimo",
    "Masksembles": "enfold.ensembles.masksembles",
    "MixtureEnsemble": "enfold.ensembles.mixture_ensemble",
    "Mixup": "enfold.distill.perturb.mixup",
    "MultiHead": "enfold.ensembles.multi_head",
    "MultiSWA": "enfold.ensembles.multi_swa",
    "ODS": "enfold.distill.perturb.ods",
    "OneToOne": "enfold.distill.losses.one_to_one",
    "PAPA": "enfold.ensembles.papa",
    "PackedEnsemble": "enfold.ensembles.packed_ensemble",
    "Perturbation": "enfold.distill.perturbation",
    "ProxyEnD2": "enfold.distill.losses.proxy_end2",
    "Reconstruction": "enfold.ensembles.rank_one.reconstruct",
    "Representability": "enfold.ensembles.rank_one.representable",
    "SWA": "enfold.ensembles.swa",
    "SWAG": "enfold.ensembles.swag",
    "SnapshotEnsemble": "enfold.ensembles.snapshot_ensemble",
    "SubspaceSampling": "enfold.ensembles.subspace_sampling",
    "Symmetry": "enfold.symmetry",
    "TDivSDiv": "enfold.distill.perturb.tdiv_sdiv",
    "TreeNet": "enfold.ensembles.tree_net",
    "WASH": "enfold.ensembles.wash",
    "WeightPenalty": "enfold.distill.weight_penalty",
    "match_units": "enfold.ensembles.rank_one",
    "reconstruct": "enfold.ensembles.rank_one.reconstruct",
    "representable": "enfold.ensembles.rank_one.representable",
    "symmetries": "enfold.symmetry",
    "train_control": "enfold.distill.control",
}
_PACKAGES = ("distill", "merge")  # callable: enfold.distill(...)


def __getattr__(name: str) -> Any:
    """Import a method when it is first used, so that `import enfold` is as fast as `import torch`."""
    if name in _PACKAGES:
        return import_module(f"enfold.{name}")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'enfold' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
