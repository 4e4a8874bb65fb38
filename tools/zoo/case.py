"""One network of a check: reproducible members, inputs, data and reference outputs.

Nothing here uses enfold. Copies are built again from the same seed, not by `copy.deepcopy`, which leaves functions
over `self` bound to the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold import Data, Split
from tools.zoo.entry import Entry, seeded

MEMBERS = 3
BATCH = 4
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}


class Wrong(Exception):
    """enfold differs from plain PyTorch."""


class Skipped(Exception):
    """The check does not apply, or plain PyTorch cannot do it either."""


class Case:
    """One network in one precision."""

    def __init__(self, entry: Entry, dtype: torch.dtype = torch.float32) -> None:
        self.entry, self.dtype = entry, dtype

    def build(self, index: int = 0, *, calm: bool = False, raw: bool = False, train: bool = False) -> nn.Module:
        """Return member `index`, always the same; perturbed unless `raw`, without dropout if `calm`."""
        seeded(1000 + index)
        network = self.entry.make(index)
        if not raw:
            stir(network)
        if calm:
            without_dropout(network)
        if self.dtype != torch.float32:
            network = network._apply(_doubled)
        return network.train(train)

    def nets(self, count: int = MEMBERS, **how: Any) -> list[nn.Module]:
        """Return the first `count` members."""
        return [self.build(index, **how) for index in range(count)]

    def batch(self, seed: int = 0, count: int = BATCH) -> Tensor:
        """Return a batch of inputs."""
        seeded(seed)
        inputs = self.entry.inputs(count)
        return inputs.to(self.dtype) if inputs.is_floating_point() else inputs

    def data(self, *, loader: bool = False, train: int = 12) -> Data:
        """Return labelled examples: in memory, or as a list of batches."""
        parts = []
        for seed, count in ((11, train), (12, 8), (13, 8)):
            parts.append((self.batch(seed, count), torch.arange(count) % self.entry.classes))
        shape = tuple(parts[0][0].shape[1:])
        made = [Split(*part) for part in parts]
        if not loader:
            return Data(*made, num_classes=self.entry.classes, shape=shape)
        inputs, labels = parts[0]
        batches = [(inputs[i : i + BATCH], labels[i : i + BATCH]) for i in range(0, train, BATCH)]
        return Data(batches, *made[1:], num_classes=self.entry.classes, shape=shape)

    def outputs(self, network: nn.Module, inputs: Tensor) -> Tensor:
        """Return the outputs of a network for a copy of the inputs."""
        return logits_of(network(inputs.clone()))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the outputs for one batch."""
        with torch.no_grad():
            return tuple(self.outputs(self.build(), self.batch()).shape)

    @property
    def classifies(self) -> bool:
        """True if outputs are logits of classes: (B, C)."""
        return self.shape == (BATCH, self.entry.classes)

    def require_classes(self) -> None:
        """Raise `Skipped` if the outputs cannot be trained with labels."""
        if not self.classifies:
            raise Skipped(f"outputs of shape {self.shape} are not logits of {self.entry.classes} classes")

    @cached_property
    def references(self) -> Tensor:
        """The outputs of every member in eval mode, each network built separately: (M, B, ...)."""
        with torch.no_grad():
            return torch.stack([self.outputs(network, self.batch()) for network in self.nets()])

    def drawing(self, *, calm: bool = True) -> bool:
        """Return whether outputs in train mode are random."""
        with torch.no_grad():
            found, inputs = [], self.batch()
            for seed in (1, 2):
                network = self.build(calm=calm, train=True)
                seeded(seed)
                found.append(self.outputs(network, inputs))
        return not torch.allclose(found[0], found[1], rtol=1e-4, atol=1e-6, equal_nan=True)

    @cached_property
    def is_random(self) -> bool:
        """True if outputs are random in eval mode, as with locality-sensitive hashing."""
        found, inputs = [], self.batch()
        with torch.no_grad():
            for seed in (1, 2):
                network = self.build()
                seeded(seed)
                found.append(self.outputs(network, inputs))
        return difference(found[0], found[1]) > TOLERANCE[self.dtype]

    def ordered(self) -> bool:
        """Return whether outputs in train mode depend on the order of the examples, as in ghost batch norm."""
        order = torch.arange(12).roll(5)
        with torch.no_grad():
            inputs = self.batch(count=12)
            straight = self.outputs(self.build(calm=True, train=True), inputs)[order]
            return difference(self.outputs(self.build(calm=True, train=True), inputs[order]), straight) > 1e-3

    def compare(self, found: Tensor, expected: Tensor, what: str, factor: float = 1.0) -> None:
        """Raise `Wrong` if the tensors differ by more than rounding."""
        off = difference(found, expected, what)
        if not off <= factor * TOLERANCE[self.dtype]:
            if self.is_random:
                raise Skipped("outputs are random in eval mode too")
            members = ""
            if found.ndim > 1 and len(found) == MEMBERS:
                each = [difference(f, e, what) for f, e in zip(found, expected, strict=True)]
                members = " (member by member " + ", ".join(f"{one:.1e}" for one in each) + ")"
            raise Wrong(f"{what}: {off:.1e} off{members}")

    def compare_states(self, found: nn.Module, expected: nn.Module, scale: float, what: str) -> None:
        """Raise `Wrong` if parameters or buffers differ by more than rounding, relative to `scale`."""
        theirs, ours = dict(expected.state_dict()), dict(found.state_dict())
        if theirs.keys() != ours.keys():
            raise Wrong(f"{what}: the keys of the state differ: {sorted(theirs.keys() ^ ours.keys())[:4]}")
        for name, tensor in theirs.items():
            if not isinstance(tensor, Tensor) or not tensor.numel():
                continue
            if not (tensor.is_floating_point() or tensor.is_complex()):
                if not torch.equal(tensor, ours[name]):
                    raise Wrong(f"{what}: '{name}' differs")
                continue
            off = float((ours[name] - tensor).abs().max()) / scale
            if not (off <= 10 * TOLERANCE[self.dtype] or (off != off and bool(tensor.isnan().any()))):
                raise Wrong(f"{what}: '{name}' is {off:.1e} of the largest change off")

    def loss(self, outputs: Tensor, seed: int = 5) -> Tensor:
        """Return a number that depends on all outputs of one member."""
        seeded(seed)
        weights = torch.randn(outputs.shape, dtype=torch.float64).to(outputs.real.dtype)
        return (weights * (outputs.real if outputs.is_complex() else outputs)).sum() / len(outputs)


