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
from enfold.share import BatchEnsemble
from enfold.store import load, save
from enfold.train import History, Plan, fit

__version__ = version("enfold")

__all__ = [
    "Average",
    "BatchEnsemble",
    "Control",
    "Cost",
    "Distill",
    "EnfoldError",
    "History",
    "Members",
    "Mixed",
    "Plan",
    "Predictions",
    "Predictor",
    "Row",
    "Stacked",
    "State",
    "data",
    "evaluate",
    "fit",
    "load",
    "measure",
    "metrics",
    "networks",
    "predict",
    "save",
    "score",
]
