"""MCDropout: samples of one network whose dropout is active in prediction.

    p̄(y | x) = 1/S Σ_s softmax(f(x; θ, mask_s)),      units scaled by mask / (1 - rate)                      (1)

Y. Gal, Z. Ghahramani: Dropout as a Bayesian Approximation: Representing Model Uncertainty in Deep Learning, ICML 2016,
arXiv:1506.02142. Published results use about 30 samples (`num_members=30`).

The network is trained with its own dropout. In eval mode only dropout is active: dropout modules, functional dropout,
dropout inside nn.MultiheadAttention, nn.TransformerEncoderLayer and recurrent layers; batch norm uses its running
statistics. A custom attention that passes `dropout_p=0` in eval mode is not detected. `inject` adds dropout to a
network without dropout, in training, too: before every layer with weights but the first (or before the only one);
`channels` drops complete channels before convolutions.

Masks depend on the seed, the sample and the position in the batch, never on the inputs or on earlier calls: the same
batch gives the same predictions, and an example may have other masks in another batch. `per_example=False` uses one
mask per sample for all examples of a batch. All samples run in one pass, and what precedes the first dropout is
computed once, if that gives the same as one pass per sample; this is compared for a few examples in the first call.

Differs from the paper: rates are rounded to 1/65536.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.tree import clone, count_examples, repeat_examples, select_examples, tensors
from enfold.engines.call import call_network, pack_inputs
from enfold.engines.copying import copy_network
from enfold.engines.layout import arrange_for
from enfold.engines.outputs import get_logits
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.common.dropout import Dropping, Streams, dropout_rates, row_axes
from enfold.errors import EnfoldError, UnsuitableNetwork

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
DROP_CHANNELS = {3: F.dropout1d, 4: F.dropout2d, 5: F.dropout3d}  # by axes of a convolution's input
EXAMPLES, SAMPLES = 5, 3  # on which ways to run are compared; examples that no number of samples divides
MOST_UNITS = 1 << 22  # of the largest tensor in a pass: more samples would leave the cache and fill the memory

Way = Literal["late", "early", "alone"]  # inputs repeated in the first dropout, before the network, or not at all


@checked
class MCDropout(Ensemble):
    """Samples of one network whose dropout is active in prediction.

    In train mode outputs are (1, B, C), in eval mode (S, B, C). `module` is the network.

    Args:
        network: The network. It is not modified.
        num_members: S: the number of samples.
        inject: The rate of dropout to add to a network that has none, in [0, 1); 0.1 is published.
        channels: With `inject`, drop complete channels before convolutions.
        per_example: Use a mask for every example, or one per sample for the batch.
        seed: The seed of the masks.
    """

    def __init__(
        self,
        network: nn.Module,
        num_members: PositiveInt = 4,
        *,
        inject: Annotated[float, Field(ge=0, lt=1)] = 0.0,
        channels: bool = False,
        per_example: bool = True,
        seed: int = 0,
    ) -> None:
        rates = dropout_rates(network)
        if inject and rates:
            name, rate = next(iter(rates.items()))
            raise UnsuitableNetwork(
                f"inject must be 0 for a network with dropout, but '{name}' has the rate {rate} and inject is {inject}"
                ": leave inject out, or set that rate to 0"
            )
        super().__init__([], num_members)
        self.inject, self.channels, self.per_example, self.seed = inject, channels, per_example, seed
        self.module = copy_network(network)
        self.training = network.training
        if inject:
            inject_dropout(self.module, inject, channels=channels)
        self.has_dropout = bool(rates or inject)  # functional dropout is detected in the first call
        self._way: Way | None = None
        self._axes: list[int | None] = []  # of the examples, in the inputs of each dropout
        self._units = 1  # per example, of the largest input of a dropout

    @property
    def trained_members(self) -> int:
        """One: the network."""
        return 1

    def called_networks(self) -> list[nn.Module]:
        """Return the network."""
        return [self.module]

    def member(self, index: int) -> nn.Module:
        """Raise an error: members do not exist as networks."""
        raise EnfoldError(
            f"members of MCDropout are one network under different masks and do not exist as separate networks, got "
            f"member({index}): take its outputs with ensemble(inputs)[{index}], or the network with ensemble.module"
        )

    def expand(self) -> State:
        """Raise an error: members do not exist as networks."""
        raise EnfoldError(
            "expand needs members that are networks, got MCDropout, whose members are one network under different "
            "masks: use ensemble.module, or a method whose members are networks"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the samples, (S, B, ...); in train mode the network with its dropout, (1, B, ...)."""
        inputs = pack_inputs(args, kwargs)
        is_empty = count_examples(inputs) == 0
        if self.training and not self.has_dropout and self._way is None and not is_empty:
            self._way = self._choose_way(inputs)  # raises an error for a network without dropout before it is trained
        if self.training or is_empty:
            outputs = get_logits(call_network(self.module, arrange_for(self.module, clone(inputs))), self.module)[None]
            return outputs if self.training else outputs.expand(self.num_members, *outputs.shape[1:])
        drawn: Tensor = self.samples(inputs)
        return drawn

    def forward_each(self, inputs: Tensor) -> Tensor:
        """Return the logits of the network in train mode: (1, B, ...) -> (1, B, C).

        Raises:
            EnfoldError: In eval mode, as samples have no inputs of their own.
        """
        if self.training and len(inputs) == 1:
            return self.forward(inputs[0])
        raise EnfoldError(
            f"inputs must be one batch for all samples of MCDropout, got {len(inputs)} batches: call ensemble(inputs)"
        )

    def samples(self, inputs: Any) -> Tensor:
        """Return all samples, (S, B, ...), computed in passes of as many as fit into memory."""
        if self._way is None:
            self._way = self._choose_way(inputs)
        fit = max(1, MOST_UNITS // (self._units * (count_examples(inputs) or 1)))
        together = 1 if self._way == "alone" else fit
        return self._sample(self.module, inputs, self.num_members, together, late=self._way == "late")[0]

    def _sample(
        self, network: nn.Module, inputs: Any, samples: int, together: int, *, late: bool = False
    ) -> tuple[Tensor, list[Dropping]]:
        """Return the first samples, `together` per pass, and the dropouts of each pass."""
        streams = Streams(self.seed)
        inputs = arrange_for(network, inputs)
        outputs, passes = [], []
        for first in range(0, samples, together):
            count = min(together, samples - first)
            # The inputs are always copied, as a network may write to them.
            seen = clone(inputs) if late or count == 1 else repeat_examples(inputs, count)
            drops = Dropping(streams, self._axes, first, count, late=late, per_example=self.per_example)
            with drops:
                logits = get_logits(call_network(network, arrange_for(network, seen)), network)
            if drops.late:  # nothing was dropped
                logits = logits.repeat(count, *(1,) * (logits.ndim - 1))
            outputs.append(logits.unflatten(0, (count, len(logits) // count)))
            passes.append(drops)
        return torch.cat(outputs), passes

    @torch.no_grad()
    def _choose_way(self, inputs: Any) -> Way:
        """Return the fastest way that equals one pass per sample, on a few examples and with varied parameters."""
        size = count_examples(inputs)
        few, more = (
            inputs if size is None else select_examples(inputs, torch.arange(count) % size)
            for count in (EXAMPLES, EXAMPLES + 1)
        )
        network = _perturb_copy(self.module).eval()
        shapes = [self._sample(network, some, 1, 1)[1][0].shapes for some in (few, more)]
        self._axes = row_axes(*shapes)
        expected, passes = self._sample(network, few, min(SAMPLES, self.num_members), 1)
        called = self.has_dropout and any(drops.shapes for drops in passes)  # at a rate that was set to 0 since
        if not called and not any(drops.active for drops in passes):
            raise EnfoldError(
                f"MCDropout needs a network with dropout of a rate above 0, but {type(self.module).__name__} has none: "
                "add dropout to it, or pass inject=0.1"
            )
        self._units = max(shape.numel() // EXAMPLES for shape in (*(t.shape for t in tensors(few)), *shapes[0]))
        ways: tuple[Way, ...] = () if size is None else ("late", "early")
        return next((way for way in ways if self._is_same(expected, network, few, late=way == "late")), "alone")

    def _is_same(self, expected: Tensor, network: nn.Module, few: Any, *, late: bool) -> bool:
        try:
            found, _ = self._sample(network, few, len(expected), len(expected), late=late)
        except Exception:  # examples of several samples cannot be in one batch of this network
            return False
        tolerance = expected.abs().max() * torch.finfo(expected.dtype).eps ** 0.5
        return found.shape == expected.shape and bool(((found - expected).abs() <= tolerance).all())


def _perturb_copy(network: nn.Module) -> nn.Module:
    """Return a copy with noise on all parameters: after a layer of zeros, or of equal units, all ways look the same."""
    twin = copy_network(network)
    source = torch.Generator().manual_seed(0)
    for parameter in twin.parameters():
        if parameter.is_floating_point():
            spread = parameter.detach().std(correction=0).clamp_min(0.1)
            noise = torch.randn(parameter.shape, generator=source).to(parameter)
            parameter.data += 0.5 * spread * noise
    return twin


def inject_dropout(network: nn.Module, rate: float, *, channels: bool) -> None:
    """Add dropout before every linear layer and convolution but the first, in place."""
    kinds = (nn.Linear, *CONVOLUTIONS)
    layers = [module for module in network.modules() if isinstance(module, (*kinds, nn.Embedding))]
    chosen = [module for module in layers[1:] or layers if isinstance(module, kinds)]
    if not chosen:
        raise UnsuitableNetwork(
            f"inject needs linear layers or convolutions after the first layer, but {type(network).__name__} has none: "
            "add dropout to the network itself"
        )
    for module in chosen:
        module.register_forward_pre_hook(partial(_drop_input, rate=rate, channels=channels))


def _drop_input(module: nn.Module, args: tuple[Any, ...], *, rate: float, channels: bool) -> tuple[Any, ...]:
    by_channel = channels and isinstance(module, CONVOLUTIONS)
    drop = DROP_CHANNELS.get(args[0].ndim, F.dropout) if by_channel else F.dropout
    return drop(args[0], rate, module.training), *args[1:]