def _doubled(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def logits_of(output: Any) -> Tensor:
    """Return the logits by the documented rule: a tensor, or `logits` of a dictionary or an object."""
    found = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise Skipped(f"it returns a {type(output).__name__}")
    return found


def difference(found: Tensor, expected: Tensor, what: str = "outputs") -> float:
    """Return the largest difference relative to the largest expected value."""
    if found.shape != expected.shape:
        raise Wrong(f"{what}: the shape is {tuple(found.shape)}, not {tuple(expected.shape)}")
    if not expected.numel() or torch.equal(found, expected):
        return 0.0
    found, expected = found.detach(), expected.detach()
    if bool(expected.isnan().any()):
        known = ~expected.isnan()
        if not torch.equal(known, ~found.isnan()):
            return float("nan")
        found, expected = found[known], expected[known]
        if not expected.numel():
            return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


@torch.no_grad()
def stir(network: nn.Module) -> None:
    """Perturb weights and statistics, so that initial zeros hide no difference."""
    for parameter in network.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.add_(0.05 * torch.randn_like(parameter))
    for name, buffer in network.named_buffers():
        if name.endswith(("running_mean", "running_var")) and buffer is not None:
            buffer.add_(0.2 * torch.rand_like(buffer))


def without_dropout(network: nn.Module) -> None:
    """Set all dropout rates to 0, for any name of the attribute."""
    for module in network.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(module).__name__)):
                setattr(module, name, 0.0)


def settled(check: Callable[[Case], str | None], entry: Entry) -> str | None:
    """Run a check in float32; a difference counts only if it exists in float64 too, if that is supported."""
    try:
        return check(Case(entry))
    except Wrong as error:
        try:
            Case(entry, torch.float64).references  # noqa: B018 (whether the network can)
        except Exception:
            raise error from None
        return check(Case(entry, torch.float64))


@contextmanager
def untouched(*networks: nn.Module) -> Iterator[None]:
    """Raise `Wrong` if the networks are changed in the block."""
    before = [{k: v.clone() for k, v in n.state_dict().items() if isinstance(v, Tensor)} for n in networks]
    yield
    for network, state in zip(networks, before, strict=True):
        now = network.state_dict()
        changed = [
            name for name, tensor in state.items() if not torch.equal(tensor, now[name]) and not tensor.isnan().any()
        ]
        if changed:
            raise Wrong(f"the network given was changed: '{changed[0]}'")
        if any(parameter.grad is not None for parameter in network.parameters()):
            raise Wrong("a gradient went into the network given")


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of labels."""
    return F.cross_entropy(outputs, labels)
