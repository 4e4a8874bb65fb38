"""MixedEnsemble: networks of different architectures behind one call.

    p(y | x) = 1/M Σ_m softmax(f_m(x)),      f_m: any classifiers of the same classes                        (1)

It predicts and can teach in a distillation. It cannot be merged, because its members have different parameters.

Differs from the paper: does not apply; (1) is the deep ensemble of B. Lakshminarayanan et al., arXiv:1612.01474, for
members of different architectures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.tree import clone
from enfold.engines.call import call_network, pack_inputs
from enfold.engines.inputs import in_type_of
from enfold.engines.outputs import get_logits
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.metrics.weights import Weights
from enfold.tasks import remember_task, shared_task


@checked
class MixedEnsemble(Ensemble):
    """Networks of different architectures behind one call.

    Args:
        networks: The networks, which are used themselves, not copied.
        weights: Weights of the networks in the mean of their predictions; None for equal weights.
    """

    def __init__(self, networks: Sequence[nn.Module], *, weights: tuple[float, ...] | None = None) -> None:
        networks = list(networks)
        if not networks:
            raise EnfoldError("networks must contain at least 1 network, got none: pass a list of networks")
        for network in networks:
            if isinstance(network, Ensemble):
                raise EnfoldError(
                    f"networks must be single networks, got a {type(network).__name__} of {network.num_members} "
                    "members: pass *ensemble.networks() instead"
                )
        super().__init__([], len(networks))
        self.members = nn.ModuleList(networks)
        self.task = shared_task(networks)
        self.set_weights(weights)

    @property
    def weights(self) -> Weights:
        """The weights of the members, `member_weights`."""
        return self.member_weights

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of every network for the same inputs: (B, ...) -> (M, B, ...)."""
        inputs = pack_inputs(args, kwargs)
        return self._run_networks([inputs] * self.num_members)

    def forward_each(self, inputs: Tensor) -> Tensor:
        """Return the outputs of each network for its own inputs: (M, B, ...) -> (M, B, ...)."""
        return self._run_networks(list(inputs))

    def _run_networks(self, inputs: Sequence[Any]) -> Tensor:
        # The inputs are copied, as a network may write to them.
        outputs = [
            get_logits(call_network(network, in_type_of(network, clone(own))), network)
            for network, own in zip(self.members, inputs, strict=True)
        ]
        shapes = sorted({tuple(output.shape[1:]) for output in outputs})
        if len(shapes) > 1:
            raise EnfoldError(
                f"all networks must have outputs of one shape, such as the same number of classes, got {shapes}: train "
                "them on the same targets"
            )
        return torch.stack(outputs)

    def convert_inputs(self, inputs: Any) -> Any:
        """Return the inputs unchanged: every network may have a type of its own."""
        return inputs

    def called_networks(self) -> list[nn.Module]:
        """Return the networks."""
        return list(self.members)

    def member(self, index: int) -> nn.Module:
        """Return network `index` itself."""
        network = self.members[self._index(index)]
        if self.task is not None:
            remember_task(network, self.task)
        return network

    def expand(self) -> State:
        """Raise an error: networks of different architectures have no stacked parameters."""
        raise EnfoldError(
            "expand needs members of one architecture, got a MixedEnsemble: use DeepEnsemble, or distill the ensemble"
        )

    @classmethod
    def from_options(cls, networks: Sequence[nn.Module], options: dict[str, Any]) -> Self:
        """Make an ensemble of these networks."""
        return cls(networks, **options)
