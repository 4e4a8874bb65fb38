"""Surgery: copies of a network, of the same class, with replaced layers or with narrower hidden layers."""

from enfold.ensembles.common.surgery.cuts import widths_of
from enfold.ensembles.common.surgery.ends import first_and_last
from enfold.ensembles.common.surgery.layers import refuse_channel_quantisation, replace_modules, resize_layer
from enfold.ensembles.common.surgery.narrow import narrow_network

__all__ = [
    "first_and_last",
    "narrow_network",
    "refuse_channel_quantisation",
    "replace_modules",
    "resize_layer",
    "widths_of",
]
