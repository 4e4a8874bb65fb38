"""Vmap: all networks at once by torch.vmap; random numbers of dropout differ between members."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from enfold.engines.call import call_network
from enfold.engines.outputs import get_logits
from enfold.engines.skeleton import Skeleton, State


class Vmap:
    """An engine that maps the network over stacked values."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton

    def __call__(self, state: State, inputs: Any, each: bool) -> Tensor:
        """Common inputs (B, ...) of any structure or, with `each`, a tensor (M, B, ...) -> (M, B, ...)."""

        def run_one(values: State, own: Any) -> Tensor:
            with self.skeleton.use_values(values, again=False) as network:
                return get_logits(call_network(network, own), network)

        if not each:
            return torch.vmap(lambda values: run_one(values, inputs), randomness="different")(state)

        outputs: Tensor = torch.vmap(run_one, randomness="different")(state, inputs)
        return outputs
