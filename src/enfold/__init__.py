"""enfold: the quality of an ensemble at the price of one network.

data = enfold.data.load("fashion-mini")
members = enfold.Stacked.make(network, 4)     # M networks behind one call
enfold.fit(members, data)                     # one loop, one plan
one = enfold.Distill()(members, data)         # one network of your own class
print(enfold.evaluate(one, data, members=members))
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from enfold import data, metrics, networks
from enfold.cost import Cost, measure
from enfold.data import Data, Split
from enfold.errors import EnfoldError, UnchangedWarning
from enfold.evaluate import Row, evaluate, predict, score
from enfold.members import Members, Mixed, Predictor, Stacked, State
from enfold.predictions import Predictions
from enfold.store import load, save
from enfold.train import History, Plan, fit

if TYPE_CHECKING:
    from enfold.control import Control
    from enfold.distilling import Dirichlet, Recorded
    from enfold.fold import (
        AEKD,
        C2M3,
        ActivationMatching,
        Average,
        CCAMerge,
        Distill,
        EnD2,
        HydraDistillation,
        LatentBE,
        MergeMany,
        OneToOne,
        OTFusion,
        PermAVG,
        ProxyEnD2,
        Soup,
        StraightThrough,
        WeightMatching,
        ZipIt,
    )
    from enfold.folding import Route
    from enfold.merging import Repair
    from enfold.perturb import ODS, ConfODS, Gaussian, TDivSDiv
    from enfold.rank_one import Tied, match_units
    from enfold.rank_one.reconstruct import Reconstruction, reconstruct
    from enfold.rank_one.representable import Representability, representable
    from enfold.share import (
        FGE,
        MIMO,
        PAPA,
        SWA,
        SWAG,
        WASH,
        AveragedModes,
        Bagging,
        BatchEnsemble,
        FiLMEnsemble,
        Hydra,
        HyperBatchEnsembles,
        HyperDeepEnsembles,
        LoRAEnsemble,
        Masksembles,
        MCDropout,
        MixtureEnsembles,
        MultiHead,
        PackedEnsembles,
        SnapshotEnsembles,
        Subspace,
        TreeNet,
    )
    from enfold.symmetry import Symmetry, match, symmetries

__version__ = version("enfold")

__all__ = [
    "AEKD",
    "C2M3",
    "FGE",
    "MIMO",
    "ODS",
    "PAPA",
    "SWA",
    "SWAG",
    "WASH",
    "ActivationMatching",
    "Average",
    "AveragedModes",
    "Bagging",
    "BatchEnsemble",
    "CCAMerge",
    "ConfODS",
    "Control",
    "Cost",
    "Data",
    "Dirichlet",
    "Distill",
    "EnD2",
    "EnfoldError",
    "FiLMEnsemble",
    "Gaussian",
    "History",
    "Hydra",
    "HydraDistillation",
    "HyperBatchEnsembles",
    "HyperDeepEnsembles",
    "LatentBE",
    "LoRAEnsemble",
    "MCDropout",
    "Masksembles",
    "Members",
    "MergeMany",
    "Mixed",
    "MixtureEnsembles",
    "MultiHead",
    "OTFusion",
    "OneToOne",
    "PackedEnsembles",
    "PermAVG",
    "Plan",
    "Predictions",
    "Predictor",
    "ProxyEnD2",
    "Reconstruction",
    "Recorded",
    "Repair",
    "Representability",
    "Route",
    "Row",
    "SnapshotEnsembles",
    "Soup",
    "Split",
    "Stacked",
    "State",
    "StraightThrough",
    "Subspace",
    "Symmetry",
    "TDivSDiv",
    "Tied",
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
_ROOMS = ("share", "fold", "folding", "merging", "perturb", "distilling", "rank_one", "symmetry", "control")


def __getattr__(name: str) -> Any:
    """Methods are imported when they are first asked for: `import enfold` stays as quick as `import torch`."""
    for room in _ROOMS if name in __all__ else ():
        found = import_module(f"enfold.{room}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module 'enfold' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
