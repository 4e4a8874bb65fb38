"""Merging: functions that make one network from the weights of several, one file per method."""

from enfold.merge.activation_matching import activation_matching
from enfold.merge.align import align
from enfold.merge.average import average
from enfold.merge.basin import basin_check
from enfold.merge.c2m3 import c2m3
from enfold.merge.cca_merge import cca_merge
from enfold.merge.dare import dare
from enfold.merge.fisher import fisher
from enfold.merge.lora import lora
from enfold.merge.merge_many import merge_many
from enfold.merge.model_stock import model_stock
from enfold.merge.ot_fusion import ot_fusion
from enfold.merge.perm_avg import perm_avg
from enfold.merge.regmean import regmean
from enfold.merge.repair import repair
from enfold.merge.slerp import slerp
from enfold.merge.soup import soup, soup_weights
from enfold.merge.straight_through import straight_through
from enfold.merge.task_arithmetic import task_arithmetic
from enfold.merge.ties import ties
from enfold.merge.weight_matching import weight_matching
from enfold.merge.wise_ft import wise_ft
from enfold.merge.zipit import zipit

__all__ = [
    "activation_matching",
    "align",
    "average",
    "basin_check",
    "c2m3",
    "cca_merge",
    "dare",
    "fisher",
    "lora",
    "merge_many",
    "model_stock",
    "ot_fusion",
    "perm_avg",
    "regmean",
    "repair",
    "slerp",
    "soup",
    "soup_weights",
    "straight_through",
    "task_arithmetic",
    "ties",
    "weight_matching",
    "wise_ft",
    "zipit",
]
