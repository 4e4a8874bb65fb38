"""Share: M members held in less space than M networks, or drawn around one. One file is one method."""

from enfold.share.averaged_modes import AveragedModes
from enfold.share.bagging import Bagging
from enfold.share.batch_ensemble import BatchEnsemble
from enfold.share.fge import FGE
from enfold.share.film_ensemble import FiLMEnsemble
from enfold.share.hydra import Hydra
from enfold.share.hyper_batch_ensembles import HyperBatchEnsembles
from enfold.share.hyper_deep_ensembles import HyperDeepEnsembles
from enfold.share.lora_ensemble import LoRAEnsemble
from enfold.share.masksembles import Masksembles
from enfold.share.mc_dropout import MCDropout
from enfold.share.mimo import MIMO
from enfold.share.mixture_ensembles import MixtureEnsembles
from enfold.share.multi_head import MultiHead
from enfold.share.packed_ensembles import PackedEnsembles
from enfold.share.papa import PAPA
from enfold.share.snapshot_ensembles import SnapshotEnsembles
from enfold.share.subspace import Subspace
from enfold.share.swa import SWA
from enfold.share.swag import SWAG
from enfold.share.tree_net import TreeNet
from enfold.share.wash import WASH

__all__ = [
    "FGE",
    "MIMO",
    "PAPA",
    "SWA",
    "SWAG",
    "WASH",
    "AveragedModes",
    "Bagging",
    "BatchEnsemble",
    "FiLMEnsemble",
    "Hydra",
    "HyperBatchEnsembles",
    "HyperDeepEnsembles",
    "LoRAEnsemble",
    "MCDropout",
    "Masksembles",
    "MixtureEnsembles",
    "MultiHead",
    "PackedEnsembles",
    "SnapshotEnsembles",
    "Subspace",
    "TreeNet",
]
