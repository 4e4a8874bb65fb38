"""Members: M networks of one architecture behind one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, Self, overload

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.members.choice import choose_engine, require_engine
from enfold.members.engines import EngineName, Loop
from enfold.members.groups import Decay, decay_groups
from enfold.members.inputs import in_type_of
from enfold.members.outputs import logits_of, require_classes
from enfold.members.shapes import refuse_shape
from enfold.members.skeleton import Skeleton, State
from enfold.predictions import mean_log_probs

if TYPE_CHECKING:
    from enfold.members.engines import Engine
    from enfold.members.stacked import Stacked


class Predictor(Protocol):
    """Anything that can be evaluated: the member axis is always there and always first."""

    @property
    def num_members(self) -> int:
        """M."""

    def __call__(self, inputs: Tensor, /) -> Tensor:
        """(B, ...) -> (M, B, C)."""


class Members(nn.Module, ABC):
    """M networks of one architecture; a method says in `expand` what their parameters are, the rest follows.

    An engine runs them: `stacked` (one batched product a layer), `loop` (one network after the other, convolutions in
    channels-last), `vmap`. "auto" takes what `make bench` found fastest for such a network; "measure" times all.
    """

    expands: bool = True  # whether `expand` computes something, so that it is worth to be kept in eval mode
    share: Any = None  # the method that made them, with its settings; None if every member owns all

    def __init__(self, network: nn.Module, num_members: int, engine: EngineName = "auto") -> None:
        if num_members < 1:
            raise EnfoldError(f"an ensemble must have at least 1 member, got {num_members}: pass num_members >= 1")
        require_engine(engine)
        super().__init__()
        self.num_members = num_members
        self.skeleton = Skeleton(network)
        self.training = network.training  # its parts keep their own modes, so a frozen norm stays frozen
        self.engine_name: EngineName = engine
        self._engine: Engine | None = None
        self._expanded: tuple[object, State] | None = None

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor as what it is in the network: a parameter, frozen as there, or a buffer."""
        if name in self.skeleton.parameters:
            return nn.Parameter(tensor, requires_grad=name in self.skeleton.trainable)
        return tensor

    @abstractmethod
    def expand(self) -> State:
        """All members' parameters and buffers, each (M, *its shape in the network), differentiable."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Every member's logits for the same inputs: (B, ...) -> (M, B, C)."""
        return self._run(inputs, each=False)

    def forward_each(self, inputs: Tensor) -> Tensor:
        """Each member's logits for its own inputs: (M, B, ...) -> (M, B, C)."""
        if inputs.shape[0] != self.num_members:
            raise EnfoldError(
                f"forward_each needs one batch a member, got {inputs.shape[0]} batches for {self.num_members} "
                "members: pass inputs of shape (M, B, ...)"
            )
        return self._run(inputs, each=True)

    def forward_mean(self, inputs: Tensor) -> Tensor:
        """Log of the members' mean probability, (B, C): stands wherever a network that returns logits stood.

        Raises:
            UnsupportedOutput: If the outputs are not (M, B, C) with at least two classes.
        """
        return mean_log_probs(torch.log_softmax(require_classes(self(inputs), "forward_mean"), dim=-1))

    def _run(self, inputs: Tensor, *, each: bool) -> Tensor:
        before = self._engine
        try:
            engine = self.engine(inputs[0] if each else inputs)
            return engine(self._running_state(engine), inputs, each)
        except Exception as error:
            self._engine = before  # inputs that do not run are no inputs to choose by
            if before is None:
                refuse_shape(self, inputs[0] if each else inputs, error)
            raise

    def _running_state(self, engine: Engine) -> State:
        """What an engine runs on: `expand`, made once and kept in eval mode while no gradient is wanted.

        A change in place is seen by the tensor's version. What is written past it, to `parameter.data`, is seen after
        the next call of `eval`.
        """
        kept = self.expands and not (self.training or torch.is_grad_enabled() or torch.compiler.is_exporting())
        tensors = list(self._held()) if kept else []
        if not tensors or any(t.is_inference() or torch.is_autocast_enabled(t.device.type) for t in tensors):
            return self.expand()
        held = [(id(t), t.data_ptr(), t._version) for t in tensors]
        if self._expanded is None or self._expanded[0] != held:
            self._expanded = (held, self.expand())
        return self._expanded[1]

    def _held(self) -> Iterator[Tensor]:
        return chain(self.parameters(), self.buffers())

    def looped(self, inputs: Tensor) -> bool:
        """Whether members are run one after the other, so that their gradients may be taken one after the other."""
        return isinstance(self.engine(inputs), Loop)

    def engine(self, inputs: Tensor) -> Engine:
        """What runs the members; chosen once, with the first inputs (B, ...)."""
        if not len(inputs) or (self._engine is None and torch.compiler.is_exporting()):
            return Loop(self.skeleton)  # there are no examples to choose by, or none with values
        if self._engine is None:
            self._engine = choose_engine(self.engine_name, self.skeleton, self.expand(), inputs)
        return self._engine

    @property
    def trained_members(self) -> int:
        """How many networks are trained: all members, or the one around which they will be drawn."""
        return self.num_members

    def set_engine(self, engine: EngineName) -> Self:
        """Run by another engine from now on."""
        self.engine_name, self._engine = require_engine(engine), None
        return self

    def train(self, mode: bool = True) -> Self:
        """Put the members into train or eval mode."""
        super().train(mode)
        self.skeleton.network.train(mode)
        self._expanded = None
        return self

    def network(self, state: State) -> nn.Module:
        """A plain network of the user's class with these values (copied), in this object's mode."""
        return self.skeleton.materialise(state)

    @torch.no_grad()
    def member(self, index: int) -> nn.Module:
        """Member `index` as a plain network of the user's class; it shares nothing with this object."""
        if not -self.num_members <= index < self.num_members:
            raise EnfoldError(
                f"there are {self.num_members} members, got index {index}: "
                f"use {-self.num_members} to {self.num_members - 1}"
            )
        return self.network({name: tensor[index] for name, tensor in self.expand().items()})

    def networks(self) -> list[nn.Module]:
        """All members as plain networks."""
        return [self.member(index) for index in range(self.num_members)]

    def __len__(self) -> int:
        return self.num_members

    def __iter__(self) -> Iterator[nn.Module]:
        return (self.member(index) for index in range(self.num_members))

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int]) -> Stacked: ...
    def __getitem__(self, index: int | slice | Sequence[int]) -> nn.Module | Stacked:
        """One member as a network, or several as `Stacked` copies: ``members[0]``, ``members[:3]``."""
        if isinstance(index, int):
            return self.member(index)
        from enfold.members.stacked import Stacked

        chosen = range(self.num_members)[index] if isinstance(index, slice) else index
        return Stacked([self.member(k) for k in chosen], engine=self.engine_name)

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """What an optimizer gets: groups with `params`, `weight_decay` and, where they differ, `lr_scale` (a factor on
        the learning rate) and `member_axis` (whether the leading axis of the parameters is the member)."""
        return decay_groups([(parameter, parameter.ndim) for parameter in self.parameters()], weight_decay, decay)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_engine": None, "_expanded": None}  # these belong to the object they were made for

    def extra_repr(self) -> str:
        """Shown by print(members)."""
        network = type(self.skeleton.network).__name__
        count = sum(parameter.numel() for parameter in self.parameters())
        return f"{self.num_members} x {network}, {count:,} parameters, engine={self.engine_name!r}"


