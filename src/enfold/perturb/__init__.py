"""Perturb: one file a method that moves inputs to where teachers have more to tell."""

from enfold.perturb.conf_ods import ConfODS
from enfold.perturb.gaussian import Gaussian
from enfold.perturb.ods import ODS
from enfold.perturb.tdiv_sdiv import TDivSDiv

__all__ = ["ODS", "ConfODS", "Gaussian", "TDivSDiv"]
