"""enfold: the quality of an ensemble at the price of one network.

data = enfold.data.load("fashion-mini")
members = enfold.DeepEnsemble(network, 4)  # M networks behind one call
enfold.fit(members, data)                     # one loop, one plan
one = enfold.KD()(members, data)              # one network of your own class
print(enfold.evaluate(one, data, members=members))
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
    from enfold.distill.cached import CachedTeacher
    from enfold.distill.control import Control
    from enfold.distill.dirichlet import Dirichlet
    from enfold.distill.losses.ae_kd import AEKD
    from enfold.distill.losses.end2 import EnD2
    from enfold.distill.losses.hydra import HydraDistillation
    from enfold.distill.losses.kd import KD
    from enfold.distill.losses.latent_be import LatentBE
    from enfold.distill.losses.one_to_one import OneToOne
    from enfold.distill.losses.proxy_end2 import ProxyEnD2
    from enfold.distill.perturb.conf_ods import ConfODS
    from enfold.distill.perturb.gaussian import Gaussian
    from enfold.distill.perturb.ods import ODS
    from enfold.distill.perturb.tdiv_sdiv import TDivSDiv
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
    from enfold.ensembles.rank_one import Tied, match_units
    from enfold.ensembles.rank_one.match import match
    from enfold.ensembles.rank_one.reconstruct import Reconstruction, reconstruct
    from enfold.ensembles.rank_one.representable import Representability, representable
    from enfold.ensembles.snapshot_ensemble import SnapshotEnsemble
    from enfold.ensembles.subspace_sampling import SubspaceSampling
    from enfold.ensembles.swa import SWA
    from enfold.ensembles.swag import SWAG
    from enfold.ensembles.tree_net import TreeNet
    from enfold.ensembles.wash import WASH
    from enfold.merge.activation_matching import ActivationMatching
    from enfold.merge.average import Average
    from enfold.merge.c2m3 import C2M3
    from enfold.merge.cca_merge import CCAMerge
    from enfold.merge.common.folding import Route
    from enfold.merge.merge_many import MergeMany
    from enfold.merge.ot_fusion import OTFusion
    from enfold.merge.perm_avg import PermAVG
    from enfold.merge.repair import Repair
    from enfold.merge.soup import Soup
    from enfold.merge.straight_through import StraightThrough
    from enfold.merge.weight_matching import WeightMatching
    from enfold.merge.zipit import ZipIt
    from enfold.symmetry import Symmetry, symmetries

__version__ = version("enfold")

__all__ = [
    "AEKD",
    "C2M3",
    "FGE",
    "KD",
    "MIMO",
    "ODS",
    "PAPA",
    "SWA",
    "SWAG",
    "WASH",
    "ActivationMatching",
    "Average",
    "Bagging",
    "BatchEnsemble",
    "CCAMerge",
    "CachedTeacher",
    "ConfODS",
    "Control",
    "Cost",
    "Data",
    "DeepEnsemble",
    "Dirichlet",
    "EnD2",
    "EnfoldError",
    "Ensemble",
    "FiLMEnsemble",
    "Gaussian",
    "History",
    "HydraDistillation",
    "HydraEnsemble",
    "HyperBatchEnsemble",
    "HyperDeepEnsemble",
    "LatentBE",
    "LoRAEnsemble",
    "MCDropout",
    "Masksembles",
    "MergeMany",
    "MixedEnsemble",
    "MixtureEnsemble",
    "MultiHead",
    "MultiSWA",
    "OTFusion",
    "OneToOne",
    "PackedEnsemble",
    "PermAVG",
    "Prediction",
    "Predictions",
    "ProxyEnD2",
    "Reconstruction",
    "Repair",
    "Representability",
    "Route",
    "Row",
    "SnapshotEnsemble",
    "Soup",
    "Split",
    "State",
    "StraightThrough",
    "SubspaceSampling",
    "Symmetry",
    "TDivSDiv",
    "Tied",
    "TrainConfig",
    "TreeNet",
    "UnchangedWarning",
    "WeightMatching",
    "ZipIt",
    "data",
    "evaluate",
    "fit",
    "load",
    "match",
    "match_units",
    "measure",
    "metrics",
    "networks",
    "predict",
    "reconstruct",
    "representable",
    "save",
    "score",
    "symmetries",
]

_LAZY = {
    "AEKD": "enfold.distill.losses.ae_kd",
    "ActivationMatching": "enfold.merge.activation_matching",
    "Average": "enfold.merge.average",
    "Bagging": "enfold.ensembles.bagging",
    "BatchEnsemble": "enfold.ensembles.batch_ensemble",
    "C2M3": "enfold.merge.c2m3",
    "CCAMerge": "enfold.merge.cca_merge",
    "CachedTeacher": "enfold.distill.cached",
    "ConfODS": "enfold.distill.perturb.conf_ods",
    "Control": "enfold.distill.control",
    "Dirichlet": "enfold.distill.dirichlet",
    "EnD2": "enfold.distill.losses.end2",
    "FGE": "enfold.ensembles.fge",
    "FiLMEnsemble": "enfold.ensembles.film_ensemble",
    "Gaussian": "enfold.distill.perturb.gaussian",
    "HydraDistillation": "enfold.distill.losses.hydra",
    "HydraEnsemble": "enfold.ensembles.hydra_ensemble",
    "HyperBatchEnsemble": "enfold.ensembles.hyper_batch_ensemble",
    "HyperDeepEnsemble": "enfold.ensembles.hyper_deep_ensemble",
    "KD": "enfold.distill.losses.kd",
    "LatentBE": "enfold.distill.losses.latent_be",
    "LoRAEnsemble": "enfold.ensembles.lora_ensemble",
    "MCDropout": "enfold.ensembles.mc_dropout",
    "MIMO": "enfold.ensembles.mimo",
    "Masksembles": "enfold.ensembles.masksembles",
    "MergeMany": "enfold.merge.merge_many",
    "MixtureEnsemble": "enfold.ensembles.mixture_ensemble",
    "MultiHead": "enfold.ensembles.multi_head",
    "MultiSWA": "enfold.ensembles.multi_swa",
    "ODS": "enfold.distill.perturb.ods",
    "OTFusion": "enfold.merge.ot_fusion",
    "OneToOne": "enfold.distill.losses.one_to_one",
    "PAPA": "enfold.ensembles.papa",
    "PackedEnsemble": "enfold.ensembles.packed_ensemble",
    "PermAVG": "enfold.merge.perm_avg",
    "ProxyEnD2": "enfold.distill.losses.proxy_end2",
    "Reconstruction": "enfold.ensembles.rank_one.reconstruct",
    "Repair": "enfold.merge.repair",
    "Representability": "enfold.ensembles.rank_one.representable",
    "Route": "enfold.merge.common.folding",
    "SWA": "enfold.ensembles.swa",
    "SWAG": "enfold.ensembles.swag",
    "SnapshotEnsemble": "enfold.ensembles.snapshot_ensemble",
    "Soup": "enfold.merge.soup",
    "StraightThrough": "enfold.merge.straight_through",
    "SubspaceSampling": "enfold.ensembles.subspace_sampling",
    "Symmetry": "enfold.symmetry",
    "TDivSDiv": "enfold.distill.perturb.tdiv_sdiv",
    "Tied": "enfold.ensembles.rank_one",
    "TreeNet": "enfold.ensembles.tree_net",
    "WASH": "enfold.ensembles.wash",
    "WeightMatching": "enfold.merge.weight_matching",
    "ZipIt": "enfold.merge.zipit",
    "match": "enfold.ensembles.rank_one.match",
    "match_units": "enfold.ensembles.rank_one",
    "reconstruct": "enfold.ensembles.rank_one.reconstruct",
    "representable": "enfold.ensembles.rank_one.representable",
    "symmetries": "enfold.symmetry",
}


def __getattr__(name: str) -> Any:
    """Methods are imported when they are first asked for: `import enfold` stays as quick as `import torch`."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'enfold' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
