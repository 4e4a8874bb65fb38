"""Perturbations of the inputs of a distillation: one file per method."""

from enfold.distill.perturb.conf_ods import ConfODS
from enfold.distill.perturb.gaussian import Gaussian
from enfold.distill.perturb.ods import ODS
from enfold.distill.perturb.tdiv_sdiv import TDivSDiv

__all__ = ["ODS", "ConfODS", "Gaussian", "TDivSDiv"]
