"""Fold: M members become one network of the user's own class. One file is one method."""

from enfold.fold.ae_kd import AEKD
from enfold.fold.average import Average
from enfold.fold.distill import Distill
from enfold.fold.en_d2 import EnD2
from enfold.fold.hydra_distillation import HydraDistillation
from enfold.fold.latent_be import LatentBE
from enfold.fold.one_to_one import OneToOne
from enfold.fold.proxy_en_d2 import ProxyEnD2

__all__ = ["AEKD", "Average", "Distill", "EnD2", "HydraDistillation", "LatentBE", "OneToOne", "ProxyEnD2"]
