"""Merging: functions that make one network from the weights of several, one file per method.

The function of a file has its name: `weight_matching.py` has `weight_matching`. It is imported when it is first used.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from enfold.method_files import FunctionPackage, method_files

if TYPE_CHECKING:  # names of methods, written by tools/make_method_names.py
    from enfold.merge.activation_matching import activation_matching as activation_matching
    from enfold.merge.align import align as align
    from enfold.merge.average import average as average
    from enfold.merge.basin_check import basin_check as basin_check
    from enfold.merge.c2m3 import c2m3 as c2m3
    from enfold.merge.cca_merge import cca_merge as cca_merge
    from enfold.merge.dare import dare as dare
    from enfold.merge.fisher import fisher as fisher
    from enfold.merge.lora import lora as lora
    from enfold.merge.merge_many import merge_many as merge_many
    from enfold.merge.model_stock import model_stock as model_stock
    from enfold.merge.ot_fusion import ot_fusion as ot_fusion
    from enfold.merge.perm_avg import perm_avg as perm_avg
    from enfold.merge.regmean import regmean as regmean
    from enfold.merge.repair import repair as repair
    from enfold.merge.slerp import slerp as slerp
    from enfold.merge.soup import soup as soup
    from enfold.merge.straight_through import straight_through as straight_through
    from enfold.merge.task_arithmetic import task_arithmetic as task_arithmetic
    from enfold.merge.ties import ties as ties
    from enfold.merge.weight_matching import weight_matching as weight_matching
    from enfold.merge.wise_ft import wise_ft as wise_ft
    from enfold.merge.zipit import zipit as zipit

__all__ = [*method_files(__path__), "soup_weights"]


class _Package(FunctionPackage):
    @property
    def soup_weights(self) -> Callable[..., list[float]]:
        """The function beside `soup`."""
        from enfold.merge.soup import soup_weights

        return soup_weights


sys.modules[__name__].__class__ = _Package
