"""Names of the first edition for methods that are not converted yet."""

from enfold.ensembles.common.efficient import (  # noqa: F401
    EfficientEnsemble as Sharing,
    NormChoice,
    batch_norm_names,
    refuse_ties,
    running_statistics,
    select_layers as chosen_layers,
)


class Share:
    """Base of methods that are not converted yet."""


def require_size(num_members):
    """Do nothing."""
