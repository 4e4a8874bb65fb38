"""Vmap: all networks at once by torch.vmap; random numbers of dropout differ between members."""

from __future__ import annotations

import torch
from torch import Tensor

from enfold.engines.outputs import get_logits
from enfold.engines.skeleton import Skeleton, State


class Vmap:
    """An engine that maps the network over stacked values."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton

    def __call__(self, state: State, inputs: Tensor, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""

        def run_one(values: State, own: Tensor) -> Tensor:
            with self.skeleton.use_values(values, again=False) as network:
                return get_logits(network(own))

        in_dims = (0, 0 if each else None)
        outputs: Tensor = torch.vmap(run_one, in_dims=in_dims, randomness="different")(state, inputs)
        return outputs
