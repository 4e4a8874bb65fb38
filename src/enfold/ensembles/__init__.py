"""Ensembles: one file per method, imported when it is first used.

The class of a file has its name without underscores: `batch_ensemble.py` has `BatchEnsemble`.
"""

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enfold.ensembles.bagging import Bagging
    from enfold.ensembles.batch_ensemble import BatchEnsemble
    from enfold.ensembles.deep_ensemble import DeepEnsemble
    from enfold.ensembles.fge import FGE
    from enfold.ensembles.film_ensemble import FiLMEnsemble
    from enfold.ensembles.hydra_ensemble import HydraEnsemble
    from enfold.ensembles.hyper_batch_ensemble import HyperBatchEnsemble
    from enfold.ensembles.hyper_deep_ensemble import HyperDeepEnsemble
    from enfold.ensembles.lora_ensemble import LoRAEnsemble
    from enfold.ensembles.masksembles import Masksembles
    from enfold.ensembles.mc_dropout import MCDropout
    from enfold.ensembles.mimo import MIMO
    from enfold.ensembles.mixed_ensemble import MixedEnsemble
    from enfold.ensembles.mixture_ensemble import MixtureEnsemble
    from enfold.ensembles.multi_head import MultiHead
    from enfold.ensembles.multi_swa import MultiSWA
    from enfold.ensembles.packed_ensemble import PackedEnsemble
    from enfold.ensembles.papa import PAPA
    from enfold.ensembles.snapshot_ensemble import SnapshotEnsemble
    from enfold.ensembles.subspace_sampling import SubspaceSampling
    from enfold.ensembles.swa import SWA
    from enfold.ensembles.swag import SWAG
    from enfold.ensembles.tree_net import TreeNet
    from enfold.ensembles.wash import WASH

__all__ = [
    "FGE",
    "MIMO",
    "PAPA",
    "SWA",
    "SWAG",
    "WASH",
    "Bagging",
    "BatchEnsemble",
    "DeepEnsemble",
    "FiLMEnsemble",
    "HydraEnsemble",
    "HyperBatchEnsemble",
    "HyperDeepEnsemble",
    "LoRAEnsemble",
    "MCDropout",
    "Masksembles",
    "MixedEnsemble",
    "MixtureEnsemble",
    "MultiHead",
    "MultiSWA",
    "PackedEnsemble",
    "SnapshotEnsemble",
    "SubspaceSampling",
    "TreeNet",
]


def __getattr__(name: str) -> Any:
    for module in pkgutil.iter_modules(__path__):
        if module.name.replace("_", "") == name.lower():
            return getattr(import_module(f"{__name__}.{module.name}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
