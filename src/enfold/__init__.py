"""enfold: the quality of an ensemble at the price of one network.

data = enfold.data.load("fashion-mini")
members = enfold.Stacked.make(network, 4)     # M networks behind one call
enfold.fit(members, data)                     # one loop, one plan
one = enfold.Distill()(members, data)         # one network of your own class
print(enfold.evaluate(one, data, members=members))
"""

from importlib.metadata import version

from enfold import data, metrics, networks
from enfold.control import Control
from enfold.cost import Cost, measure
from enfold.errors import EnfoldError
from enfold.evaluate import Row, evaluate, predict, score
from enfold.fold import Average, Distill
from enfold.members import Members, Mixed, Predictor, Stacked, State
from enfold.predictions import Predictions
from enfold.rank_one import Reconstruction, Representability, Tied, match_units, reconstruct, representable
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
from enfold.store import load, save
from enfold.train import History, Plan, fit

__version__ = version("enfold")

__all__ = [
    "FGE",
    "MIMO",
    "PAPA",
    "SWA",
    "SWAG",
    "WASH",
    "Average",
    "AveragedModes",
    "Bagging",
    "BatchEnsemble",
    "Control",
    "Cost",
    "Distill",
    "EnfoldError",
    "FiLMEnsemble",
    "History",
    "Hydra",
    "HyperBatchEnsembles",
    "HyperDeepEnsembles",
    "LoRAEnsemble",
    "MCDropout",
    "Masksembles",
    "Members",
    "Mixed",
    "MixtureEnsembles",
    "MultiHead",
    "PackedEnsembles",
    "Plan",
    "Predictions",
    "Predictor",
    "Reconstruction",
    "Representability",
    "Row",
    "SnapshotEnsembles",
    "Stacked",
    "State",
    "Subspace",
    "Tied",
    "TreeNet",
    "data",
    "evaluate",
    "fit",
    "load",
    "match_units",
    "measure",
    "metrics",
    "networks",
    "predict",
    "reconstruct",
    "representable",
    "save",
    "score",
]
