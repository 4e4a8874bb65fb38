"""Ensembles: one file per method, imported when it is first used.

The class of a file has its name without underscores: `batch_ensemble.py` has `BatchEnsemble`.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enfold.method_files import class_names, find_class

if TYPE_CHECKING:  # names of methods, written by tools/make_method_names.py
    from enfold.ensembles.bagging import Bagging as Bagging
    from enfold.ensembles.batch_ensemble import BatchEnsemble as BatchEnsemble
    from enfold.ensembles.boosting import Boosting as Boosting
    from enfold.ensembles.deep_ensemble import DeepEnsemble as DeepEnsemble
    from enfold.ensembles.dice import DICE as DICE
    from enfold.ensembles.fge import FGE as FGE
    from enfold.ensembles.film_ensemble import FiLMEnsemble as FiLMEnsemble
    from enfold.ensembles.hydra_ensemble import HydraEnsemble as HydraEnsemble
    from enfold.ensembles.hyper_batch_ensemble import HyperBatchEnsemble as HyperBatchEnsemble
    from enfold.ensembles.hyper_deep_ensemble import HyperDeepEnsemble as HyperDeepEnsemble
    from enfold.ensembles.lora_ensemble import LoRAEnsemble as LoRAEnsemble
    from enfold.ensembles.masksembles import Masksembles as Masksembles
    from enfold.ensembles.mc_dropout import MCDropout as MCDropout
    from enfold.ensembles.mimo import MIMO as MIMO
    from enfold.ensembles.mixed_ensemble import MixedEnsemble as MixedEnsemble
    from enfold.ensembles.mixture_ensemble import MixtureEnsemble as MixtureEnsemble
    from enfold.ensembles.multi_head import MultiHead as MultiHead
    from enfold.ensembles.multi_swa import MultiSWA as MultiSWA
    from enfold.ensembles.packed_ensemble import PackedEnsemble as PackedEnsemble
    from enfold.ensembles.papa import PAPA as PAPA
    from enfold.ensembles.repulsive_ensemble import RepulsiveEnsemble as RepulsiveEnsemble
    from enfold.ensembles.snapshot_ensemble import SnapshotEnsemble as SnapshotEnsemble
    from enfold.ensembles.subspace_sampling import SubspaceSampling as SubspaceSampling
    from enfold.ensembles.swa import SWA as SWA
    from enfold.ensembles.swag import SWAG as SWAG
    from enfold.ensembles.tree_net import TreeNet as TreeNet
    from enfold.ensembles.wash import WASH as WASH

__all__ = [*class_names(Path(__file__).parent)]


def __getattr__(name: str) -> Any:
    found = find_class(sys.modules[__name__], name)
    if found is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return found
