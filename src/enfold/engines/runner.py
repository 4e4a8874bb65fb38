"""Runner: run M networks from stacked parameters, by an engine that is chosen and verified with the first batch."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from enfold.data.tree import clone, count_examples, describe_structure
from enfold.engines.base import Engine, EngineName, Loop
from enfold.engines.call import pack_inputs, unwrap_inputs
from enfold.engines.choose import choose_engine, require_engine
from enfold.engines.examples import Example, describe_example
from enfold.engines.inputs import call_protected, in_type_of, refuse_shape
from enfold.engines.layout import arrange_for
from enfold.engines.outputs import get_logits
from enfold.engines.pool import EnginePool
from enfold.engines.skeleton import Skeleton, State
from enfold.engines.stacked import StackedProgram
from enfold.engines.verify import Mismatch, separate, verify


def network_logits(network: nn.Module, inputs: Any) -> Tensor:
    """Return the outputs of a single network with a member axis, (1, B, ...); the inputs are left unchanged."""
    converted = arrange_for(network, in_type_of(network, inputs))
    # Of inputs of another structure some tensors may be the given ones.
    is_given = converted is inputs or not isinstance(inputs, Tensor)
    return get_logits(call_protected(network, converted) if is_given else network(converted), network)[None]


class MemberView(nn.Module):
    """One member of an ensemble as a module: the shared code of the members with the values of one of them.

    Args:
        code: The code of the member.
        state: The parameters and buffers of the member.
    """

    def __init__(self, code: Skeleton, state: State) -> None:
        super().__init__()
        self._source = (code, state)  # in a tuple, so that nothing is registered as a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of the member: (B, ...) -> (1, B, ...)."""
        code, state = self._source
        with code.use_values(state) as network:
            return network_logits(network, pack_inputs(args, kwargs))


