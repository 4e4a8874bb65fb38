"""MIMO: M members in one network that takes M inputs at once and gives M outputs.

    h = f(x_1 ⊕ ... ⊕ x_M),   z = (z_1, ..., z_M)       first layer M times as wide in, last one out   (1)
    train:  z_m classifies x_m;   loss = mean_n Σ_m CE(z_m[n], y[π_m(n)])                              (2)
    π_m:    the batch b times, shuffled; a fraction 1 - ρ of it is shuffled again for each member      (3)
    test:   x_1 = ... = x_M = x, and z_1 ... z_M are the members' predictions for x                    (4)

M. Havasi, R. Jenatton, S. Fort, J. Z. Liu, J. Snoek, B. Lakshminarayanan, A. M. Dai, D. Tran: Training Independent
Subnetworks for Robust Prediction, ICLR 2021, arXiv:2010.06610.

A training step costs b times that of one network, a prediction about as much as one network's. Members do not exist as
networks, so none can be extracted. Too many members for the width of the network make all of them worse.

All but the first and the last layer keep the values of the network. Those two are drawn again by `reset_parameters`,
because equal slots would stay equal; for M = 1 they keep their values, too.

Differs from the paper: nothing known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.batches import Batch
from enfold.data.tree import describe
from enfold.engines.call import pack_inputs
from enfold.engines.inputs import in_type_of
from enfold.engines.layout import arrange_for
from enfold.engines.outputs import at_least_float32, get_logits
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.common.efficient import refuse_ties
from enfold.ensembles.common.options import Fraction
from enfold.ensembles.common.surgery import (
    first_and_last,
    refuse_channel_quantisation,
    replace_modules,
    resize_layer,
    widths_of,
)
from enfold.errors import EnfoldError
from enfold.seeds import derive, seed_scope
from enfold.train import TrainConfig
from enfold.train.objective import TaskLoss, default_loss


@checked
class MIMO(Ensemble):
    """M members in one network that takes M inputs at once and gives M outputs.

    Args:
        network: The network; all but its first and last layer keep their values. It is not modified.
        num_members: The number of members; 3 is published.
        batch_repetition: b: how often an example is in a batch; 4 is published.
        input_repetition: ρ: the fraction of a batch in which all members see the same example; 0 is published for
            CIFAR, 0.6 for ImageNet.
        first_layer: The name of the layer that takes the inputs; by default it is found in the graph of the network.
        last_layer: The name of the layer that gives the logits; by default it is found in the graph of the network.
        seed: The seed of the first and the last layer.
    """

    def __init__(
        self,
        network: nn.Module,
        num_members: PositiveInt = 3,
        *,
        batch_repetition: PositiveInt = 4,
        input_repetition: Fraction = 0.0,
        first_layer: str | None = None,
        last_layer: str | None = None,
        seed: int = 0,
    ) -> None:
        refuse_ties(network)
        entrance_name, exit_name = first_and_last(network, first_layer, last_layer)
        super().__init__([], num_members)
        self.batch_repetition, self.input_repetition, self.seed = batch_repetition, input_repetition, seed
        self.first_layer, self.last_layer = first_layer, last_layer
        entrance = network.get_submodule(entrance_name)
        self.inputs, self.is_linear = widths_of(entrance)[0], isinstance(entrance, nn.Linear)
        self.ends_linear = isinstance(network.get_submodule(exit_name), nn.Linear)
        # The channels of a group stay together, so slots are laid out inside of groups.
        self.groups = tuple(int(getattr(network.get_submodule(n), "groups", 1)) for n in (entrance_name, exit_name))
        self.module = replace_modules(network, self._widen(network, entrance_name, exit_name))  # (1)
        self.training = network.training

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Use one order of the data, as all members run in one pass."""
        return config.replace(order="shared")

    def objective(self, config: TrainConfig) -> MIMOLoss:
        """Return (2)."""
        loss = default_loss(config, self.num_members)
        return MIMOLoss(self.num_members, self.batch_repetition, self.input_repetition, loss)

    def accepts_loss(self, config: TrainConfig) -> bool:
        """Return True: with another loss, all slots see the same example."""
        return True

    def _widen(self, network: nn.Module, first: str, last: str) -> dict[str, nn.Module]:
        if self.num_members == 1:
            return {}
        refuse_channel_quantisation(network)
        layers = {}
        for name in dict.fromkeys((first, last)):  # a single layer is both
            layer: Any = network.get_submodule(name)
            inward, outward = widths_of(layer)
            inward *= self.num_members if name == first else 1
            outward *= self.num_members if name == last else 1
            wide: Any = resize_layer(layer, inward, outward, getattr(layer, "groups", 1), name=name)
            with seed_scope(derive(self.seed, "mimo", name)):
                wide.reset_parameters()
            layers[name] = wide.requires_grad_()  # new values have to be trained, also in a frozen network
        return layers

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of every member for the same inputs, (4): (B, ...) -> (M, B, ...)."""
        inputs = pack_inputs(args, kwargs)
        if not isinstance(inputs, Tensor):
            raise EnfoldError(
                f"MIMO joins the inputs of its members to one tensor, got {describe(inputs)}: use a network that takes "
                "one tensor, or a method such as BatchEnsemble"
            )
        return self.forward_each(inputs.expand(self.num_members, *inputs.shape))

    def forward_each(self, inputs: Tensor) -> Tensor:
        """Return the outputs for different inputs in each slot: (M, B, ...) -> (M, B, ...)."""
        outputs = get_logits(self._outputs(self._join(inputs), tuple(inputs.shape[2:])), self.module)
        axis = outputs.ndim - 1 if self.ends_linear else 1  # of the channels of the last layer
        if outputs.ndim < 2 or outputs.shape[axis] % self.num_members:
            raise EnfoldError(
                f"network must return outputs with {self.num_members} C channels, got {tuple(outputs.shape)}: name the "
                "layer that gives the outputs with last_layer="
            )
        split: Tensor = outputs.unflatten(axis, (self.groups[1], self.num_members, -1))  # (..., groups, M, C / groups)
        return split.movedim(axis + 1, 0).flatten(axis + 1, axis + 2)

    def _outputs(self, joined: Tensor, shape: tuple[int, ...]) -> Any:
        try:
            return self.module(arrange_for(self.module, joined))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise EnfoldError(
                f"inputs of shape {shape} in {self.num_members} slots become {tuple(joined.shape[1:])}, on which the "
                f"widened {type(self.module).__name__} fails ({_first_line(error)}): pass inputs whose last "
                f"axis, or all axes, are the {self.inputs} features of its first layer, or name that layer with "
                "first_layer="
            ) from error
        except EnfoldError:
            raise
        except Exception as error:  # of a check in the network's own code
            raise EnfoldError(
                f"network must accept the inputs of {self.num_members} slots joined, of shape "
                f"{tuple(joined.shape[1:])}, but {type(self.module).__name__} refuses them ({_first_line(error)}): "
                "remove that check of the network, or use a method that leaves the inputs as they are"
            ) from error

    def called_networks(self) -> list[nn.Module]:
        """Return the network."""
        return [self.module]

    def member(self, index: int) -> nn.Module:
        """Raise an error: members do not exist as networks."""
        raise EnfoldError(
            f"members of MIMO do not exist as separate networks, got member({index}): take its outputs with "
            f"ensemble(inputs)[{index}], or use a method whose members are networks"
        )

    def expand(self) -> State:
        """Raise an error: members do not exist as networks."""
        raise EnfoldError(
            "expand needs members that are networks, got MIMO, whose members are slots of one network: use its "
            "outputs, or a method whose members are networks"
        )

    def _join(self, inputs: Tensor) -> Tensor:
        """Join the inputs along the axis of the first layer: (M, B, C, ...) -> (B, M C, ...)."""
        shape = inputs.shape[2:]
        along_last = shape[-1] == self.inputs and (self.is_linear or shape[0] != self.inputs)
        axis = inputs.ndim - 1 if along_last else 2
        if not self.is_linear and inputs.shape[axis] != self.inputs:
            raise EnfoldError(
                f"inputs must have an axis of {self.inputs} channels for the first layer, got inputs of shape "
                f"{tuple(shape)}: add the axis of channels"
            )
        split: Tensor = inputs.unflatten(axis, (self.groups[0], -1)).movedim(0, axis)  # (B, ..., groups, M, C / groups)
        return split.flatten(axis - 1, axis + 1).contiguous()  # a network may call view on its inputs


@dataclass(frozen=True)
class MIMOLoss:
    """The loss of each member on its own shuffle of the batch, drawn by torch's global generator.

    Args:
        num_members: M.
        batch_repetition: b.
        input_repetition: ρ.
        loss: The loss of a member.
    """

    num_members: int
    batch_repetition: int
    input_repetition: float
    loss: TaskLoss = TaskLoss()  # noqa: RUF009 - a frozen dataclass

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return (2) before the sum over members, (M,)."""
        seen = batch.divide(self.rows(len(batch)))
        outputs: Tensor = model.forward_each(in_type_of(model, seen.inputs))  # type: ignore[operator]
        return self.loss.of_outputs(at_least_float32(outputs), seen)

    def rows(self, size: int) -> Tensor:
        """Return which example of the batch is in which slot, (3): (M, b B)."""
        repeated = torch.arange(size).repeat(self.batch_repetition)
        common = repeated[torch.randperm(len(repeated))]
        cut = int(len(common) * (1 - self.input_repetition))
        own = [common[:cut][torch.randperm(cut)] for _ in range(self.num_members)]
        return torch.stack([torch.cat([shuffled, common[cut:]]) for shuffled in own])


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
