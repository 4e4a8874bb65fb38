"""Fold: M members become one network of the user's own class. One file is one method."""

from enfold.fold.activation_matching import ActivationMatching
from enfold.fold.ae_kd import AEKD
from enfold.fold.average import Average
from enfold.fold.c2m3 import C2M3
from enfold.fold.cca_merge import CCAMerge
from enfold.fold.distill import Distill
from enfold.fold.en_d2 import EnD2
from enfold.fold.hydra_distillation import HydraDistillation
from enfold.fold.latent_be import LatentBE
from enfold.fold.merge_many import MergeMany
from enfold.fold.one_to_one import OneToOne
from enfold.fold.ot_fusion import OTFusion
from enfold.fold.perm_avg import PermAVG
from enfold.fold.proxy_en_d2 import ProxyEnD2
from enfold.fold.soup import Soup
from enfold.fold.straight_through import StraightThrough
from enfold.fold.weight_matching import WeightMatching
from enfold.fold.zip_it import ZipIt

__all__ = [
    "AEKD",
    "C2M3",
    "ActivationMatching",
    "Average",
    "CCAMerge",
    "Distill",
    "EnD2",
    "HydraDistillation",
    "LatentBE",
    "MergeMany",
    "OTFusion",
    "OneToOne",
    "PermAVG",
    "ProxyEnD2",
    "Soup",
    "StraightThrough",
    "WeightMatching",
    "ZipIt",
]
