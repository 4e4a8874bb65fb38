"""Surgery: a copy of a network in which some layers are exchanged, or all hidden ones narrower; its class is kept."""

from enfold.ensembles.common.surgery.cuts import widths_of
from enfold.ensembles.common.surgery.ends import first_and_last
from enfold.ensembles.common.surgery.layers import refuse_channel_quantisation, replaced, resized
from enfold.ensembles.common.surgery.narrow import narrowed

__all__ = ["first_and_last", "narrowed", "refuse_channel_quantisation", "replaced", "resized", "widths_of"]
