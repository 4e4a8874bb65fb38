"""Ensemble: M networks of one architecture behind one call."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, Self, overload

import torch
from torch import Tensor, nn

from enfold.engines.base import EngineName, Loop
from enfold.engines.choice import choose_engine, require_engine
from enfold.engines.groups import Decay, decay_groups
from enfold.engines.inputs import in_type_of
from enfold.engines.outputs import logits_of, require_classes
from enfold.engines.pool import EnginePool
from enfold.engines.program import StackedProgram
from enfold.engines.shapes import refuse_shape
from enfold.engines.skeleton import Skeleton, State
from enfold.engines.trial import Example
from enfold.engines.verify import Mismatch, separate, verify
from enfold.errors import EnfoldError
from enfold.metrics.predictions import mean_log_probs

if TYPE_CHECKING:
    from enfold.engines.base import Engine
    from enfold.ensembles.deep_ensemble import DeepEnsemble


class Predictor(Protocol):
    """Anything that can be evaluated: the member axis is always there and always first."""

    @property
    def num_members(self) -> int:
        """M."""

    def __call__(self, inputs: Tensor, /) -> Tensor:
        """(B, ...) -> (M, B, C)."""


class Ensemble(nn.Module, ABC):
    """M networks of one architecture; a method says in `expand` what their parameters are, the rest follows.

    An engine runs them: `stacked` (one batched product a layer), `loop` (one network after the other, convolutions in
    channels-last), `vmap`. "auto" takes what `make bench` found fastest for such a network; "measure" times all.
    """

    expands: bool = True  # whether `expand` computes something, so that it is worth to be kept in eval mode
    share: Any = None  # the method that made them, with its settings; None if every member owns all

    def __init__(self, network: nn.Module | Sequence[nn.Module], num_members: int, engine: EngineName = "auto") -> None:
        if num_members < 1:
            raise EnfoldError(f"an ensemble must have at least 1 member, got {num_members}: pass num_members >= 1")
        require_engine(engine)
        super().__init__()
        networks = [network] if isinstance(network, nn.Module) else list(network)
        self.num_members = num_members
        self.codes = [Skeleton(each) for each in networks]  # of every member, or one that stands for all
        self.is_separate: bool | None = None  # whether members run as separate modules; None before the first batch
        self.mismatch: Mismatch | None = None  # why they do
        self._covers_training = False  # whether members were compared with their networks in train mode, too
        self.example: Example | None = None  # what the first inputs were like
        self.training = networks[0].training  # its parts keep their own modes, so a frozen norm stays frozen
        self.engine_name: EngineName = engine
        self._engine: Engine | None = None
        self._expanded: tuple[object, State] | None = None
        self._pool = EnginePool()

    @property
    def skeleton(self) -> Skeleton:
        """The code of the first network."""
        return self.codes[0]

    def code(self, index: int) -> Skeleton:
        """The code that member `index` runs: the first network's if it was seen to do the same, else its own."""
        return self.codes[0] if self.is_separate is False or len(self.codes) == 1 else self.codes[index]

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
        before, example = self._engine, inputs[0] if each else inputs
        try:
            # A program puts no values into modules: any number of threads may run it.
            if isinstance(before, StackedProgram) and not self._must_verify():
                return self._run_by(before, inputs, each)
            with self._pool.borrow(lambda: self.engine(example)) as engine:
                return self._run_by(engine, inputs, each)
        except Exception as error:
            if before is None:
                self._engine = None  # inputs that do not run are no inputs to choose by
                refuse_shape(self, example, error)
            raise

    def _run_by(self, engine: Engine, inputs: Tensor, each: bool) -> Tensor:
        # A loop copies them for every member.
        if any(code.writes_inputs for code in self.codes) and not isinstance(engine, Loop):
            inputs = inputs.clone()
        return engine(self._running_state(engine), inputs, each)

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
        expanded = self._expanded  # another thread may change it
        if expanded is None or expanded[0] != held:
            expanded = self._expanded = (held, self.expand())
        return expanded[1]

    def _held(self) -> Iterator[Tensor]:
        return chain(self.parameters(), self.buffers())

    def looped(self, inputs: Tensor) -> bool:
        """Whether members are run one after the other, so that their gradients may be taken one after the other."""
        return isinstance(self.engine(inputs), Loop)

    def engine(self, inputs: Tensor) -> Engine:
        """What runs the members; chosen once, with the first inputs (B, ...)."""
        if not len(inputs) or (self._engine is None and torch.compiler.is_exporting()):
            return self._loop()  # there are no examples to choose by, or none with values
        if self._must_verify():
            self.verify(inputs)
            if self.is_separate is None:  # they could not be compared: every one runs its own code
                return self._loop()
        if self._engine is None:
            self._engine = self._loop() if self.is_separate else self._choose(inputs)
        return self._engine

    def _must_verify(self) -> bool:
        return self.is_separate is None or (self.training and not (self.is_separate or self._covers_training))

    def _loop(self) -> Loop:
        return Loop(self.codes if self.is_separate is not False else self.codes[:1])

    def _choose(self, inputs: Tensor) -> Engine:
        return choose_engine(self.engine_name, self.skeleton, self.expand(), inputs)

    def verify(self, inputs: Tensor) -> None:
        """Compare every member with its own network, once, with the first inputs (B, ...).

        Members that do not all do what their networks do with the code of the first one run as separate modules.

        Raises:
            EnfoldError: If members cannot be run as their networks are, or not by the engine that was named.
        """
        if not self._must_verify():
            return
        found = verify(self.codes, self.expand(), inputs)
        if not found.is_complete:
            return
        if found.mismatch is not None:
            found.mismatch.report(self.engine_name)
            self.codes, self._engine = separate(self.codes, self.num_members), None
            self._pool.clear()
        self.mismatch, self.is_separate = found.mismatch, found.mismatch is not None
        self._covers_training, self.example = found.covers_training, Example.like(inputs)

    @property
    def trained_members(self) -> int:
        """How many networks are trained: all members, or the one around which they will be drawn."""
        return self.num_members

    def set_engine(self, engine: EngineName) -> Self:
        """Run by another engine from now on."""
        self.engine_name, self._engine = require_engine(engine), None
        self._pool.clear()
        return self

    def train(self, mode: bool = True) -> Self:
        """Put the members into train or eval mode."""
        super().train(mode)
        for code in self.codes:
            code.network.train(mode)
        self._expanded = None
        self._pool.clear()
        return self

    def network(self, state: State) -> nn.Module:
        """A plain network of the user's class with these values (copied), in this object's mode."""
        return self.skeleton.materialise(state)

    def mean_state(self) -> State:
        """Return the mean of the members' values; counters and index buffers, which have no mean, are member 0's."""
        return {
            name: stacked.mean(dim=0) if stacked.is_floating_point() or stacked.is_complex() else stacked[0]
            for name, stacked in self.expand().items()
        }

    @torch.no_grad()
    def member(self, index: int) -> nn.Module:
        """Member `index` as a plain network of the user's class; it shares nothing with this object."""
        if not -self.num_members <= index < self.num_members:
            raise EnfoldError(
                f"there are {self.num_members} members, got index {index}: "
                f"use {-self.num_members} to {self.num_members - 1}"
            )
        code = self.codes[index] if len(self.codes) > 1 else self.skeleton
        with self.exclusive():
            return code.materialise({name: tensor[index] for name, tensor in self.expand().items()})

    def exclusive(self) -> AbstractContextManager[bool]:
        """Inside the block no other thread runs the modules of this ensemble; it runs copies of them."""
        return self._pool.lock

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
    def __getitem__(self, index: slice | Sequence[int]) -> DeepEnsemble: ...
    def __getitem__(self, index: int | slice | Sequence[int]) -> nn.Module | DeepEnsemble:
        """One member as a network, or several as `DeepEnsemble` copies: ``members[0]``, ``members[:3]``."""
        if isinstance(index, int):
            return self.member(index)
        from enfold.ensembles.deep_ensemble import DeepEnsemble

        chosen = range(self.num_members)[index] if isinstance(index, slice) else index
        return DeepEnsemble([self.member(k) for k in chosen], engine=self.engine_name)

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """What an optimizer gets: groups with `params`, `weight_decay` and, where they differ, `lr_scale` (a factor on
        the learning rate) and `member_axis` (whether the leading axis of the parameters is the member)."""
        return decay_groups([(parameter, parameter.ndim) for parameter in self.parameters()], weight_decay, decay)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        with self.exclusive():
            vars(twin).update(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_engine": None, "_expanded": None}  # these belong to the object they were made for

    def extra_repr(self) -> str:
        """Shown by print(members)."""
        network = type(self.skeleton.network).__name__
        count = sum(parameter.numel() for parameter in self.parameters())
        return f"{self.num_members} x {network}, {count:,} parameters, engine={self.engine_name!r}"


def share_of(model: nn.Module) -> Any:
    """Return the method that made a model, or None; a user's network may have an attribute of that name."""
    share = getattr(model, "share", None)
    return share if hasattr(share, "adapted") else None


def trained_members(model: nn.Module) -> int:
    """How many losses a model gives in training; 1 for a plain network."""
    return int(getattr(model, "trained_members", getattr(model, "num_members", 1)))


class MixedEnsemble(nn.Module):
    """Networks of different architectures behind one call: a predictor and a teacher, never a merge input."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        if not networks:
            raise EnfoldError("an ensemble must have at least 1 member, got none: pass a list of networks")
        for network in networks:
            if hasattr(network, "num_members"):
                raise EnfoldError(
                    f"the members of MixedEnsemble must be single networks, got a {type(network).__name__} of "
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
        # Each network has inputs of its own, which it may work on in place.
        outputs = [logits_of(network(in_type_of(network, inputs.clone()))) for network in self.members]
        classes = sorted({output.shape[-1] for output in outputs})
        if len(classes) > 1:
            raise EnfoldError(
                f"all members must have the same number of classes, got {classes}: train them on the same labels"
            )
        return torch.stack(outputs)

    forward_mean = Ensemble.forward_mean
