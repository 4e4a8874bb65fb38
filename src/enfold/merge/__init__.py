"""Merging: functions that make one network from the weights of several, one file per method.

The function of a file has its name: `weight_matching.py` has `weight_matching`.
"""

import sys
from typing import TYPE_CHECKING

from enfold.merge.soup import soup_weights
from enfold.method_files import method_files, method_object

if TYPE_CHECKING:  # names of methods, written by tools/make_method_names.py
    from enfold.merge.activation_matching import activation_matching as activation_matching
    from enfold.merge.align import align as align
    from enfold.merge.average import average as average
    from enfold.merge.c2m3 import c2m3 as c2m3
    from enfold.merge.cca_merge import cca_merge as cca_merge
    from enfold.merge.merge_many import merge_many as merge_many
    from enfold.merge.ot_fusion import ot_fusion as ot_fusion
    from enfold.merge.perm_avg import perm_avg as perm_avg
    from enfold.merge.repair import repair as repair
    from enfold.merge.soup import soup as soup
    from enfold.merge.straight_through import straight_through as straight_through
    from enfold.merge.weight_matching import weight_matching as weight_matching
    from enfold.merge.zipit import zipit as zipit

__all__ = [*method_files(__path__), "soup_weights"]

for _file in method_files(__path__):  # importing a file sets the attribute of its name to the module, not the function
    globals()[_file] = method_object(sys.modules[__name__], _file)