def trained_members(model: nn.Module) -> int:
    """How many losses a model gives in training; 1 for a plain network."""
    return int(getattr(model, "trained_members", getattr(model, "num_members", 1)))


class Mixed(nn.Module):
    """Networks of different architectures behind one call: a predictor and a teacher, never a merge input."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        if not networks:
            raise EnfoldError("an ensemble must have at least 1 member, got none: pass a list of networks")
        for network in networks:
            if hasattr(network, "num_members"):
                raise EnfoldError(
                    f"the members of Mixed must be single networks, got a {type(network).__name__} of "
                    f"{network.num_members} members: pass them one by one with *members.networks()"
                )
        super().__init__()
        self.members = nn.ModuleList(networks)

    @property
    def num_members(self) -> int:
        """M."""
        return len(self.members)

    def forward(self, inputs: Tensor) -> Tensor:
        """Every network's logits for the same inputs: (B, ...) -> (M, B, C)."""
        outputs = [logits_of(network(in_type_of(network, inputs))) for network in self.members]
        classes = sorted({output.shape[-1] for output in outputs})
        if len(classes) > 1:
            raise EnfoldError(
                f"all members must have the same number of classes, got {classes}: train them on the same labels"
            )
        return torch.stack(outputs)

    forward_mean = Members.forward_mean
