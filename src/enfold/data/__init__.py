"""Data: sources, splits and batched augmentation; nothing here knows a network."""

from enfold.data.augment import augmentation
from enfold.data.dataset import Data, Split
from enfold.data.sources import catalogue, check, fetch, load

__all__ = ["Data", "Split", "augmentation", "catalogue", "check", "fetch", "load"]
