"""MIMO: M members in one network that takes M inputs at once and gives M outputs.

    h = f(x_1 ⊕ ... ⊕ x_M),   z = (z_1, ..., z_M)       first layer M times as wide in, last one out   (1)
    train:  z_m classifies x_m;   loss = mean_n Σ_m CE(z_m[n], y[π_m(n)])                              (2)
    π_m:    the batch b times over, shuffled; of it the part 1 - ρ is shuffled again by each member    (3)
    test:   x_1 = ... = x_M = x, and z_1 ... z_M are the members' predictions for x                    (4)

M. Havasi, R. Jenatton, S. Fort, J. Z. Liu, J. Snoek, B. Lakshminarayanan, A. M. Dai, D. Tran: Training Independent
Subnetworks for Robust Prediction, ICLR 2021, arXiv:2010.06610.

M = 3, b = 4 and ρ = 0 are published for CIFAR, ρ = 0.6 for ImageNet. A step costs b times as much, a prediction about
as much as one network's. Members do not exist apart from each other, so none can be taken out. Too many for the width
of the network make all worse.

All but the first and the last layer keep the values of the network given. Those two start anew, by their own class's
`reset_parameters` and a seed, because equal slots would never be told apart; for M = 1 they are kept as well.

Differs from the paper: nothing known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data.batches import Batch
from enfold.engines.base import image_layout
from enfold.engines.inputs import in_type_of
from enfold.engines.outputs import at_least_float32, logits_of
from enfold.ensemble import Ensemble
from enfold.ensembles.common.sharing import Share, refuse_ties, require_size
from enfold.ensembles.common.surgery import first_and_last, refuse_channel_quantisation, replaced, resized, widths_of
from enfold.errors import EnfoldError
from enfold.seeds import derive, seeded
from enfold.train import TrainConfig
from enfold.train.objective import CrossEntropy


@dataclass(frozen=True)
class MIMO(Share):
    """M members in one network that takes M inputs at once and gives M outputs."""

    num_members: int = 3
    batch_repetition: int = 4  # b: how often an example is in a batch
    input_repetition: float = 0.0  # ρ: the part of a batch in which all members see the same example
    first: str | None = None  # name of the layer that takes the inputs; None: found in the network's graph
    last: str | None = None  # name of the layer that gives the logits; None: found in the network's graph
    seed: int = 0

    def __post_init__(self) -> None:
        require_size(self.num_members)
        if self.batch_repetition < 1:
            raise EnfoldError(
                f"batch_repetition says how often an example is in a batch and must be at least 1, got "
                f"{self.batch_repetition}: 4 is the paper's"
            )
        if not 0 <= self.input_repetition <= 1:
            raise EnfoldError(
                f"input_repetition is a part of the batch and must be in [0, 1], got {self.input_repetition}: "
                "0 is the paper's for CIFAR, 0.6 for ImageNet"
            )

    def __call__(self, network: nn.Module) -> MIMONetwork:
        """A network of M inputs and M outputs."""
        return MIMONetwork(network, self)

    def adapted(self, plan: TrainConfig) -> TrainConfig:
        """All members share a pass, so they share the order of the data."""
        return plan.replace(order="shared")

    def objective(self, plan: TrainConfig) -> MIMOLoss:
        """Equation (2)."""
        smoothing = plan.label_smoothing
        if isinstance(smoothing, tuple):
            smoothing = tuple(plan.per_member("label_smoothing", self.num_members))
        return MIMOLoss(self.num_members, self.batch_repetition, self.input_repetition, smoothing)


class MIMONetwork(nn.Module):
    """One network with M slots for inputs and M for outputs; a predictor of M members."""

    def __init__(self, network: nn.Module, share: MIMO) -> None:
        refuse_ties(network)
        first, last = first_and_last(network, share.first, share.last)
        super().__init__()
        self.num_members, self.share, self.source_class = share.num_members, share, type(network).__name__
        entrance = network.get_submodule(first)
        self.inputs, self.linear = widths_of(entrance)[0], isinstance(entrance, nn.Linear)
        # The channels of a group stay together, so that slots are laid inside of groups.
        self.groups = tuple(int(getattr(network.get_submodule(name), "groups", 1)) for name in (first, last))
        self.network = replaced(network, self._widened(network, first, last))  # (1)
        self.training = network.training

    def _widened(self, network: nn.Module, first: str, last: str) -> dict[str, nn.Module]:
        if self.num_members == 1:
            return {}
        refuse_channel_quantisation(network)
        found = {}
        for name in dict.fromkeys((first, last)):  # a single layer is both
            layer: Any = network.get_submodule(name)
            inward, outward = widths_of(layer)
            inward *= self.num_members if name == first else 1
            outward *= self.num_members if name == last else 1
            wide: Any = resized(layer, inward, outward, getattr(layer, "groups", 1), name=name)
            with seeded(derive(self.share.seed, "mimo", name)):
                wide.reset_parameters()
            found[name] = wide.requires_grad_()  # what is drawn anew has to be trained
        return found

    def forward(self, inputs: Tensor) -> Tensor:
        """Equation (4): (B, ...) -> (M, B, C)."""
        return self.forward_each(inputs.expand(self.num_members, *inputs.shape))

    def forward_each(self, inputs: Tensor) -> Tensor:
        """Other inputs in each slot: (M, B, ...) -> (M, B, C)."""
        logits = logits_of(self._outputs(self._joined(inputs), tuple(inputs.shape[2:])))
        if logits.ndim != 2 or logits.shape[1] % self.num_members:
            raise EnfoldError(
                f"the outputs of a network in MIMO must be (B, {self.num_members} C), got {tuple(logits.shape)}: name "
                "the layer that gives the logits with last="
            )
        split: Tensor = logits.unflatten(1, (self.groups[1], self.num_members, -1))  # (B, groups, M, C / groups)
        return split.permute(2, 0, 1, 3).flatten(2)

    def _outputs(self, joined: Tensor, shape: tuple[int, ...]) -> Any:
        try:
            return self.network(image_layout(self.network, joined))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise EnfoldError(
                f"inputs of shape {shape} in {self.num_members} slots become {tuple(joined.shape[1:])}, which the "
                f"widened {self.source_class} must take, but it stops ({str(error).splitlines()[0]}): give inputs of "
                f"which the last axis, or all, are the {self.inputs} that its first layer takes, or name it with first="
            ) from error

    def member(self, index: int) -> nn.Module:
        """There is none: this says so."""
        raise EnfoldError(
            f"MIMO's members share all layers but their slots and do not exist as separate networks, got member({index}"
            f"): take its outputs with model(inputs)[{index}], or use a method whose members are networks"
        )

    def _joined(self, inputs: Tensor) -> Tensor:
        """(M, B, C, ...) -> (B, M C, ...), along the axis that the first layer takes."""
        shape = inputs.shape[2:]
        along_last = shape[-1] == self.inputs and (self.linear or shape[0] != self.inputs)
        axis = inputs.ndim - 1 if along_last else 2
        if not self.linear and inputs.shape[axis] != self.inputs:
            raise EnfoldError(
                f"MIMO joins inputs along their channels, of which the first layer takes {self.inputs}, got inputs of "
                f"shape {tuple(shape)}: give them an axis of channels"
            )
        split: Tensor = inputs.unflatten(axis, (self.groups[0], -1)).movedim(0, axis)  # (B, ..., groups, M, C / groups)
        return split.flatten(axis - 1, axis + 1).contiguous()  # a network may view what it is given

    forward_mean = Ensemble.forward_mean


@dataclass(frozen=True)
class MIMOLoss:
    """The mean cross-entropy of each member on its own shuffle of the batch; what is drawn follows torch's seed."""

    num_members: int
    batch_repetition: int
    input_repetition: float
    label_smoothing: float | Sequence[float] = 0.0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Equation (2) before the sum over members, (M,)."""
        rows = self.rows(len(batch.labels)).to(batch.labels.device)
        indices = None if batch.indices is None else batch.indices[rows.to(batch.indices.device)]
        seen = Batch(batch.inputs[rows], batch.labels[rows], own=True, indices=indices)
        logits: Tensor = model.forward_each(in_type_of(model, seen.inputs))  # type: ignore[operator]
        return CrossEntropy(self.label_smoothing).of_logits(at_least_float32(logits), seen)

    def rows(self, size: int) -> Tensor:
        """Equation (3): which example of the batch is in which slot, (M, b B)."""
        repeated = torch.arange(size).repeat(self.batch_repetition)
        common = repeated[torch.randperm(len(repeated))]
        cut = int(len(common) * (1 - self.input_repetition))
        own = [common[:cut][torch.randperm(cut)] for _ in range(self.num_members)]
        return torch.stack([torch.cat([shuffled, common[cut:]]) for shuffled in own])
