"""Distillation losses: one file per method."""

from enfold.distill.losses.ae_kd import AEKD
from enfold.distill.losses.end2 import EnD2
from enfold.distill.losses.hydra import HydraDistillation
from enfold.distill.losses.kd import KD
from enfold.distill.losses.latent_be import LatentBE
from enfold.distill.losses.one_to_one import OneToOne
from enfold.distill.losses.proxy_end2 import ProxyEnD2

__all__ = ["AEKD", "KD", "EnD2", "HydraDistillation", "LatentBE", "OneToOne", "ProxyEnD2"]
