"""What every sampler keeps to: members drawn around one trained network, which alone is there until training ends."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.engines.base import EngineName, Loop
from enfold.engines.groups import Decay, decay_groups
from enfold.engines.skeleton import State, read_state
from enfold.engines.tree import Tree
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.train import Follower
from enfold.train.batch_norm import reestimate


class Sampled(Ensemble, Follower):
    """M members around a centre. A method says in `sample` what their parameters are, computed from what it stored and
    from its seed, never drawn anew: a member stays the same network for good.

    In train mode, and until `finish` has been called, the centre runs alone: outputs are (1, B, C). Batch-norm
    statistics are each member's own, re-estimated on training data by `finish`.
    """

    ready: Tensor
    needs_centre = True  # whether members are computed from the centre, or from what was gathered alone

    @property
    def held(self) -> list[Tensor]:
        """The numbers that the members are made from, which is what they take to store; not batch-norm statistics."""
        own = {id(tensor) for tensor in self.own.buffers()} | {id(tensor) for tensor in self.centre.buffers()}
        gathered = [t for t in self.buffers() if t.is_floating_point() and id(t) not in own]
        return [*(self.centre.parameters() if self.needs_centre else ()), *gathered]

    def __init__(self, network: nn.Module, num_members: int, engine: EngineName = "auto") -> None:
        super().__init__(network, num_members, engine)
        self._centre = Loop(self.skeleton)
        state = {name: tensor.detach().clone() for name, tensor in read_state(network).items()}
        self.centre = Tree({name: self._stored(name, tensor) for name, tensor in state.items()})
        self.own = Tree({name: state[name].expand(num_members, *state[name].shape).clone() for name in self.own_names})
        self.register_buffer("ready", torch.tensor(False))

    @property
    def own_names(self) -> list[str]:
        """The names of the buffers, of which each member has its own."""
        return list(self.skeleton.buffers)

    @property
    def trained_members(self) -> int:
        """The centre."""
        return 1

    @abstractmethod
    def sample(self) -> State:
        """All members' parameters, each (M, *shape)."""

    def expand(self) -> State:
        """The members that were drawn; the centre M times while there are none."""
        if bool(self.ready):
            return {**self.sample(), **self.own.state()}
        return {name: tensor.expand(self.num_members, *tensor.shape) for name, tensor in self.centre.state().items()}

    def _run(self, inputs: Tensor, *, each: bool) -> Tensor:
        if self.training or not bool(self.ready):
            centre = {name: tensor[None] for name, tensor in self.centre.state().items()}
            self.verify(inputs[0] if each else inputs)
            with self._pool.borrow(lambda: self._centre) as loop:
                return loop(centre, inputs, each)
        return super()._run(inputs, each=each)

    def forward_each(self, inputs: Tensor) -> Tensor:
        """Each member's logits for its own inputs; in training the centre's, (1, B, ...) -> (1, B, C)."""
        if not self.training and bool(self.ready):
            return super().forward_each(inputs)
        if inputs.shape[0] != 1:
            raise EnfoldError(
                f"until training has ended there is one network, which takes one batch, got {inputs.shape[0]}: pass "
                "inputs of shape (1, B, ...), or call finish(data) first"
            )
        return self._run(inputs, each=True)

    def begin(self) -> None:
        """The centre alone, until this training has finished."""
        self.ready.fill_(False)

    def finish(self, data: Data) -> None:
        """Draw the members and give each the centre's buffers, with the batch-norm statistics of its own weights."""
        centre = self.centre.state()
        for name, tensor in self.own.state().items():
            tensor.copy_(centre[name].expand_as(tensor))
        self.ready.fill_(True)
        self.recalibrate(data)

    @torch.no_grad()
    def recalibrate(self, data: Data) -> None:
        """Batch-norm statistics of every member, from the training part."""
        if not self.own_names:
            return
        own, drawn = self.own.state(), self.expand()
        for index in range(self.num_members):
            network = self.network({name: tensor[index] for name, tensor in drawn.items()})
            reestimate(network, data)
            buffers = dict(network.named_buffers())
            for name, tensor in own.items():
                tensor[index].copy_(buffers[name])

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """The centre is trained as a plain network is."""
        named = [(parameter, parameter.ndim) for parameter in self.centre.parameters()]
        return decay_groups(named, weight_decay, decay)