class Runner(nn.Module, ABC):
    """A module that runs M networks from the stacked parameters that `expand` returns.

    With the first batch, every member is compared with its own network; members that the code of the first network
    does not reproduce run as separate modules. The engine is chosen with the same batch.

    Args:
        networks: The networks, one per member, or a single one that stands for all. Empty for subclasses that
            override `forward` and do not use an engine.
        num_members: The number of members.
        engine: The engine; see `Ensemble`.
    """

    computes_state: ClassVar[bool] = True  # whether `expand` computes its result, which is then cached in eval mode

    def __init__(self, networks: Sequence[nn.Module], num_members: int, engine: EngineName) -> None:
        require_engine(engine)
        super().__init__()
        self.num_members = num_members
        self.engine: EngineName = engine
        self.initial_engine: EngineName = engine  # for which parameters are laid out in memory
        self.codes = [Skeleton(network) for network in networks]
        if networks:
            self.training = networks[0].training  # submodules keep their own modes, so a frozen norm stays frozen
        self.is_separate: bool | None = None  # whether members run as separate modules; None before the first batch
        self.mismatch: Mismatch | None = None  # the reason, if they do
        self.example: Example | None = None  # the shape and type of the first inputs
        self._covers_training = False  # whether members were compared with their networks in train mode, too
        self._engine: Engine | None = None
        self._others: dict[object, Engine] = {}  # for inputs of another structure
        self._expanded: tuple[object, State] | None = None
        self._pool = EnginePool()

    @abstractmethod
    def expand(self) -> State:
        """Return all parameters and buffers, each (M, *shape in the network), differentiable."""

    @property
    def is_expandable(self) -> bool:
        """Return whether the members are networks of one architecture, so that `expand` returns their parameters."""
        return bool(self.codes)

    @property
    def skeleton(self) -> Skeleton:
        """The code of the first network."""
        return self.codes[0]

    def code(self, index: int) -> Skeleton:
        """Return the code that member `index` runs: the first network's if it was verified for all, else its own."""
        return self.codes[0] if self.is_separate is False or len(self.codes) == 1 else self.codes[index]

    def _run(self, inputs: Any, *, each: bool) -> Tensor:
        """Run all members on the same inputs, or `each` on its own, a tensor (M, B, ...); return (M, B, ...)."""
        before, example = self._engine, inputs[0] if each else inputs
        try:
            # A program puts no values into modules: any number of threads may run it.
            if isinstance(before, StackedProgram) and before.accepts(example) and not self._must_verify():
                return self._run_by(before, inputs, each)
            with self._pool.borrow(lambda: self.choose_engine(example)) as engine:
                return self._run_by(engine, inputs, each)
        except Exception as error:
            if before is None:
                self._engine = None  # the choice is repeated with inputs that run
                refuse_shape(self, example, error)
            raise

    def _run_by(self, engine: Engine, inputs: Any, each: bool) -> Tensor:
        # A loop copies the inputs for every member itself.
        if any(code.writes_inputs for code in self.codes) and not isinstance(engine, Loop):
            inputs = clone(inputs)
        return engine(self.engine_state(engine), inputs, each)

    def engine_state(self, engine: Engine) -> State:
        """Return the state that an engine runs on: `expand()`, cached in eval mode while no gradient is needed.

        In-place changes are detected by the version of the tensors; a write to `parameter.data` is seen after the next
        call of `eval`.
        """
        cached = self.computes_state and not (self.training or torch.is_grad_enabled() or torch.compiler.is_exporting())
        tensors = list(self.state_tensors()) if cached else []
        if not tensors or any(t.is_inference() or torch.is_autocast_enabled(t.device.type) for t in tensors):
            return self.expand()
        versions = [(id(t), t.data_ptr(), t._version) for t in tensors]
        expanded = self._expanded  # another thread may change it
        if expanded is None or expanded[0] != versions:
            expanded = self._expanded = (versions, self.expand())
        return expanded[1]

    def state_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that `expand` is computed from."""
        return chain(self.parameters(), self.buffers())

    def is_looped(self, inputs: Any) -> bool:
        """Return whether members run one after the other, so that gradients may be taken member by member."""
        return isinstance(self.choose_engine(inputs), Loop)

    def choose_engine(self, inputs: Any) -> Engine:
        """Return the engine that runs the members; it is chosen once, with the first inputs."""
        inputs = self._unwrap(inputs)
        if count_examples(inputs) == 0 or (self._engine is None and torch.compiler.is_exporting()):
            return self._loop()  # there are no examples to choose by, or none with values
        if self._must_verify():
            self.verify(inputs)
            if self.is_separate is None:  # members could not be compared: each runs its own code
                return self._loop()
        if self._engine is None:
            self._engine = self._loop() if self.is_separate else self._choose(inputs)
        if isinstance(self._engine, StackedProgram) and not self._engine.accepts(inputs):
            return self._choose_other(inputs)
        return self._engine

    def _choose_other(self, inputs: Any) -> Engine:
        """Return the engine for inputs of another structure than the first ones, for which another graph is traced."""
        if count_examples(inputs) is None:
            return self._loop()
        structure = describe_structure(inputs)
        if structure not in self._others:
            self._others[structure] = self._choose(inputs)
        return self._others[structure]

    def _unwrap(self, inputs: Any) -> Any:
        """Return the only tensor of the inputs, or inputs of another structure unchanged."""
        return inputs if isinstance(inputs, Tensor) or not self.codes else unwrap_inputs(self.skeleton.network, inputs)

    def _must_verify(self) -> bool:
        return self.is_separate is None or (self.training and not (self.is_separate or self._covers_training))

    def _loop(self) -> Loop:
        return Loop(self.codes if self.is_separate is not False else self.codes[:1])

    def _choose(self, inputs: Any) -> Engine:
        return choose_engine(self.engine, self.skeleton, self.expand(), inputs)

    def verify(self, inputs: Any) -> None:
        """Compare every member with its own network, once, with the first inputs.

        Raises:
            EnfoldError: If members cannot be run as their networks are, or not by the engine that was named.
        """
        inputs = self._unwrap(inputs)
        if not self._must_verify():
            return
        result = verify(self.codes, self.expand(), inputs)
        if not result.is_complete:
            return
        if result.mismatch is not None:
            result.mismatch.report(self.engine)
            self.codes, self._engine = separate(self.codes, self.num_members), None
            self._others = {}
            self._pool.clear()
        self.mismatch, self.is_separate = result.mismatch, result.mismatch is not None
        self._covers_training, self.example = result.covers_training, describe_example(inputs)

    def set_engine(self, engine: EngineName) -> Self:
        """Run by another engine from now on."""
        self.engine, self._engine, self._others = require_engine(engine), None, {}
        self._pool.clear()
        return self

    def train(self, mode: bool = True) -> Self:
        """Put the members into train or eval mode."""
        super().train(mode)
        for code in self.codes:
            code.network.train(mode)
        self._expanded = None
        self._pool.clear()
        for engine in (self._engine, *self._others.values()):
            if isinstance(engine, Loop):
                engine.forget()
        return self

    def exclusive(self) -> AbstractContextManager[bool]:
        """Return a context in which no other thread runs the modules of this object; others run copies."""
        return self._pool.lock

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        with self.exclusive():
            vars(twin).update(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        # These belong to the object they were made for.
        return {**state, "_engine": None, "_others": {}, "_expanded": None}
