"""All networks of the zoo."""

from __future__ import annotations

from tools.zoo.entry import Foreign
from tools.zoo.networks import attention, hazards, hugging, science, tabular, vision

NETWORKS: tuple[Foreign, ...] = (
    *tabular.NETWORKS,
    *attention.NETWORKS,
    *science.NETWORKS,
    *vision.NETWORKS,
    *hugging.NETWORKS,
    *hazards.NETWORKS,
)
