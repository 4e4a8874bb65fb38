"""Merging: one network from the weights of several, one file per method."""

from enfold.merge.activation_matching import ActivationMatching
from enfold.merge.average import Average
from enfold.merge.c2m3 import C2M3
from enfold.merge.cca_merge import CCAMerge
from enfold.merge.merge_many import MergeMany
from enfold.merge.ot_fusion import OTFusion
from enfold.merge.perm_avg import PermAVG
from enfold.merge.repair import Repair
from enfold.merge.soup import Soup
from enfold.merge.straight_through import StraightThrough
from enfold.merge.weight_matching import WeightMatching
from enfold.merge.zipit import ZipIt

__all__ = [
    "C2M3",
    "ActivationMatching",
    "Average",
    "CCAMerge",
    "MergeMany",
    "OTFusion",
    "PermAVG",
    "Repair",
    "Soup",
    "StraightThrough",
    "WeightMatching",
    "ZipIt",
]
