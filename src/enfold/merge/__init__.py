"""Merging: functions that make one network from the weights of several, one file per method."""

from enfold.merge.activation_matching import activation_matching
from enfold.merge.align import align
from enfold.merge.average import average
from enfold.merge.c2m3 import c2m3
from enfold.merge.cca_merge import cca_merge
from enfold.merge.merge_many import merge_many
from enfold.merge.ot_fusion import ot_fusion
from enfold.merge.perm_avg import perm_avg
from enfold.merge.repair import repair
from enfold.merge.soup import soup, soup_weights
from enfold.merge.straight_through import straight_through
from enfold.merge.weight_matching import weight_matching
from enfold.merge.zipit import zipit

__all__ = [
    "activation_matching",
    "align",
    "average",
    "c2m3",
    "cca_merge",
    "merge_many",
    "ot_fusion",
    "perm_avg",
    "repair",
    "soup",
    "soup_weights",
    "straight_through",
    "weight_matching",
    "zipit",
]
