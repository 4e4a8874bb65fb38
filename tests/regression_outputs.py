"""Quantile levels and random numbers for tests of regression."""

import torch

LEVELS = (0.1, 0.5, 0.9)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)
