"""enfold: the quality of an ensemble at the price of one network.

data = enfold.data.load("fashion-mini")
ensemble = enfold.DeepEnsemble(make_net, 4)      # 4 networks behind one call: (B, ...) -> (4, B, classes)
enfold.fit(ensemble, data, epochs=8)             # trains all members at once
net = enfold.distill(ensemble, data, epochs=8)   # one network of your own class
print(enfold.evaluate(net, data, reference=ensemble))
"""

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enfold import data, metrics, networks
from enfold.averaging import fit_weights
from enfold.calibrate import Calibrated, Threshold, calibrate, threshold
from enfold.cost import measure
from enfold.costs import Cost
from enfold.data import Data, Split
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble, Prediction
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError, UnchangedWarning
from enfold.evaluate import Row, evaluate, predict, score
from enfold.method_files import class_names, find_class
from enfold.metrics.predictions import Predictions
from enfold.saving import load, save
from enfold.train import History, TrainConfig, fit

if TYPE_CHECKING:
    from enfold import merge
    from enfold.compress import compress
    from enfold.distill.cached import CachedTeacher
    from enfold.distill.control import train_control
    from enfold.distill.dirichlet import Dirichlet, DirichletEnsemble
    from enfold.distill.distill import distill
    from enfold.distill.loss import DistillationLoss
    from enfold.distill.out_of_fold import OutOfFoldTeacher
    from enfold.distill.perturbation import Perturbation
    from enfold.distill.weight_penalty import WeightPenalty
    from enfold.ensembles.rank_one import match_units
    from enfold.ensembles.rank_one.reconstruct import Reconstruction, reconstruct
    from enfold.ensembles.rank_one.representable import Representability, representable
    from enfold.export import export
    from enfold.symmetry import Symmetry, symmetries

if TYPE_CHECKING:  # names of methods, written by tools/make_method_names.py
    from enfold.distill.losses.ae_kd import AEKD as AEKD
    from enfold.distill.losses.end2 import EnD2 as EnD2
    from enfold.distill.losses.hydra import Hydra as Hydra
    from enfold.distill.losses.kd import KD as KD
    from enfold.distill.losses.latent_be import LatentBE as LatentBE
    from enfold.distill.losses.one_to_one import OneToOne as OneToOne
    from enfold.distill.losses.proxy_end2 import ProxyEnD2 as ProxyEnD2
    from enfold.distill.perturb.conf_ods import ConfODS as ConfODS
    from enfold.distill.perturb.cutmix import CutMix as CutMix
    from enfold.distill.perturb.cutmix_mixup import CutMixMixup as CutMixMixup
    from enfold.distill.perturb.gaussian import Gaussian as Gaussian
    from enfold.distill.perturb.mixup import Mixup as Mixup
    from enfold.distill.perturb.ods import ODS as ODS
    from enfold.distill.perturb.tdiv_sdiv import TDivSDiv as TDivSDiv
    from enfold.ensembles.bagging import Bagging as Bagging
    from enfold.ensembles.batch_ensemble import BatchEnsemble as BatchEnsemble
    from enfold.ensembles.boosting import Boosting as Boosting
    from enfold.ensembles.dice import DICE as DICE
    from enfold.ensembles.fge import FGE as FGE
    from enfold.ensembles.film_ensemble import FiLMEnsemble as FiLMEnsemble
    from enfold.ensembles.hydra_ensemble import HydraEnsemble as HydraEnsemble
    from enfold.ensembles.hyper_batch_ensemble import HyperBatchEnsemble as HyperBatchEnsemble
    from enfold.ensembles.hyper_deep_ensemble import HyperDeepEnsemble as HyperDeepEnsemble
    from enfold.ensembles.lora_ensemble import LoRAEnsemble as LoRAEnsemble
    from enfold.ensembles.masksembles import Masksembles as Masksembles
    from enfold.ensembles.mc_dropout import MCDropout as MCDropout
    from enfold.ensembles.mimo import MIMO as MIMO
    from enfold.ensembles.mixture_ensemble import MixtureEnsemble as MixtureEnsemble
    from enfold.ensembles.multi_head import MultiHead as MultiHead
    from enfold.ensembles.multi_swa import MultiSWA as MultiSWA
    from enfold.ensembles.packed_ensemble import PackedEnsemble as PackedEnsemble
    from enfold.ensembles.papa import PAPA as PAPA
    from enfold.ensembles.repulsive_ensemble import RepulsiveEnsemble as RepulsiveEnsemble
    from enfold.ensembles.snapshot_ensemble import SnapshotEnsemble as SnapshotEnsemble
    from enfold.ensembles.subspace_sampling import SubspaceSampling as SubspaceSampling
    from enfold.ensembles.swa import SWA as SWA
    from enfold.ensembles.swag import SWAG as SWAG
    from enfold.ensembles.tree_net import TreeNet as TreeNet
    from enfold.ensembles.wash import WASH as WASH

__version__ = version("enfold")

__all__ = [
    "CachedTeacher",
    "Calibrated",
    "Cost",
    "Data",
    "DeepEnsemble",
    "Dirichlet",
    "DirichletEnsemble",
    "DistillationLoss",
    "EnfoldError",
    "Ensemble",
    "History",
    "MixedEnsemble",
    "OutOfFoldTeacher",
    "Perturbation",
    "Prediction",
    "Predictions",
    "Reconstruction",
    "Representability",
    "Row",
    "Split",
    "State",
    "Symmetry",
    "Threshold",
    "TrainConfig",
    "UnchangedWarning",
    "WeightPenalty",
    "calibrate",
    "compress",
    "data",
    "distill",
    "evaluate",
    "export",
    "fit",
    "fit_weights",
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
    "threshold",
    "train_control",
]

_LAZY = {
    "CachedTeacher": "enfold.distill.cached",
    "Dirichlet": "enfold.distill.dirichlet",
    "DirichletEnsemble": "enfold.distill.dirichlet",
    "DistillationLoss": "enfold.distill.loss",
    "OutOfFoldTeacher": "enfold.distill.out_of_fold",
    "Perturbation": "enfold.distill.perturbation",
    "Reconstruction": "enfold.ensembles.rank_one.reconstruct",
    "Representability": "enfold.ensembles.rank_one.representable",
    "Symmetry": "enfold.symmetry",
    "WeightPenalty": "enfold.distill.weight_penalty",
    "match_units": "enfold.ensembles.rank_one",
    "reconstruct": "enfold.ensembles.rank_one.reconstruct",
    "representable": "enfold.ensembles.rank_one.representable",
    "symmetries": "enfold.symmetry",
    "train_control": "enfold.distill.control",
}
_PACKAGES = ("compress", "distill", "export", "merge")  # callable: enfold.distill(...)
_METHODS = ("ensembles", "distill.losses", "distill.perturb")  # packages with one class per file

__all__ += [name for package in _METHODS for name in class_names(Path(__file__).parent.joinpath(*package.split(".")))]


def __getattr__(name: str) -> Any:
    """Import a method when it is first used, so that `import enfold` is as fast as `import torch`."""
    if name in _PACKAGES:
        return import_module(f"enfold.{name}")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    for package in _METHODS if name[:1].isupper() else ():
        if (found := find_class(import_module(f"enfold.{package}"), name)) is not None:
            return found
    raise AttributeError(f"module 'enfold' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
