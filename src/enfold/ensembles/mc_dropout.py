"""MCDropout: samples of one network whose dropout stays active when it predicts.

    p̄(y | x) = 1/S Σ_s softmax(f(x; θ, mask_s)),      units scaled by mask / (1 - rate)                      (1)

Y. Gal, Z. Ghahramani: Dropout as a Bayesian Approximation: Representing Model Uncertainty in Deep Learning, ICML 2016,
arXiv:1506.02142. Published results use about 30 samples (`num_members=30`); the default here is that of other methods.

The network is trained as it is, with its own dropout. In eval mode only dropout is active: dropout modules, functional
dropout, dropout inside nn.MultiheadAttention, nn.TransformerEncoderLayer and recurrent layers; batch norm keeps its
statistics. Attention by hand that passes `dropout_p=0` in eval mode cannot be seen. A network without dropout gets it
by `inject`, before every layer with weights but the first (the only one, if there is one), in training too; `channels`
drops whole channels of what is convolved.

Masks depend on the seed, the sample and the place in the batch, never on the inputs or on earlier calls: the same batch
gives the same predictions, and an example may get other masks in another batch. `per_example=False` takes one mask a
sample for all examples of a batch. All samples run in one pass, in which what comes before the first dropout is
computed once, if that gives what one pass a sample gives; this is tried on a few examples at the first call.

Differs from the paper: rates are rounded to 1/65536; nothing else known.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.engines.base import image_layout
from enfold.engines.copying import copied
from enfold.engines.outputs import logits_of
from enfold.ensemble import Ensemble
from enfold.ensembles.common.dropout import Dropping, Streams, dropout_rates, row_axes
from enfold.ensembles.common.sharing import Share, require_size
from enfold.errors import EnfoldError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
DROP_CHANNELS = {3: F.dropout1d, 4: F.dropout2d, 5: F.dropout3d}  # by axes of a convolution's input
EXAMPLES, SAMPLES = 5, 3  # on which ways to run are compared; examples that no number of samples divides
MOST_UNITS = 1 << 22  # of the largest tensor in a pass: more samples would leave the cache and fill the memory

Way = Literal["late", "early", "alone"]  # inputs repeated in the first dropout, before the network, or not at all


@dataclass(frozen=True)
class MCDropout(Share):
    """Samples of one network whose dropout stays active when it predicts."""

    num_members: int = 4
    inject: float = 0.0  # the rate of dropout put into a network that has none
    channels: bool = False  # with inject: drop whole channels before convolutions
    per_example: bool = True  # a mask for each example, or one for the batch
    seed: int = 0

    def __post_init__(self) -> None:
        require_size(self.num_members)
        if not 0 <= self.inject < 1:
            raise EnfoldError(f"a dropout rate must be in [0, 1), got inject={self.inject}: 0.1 is the published one")

    def __call__(self, network: nn.Module) -> DropoutSamples:
        """A predictor that draws masks for a copy of the network."""
        return DropoutSamples(network, self)


class DropoutSamples(nn.Module):
    """One network: (B, ...) -> (1, B, C) in train mode, (S, B, C) in eval mode."""

    trained_members = 1
    forward_mean = Ensemble.forward_mean

    def __init__(self, network: nn.Module, share: MCDropout) -> None:
        rates = dropout_rates(network)
        if share.inject and rates:
            name, rate = next(iter(rates.items()))
            raise EnfoldError(
                f"dropout is injected where there is none, but '{name}' has the rate {rate} and inject is "
                f"{share.inject}: leave inject out, or set that rate to 0"
            )
        super().__init__()
        self.share = share
        self.num_members = share.num_members
        self.network = copied(network)
        self.training = network.training
        if share.inject:
            inject(self.network, share.inject, channels=share.channels)
        self.drops = bool(rates or share.inject)  # if not: perhaps by function, which the first call shows
        self._way: Way | None = None
        self._axes: list[int | None] = []  # of the examples in what is dropped from
        self._units = 1  # of the largest tensor that is dropped from, for one example

    @property
    def source_class(self) -> str:
        """The name of the network's class."""
        return type(self.network).__name__

    def member(self, index: int) -> nn.Module:
        """There is none: this says so."""
        raise EnfoldError(
            f"samples of MCDropout are one network under other masks and do not exist as separate networks, got "
            f"member({index}): take its outputs with model(inputs)[{index}], or the network itself with model.network"
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """In train mode the network with its dropout, in eval mode its samples."""
        if self.training and not self.drops and self._way is None and len(inputs):
            self._way = self._choose(inputs)  # before a network without dropout is trained for nothing
        if self.training or not len(inputs):
            outputs = logits_of(self.network(image_layout(self.network, inputs.clone())))[None]
            return outputs if self.training else outputs.expand(self.num_members, *outputs.shape[1:])
        drawn: Tensor = self.samples(inputs)
        return drawn

    def samples(self, inputs: Tensor) -> Tensor:
        """All samples, (S, B, C), as many in a pass as fit."""
        if self._way is None:
            self._way = self._choose(inputs)
        fit = max(1, MOST_UNITS // (self._units * len(inputs)))
        together = 1 if self._way == "alone" else fit
        return self._run(self.network, inputs, self.num_members, together, late=self._way == "late")[0]

    def _run(
        self, network: nn.Module, inputs: Tensor, samples: int, together: int, *, late: bool = False
    ) -> tuple[Tensor, list[Dropping]]:
        """The first samples, so many together, and what each pass has dropped."""
        streams, size = Streams(self.share.seed), len(inputs)
        inputs = image_layout(network, inputs)
        outputs, passes = [], []
        for first in range(0, samples, together):
            count = min(together, samples - first)
            # The inputs are always copied: a network may work on them in place.
            seen = inputs.clone() if late else inputs.repeat(count, *(1,) * (inputs.ndim - 1))
            drops = Dropping(streams, self._axes, first, count, late=late, per_example=self.share.per_example)
            with drops:
                logits = logits_of(network(image_layout(network, seen)))
            if drops.late:  # nothing was dropped
                logits = logits.repeat(count, *(1,) * (logits.ndim - 1))
            outputs.append(logits.unflatten(0, (count, size)))
            passes.append(drops)
        return torch.cat(outputs), passes

    @torch.no_grad()
    def _choose(self, inputs: Tensor) -> Way:
        """The fastest way that gives what one pass a sample gives, on a few examples and with no parameter constant."""
        few, more = (
            inputs[torch.arange(count, device=inputs.device) % len(inputs)] for count in (EXAMPLES, EXAMPLES + 1)
        )
        network = _varied(self.network).eval()
        shapes = [self._run(network, some, 1, 1)[1][0].shapes for some in (few, more)]
        self._axes = row_axes(*shapes)
        expected, passes = self._run(network, few, min(SAMPLES, self.num_members), 1)
        called = self.drops and any(drops.shapes for drops in passes)  # at a rate that was set to 0 since
        if not called and not any(drops.active for drops in passes):
            raise EnfoldError(
                f"MCDropout needs a network with dropout of a rate above 0, but {self.source_class} has none: "
                "give it dropout, or have it put in and trained with inject: 0.1"
            )
        self._units = max(tensor.numel() // EXAMPLES for tensor in (few.shape, *shapes[0]))
        ways: tuple[Way, ...] = ("late", "early")
        return next((way for way in ways if self._gives(expected, network, few, late=way == "late")), "alone")

    def _gives(self, expected: Tensor, network: nn.Module, few: Tensor, *, late: bool) -> bool:
        try:
            found, _ = self._run(network, few, len(expected), len(expected), late=late)
        except Exception:  # examples that meet samples of others, in the user's forward or in ours
            return False
        tolerance = expected.abs().max() * torch.finfo(expected.dtype).eps ** 0.5
        return found.shape == expected.shape and bool(((found - expected).abs() <= tolerance).all())


def _varied(network: nn.Module) -> nn.Module:
    """A copy with noise on all parameters: behind a layer of zeros, or of equal units, all ways look the same."""
    twin = copied(network)
    source = torch.Generator().manual_seed(0)
    for parameter in twin.parameters():
        if parameter.is_floating_point():
            spread = parameter.detach().std(correction=0).clamp_min(0.1)
            noise = torch.randn(parameter.shape, generator=source).to(parameter)
            parameter.data += 0.5 * spread * noise
    return twin


def inject(network: nn.Module, rate: float, *, channels: bool) -> None:
    """Dropout of the input of every linear layer and convolution, in place, but of the first: that is the data."""
    kinds = (nn.Linear, *CONVOLUTIONS)
    layers = [module for module in network.modules() if isinstance(module, (*kinds, nn.Embedding))]
    chosen = [module for module in layers[1:] or layers if isinstance(module, kinds)]
    if not chosen:
        raise EnfoldError(
            f"dropout is injected before linear layers and convolutions, but {type(network).__name__} has none after "
            "its first layer: put dropout into the network itself"
        )
    for module in chosen:
        module.register_forward_pre_hook(partial(_drop_input, rate=rate, channels=channels))


def _drop_input(module: nn.Module, args: tuple[Any, ...], *, rate: float, channels: bool) -> tuple[Any, ...]:
    by_channel = channels and isinstance(module, CONVOLUTIONS)
    drop = DROP_CHANNELS.get(args[0].ndim, F.dropout) if by_channel else F.dropout
    return drop(args[0], rate, module.training), *args[1:]
