"""All networks of the zoo."""

from __future__ import annotations

from tools.zoo.entry import Entry
from tools.zoo.networks import attention, hazards, hugging, science, tabular, vision

NETWORKS: tuple[Entry, ...] = (
    *tabular.NETWORKS,
    *attention.NETWORKS,
    *science.NETWORKS,
    *vision.NETWORKS,
    *hugging.NETWORKS,
    *hazards.NETWORKS,
)
