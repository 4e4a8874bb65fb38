"""SampledEnsemble: members that are sampled around one trained network, or collected along its training."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.engines.base import EngineName, Loop
from enfold.engines.parameters import Decay, Tree, decay_groups
from enfold.engines.skeleton import State, read_state
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.train import TrainConfig
from enfold.train.batch_norm import reestimate


class SampledEnsemble(Ensemble):
    """M members sampled around a centre, the network that is trained.

    A method implements `sample`, which computes the members' parameters from what was collected in training and from a
    seed: a member is the same network in every call. In train mode, and until `on_fit_end`, only the centre runs:
    outputs are (1, B, C). Batch-norm statistics are estimated for every member by `on_fit_end`.

    Args:
        network: The network to train.
        num_members: The number of members.
        engine: How members are run.
    """

    ready: Tensor
    needs_centre = True  # whether members are computed from the centre, or only from what was collected

    def __init__(self, network: nn.Module, num_members: int, engine: EngineName = "auto") -> None:
        super().__init__(network, num_members, engine)
        self._centre = Loop(self.skeleton)
        state = {name: tensor.detach().clone() for name, tensor in read_state(network).items()}
        self.centre = Tree({name: self._convert(name, tensor) for name, tensor in state.items()})
        self.own = Tree({name: state[name].expand(num_members, *state[name].shape).clone() for name in self.own_names})
        self.register_buffer("ready", torch.tensor(False))

    def stored_parameters(self) -> list[Tensor]:
        """Return the tensors that members are computed from, without batch-norm statistics."""
        own = {id(tensor) for tensor in self.own.buffers()} | {id(tensor) for tensor in self.centre.buffers()}
        collected = [t for t in self.buffers() if t.is_floating_point() and id(t) not in own]
        return [*(self.centre.parameters() if self.needs_centre else ()), *collected]

    @property
    def own_names(self) -> list[str]:
        """The names of the buffers, which every member owns."""
        return list(self.skeleton.buffers)

    @property
    def trained_members(self) -> int:
        """One: the centre."""
        return 1

    @abstractmethod
    def sample(self) -> State:
        """Return the parameters of all members, each (M, *shape)."""

    def expand(self) -> State:
        """Return the members; before the end of training, the centre M times."""
        if bool(self.ready):
            return {**self.sample(), **self.own.state()}
        return {name: tensor.expand(self.num_members, *tensor.shape) for name, tensor in self.centre.state().items()}

    def _run(self, inputs: Any, *, each: bool) -> Tensor:
        if self.training or not bool(self.ready):
            centre = {name: tensor[None] for name, tensor in self.centre.state().items()}
            self.verify(inputs[0] if each else inputs)
            with self._pool.borrow(lambda: self._centre) as loop:
                return loop(centre, inputs, each)
        return super()._run(inputs, each=each)

    def forward_each(self, inputs: Tensor) -> Tensor:
        """Return the logits of each member for its own inputs; in training of the centre, (1, B, ...) -> (1, B, C)."""
        if not self.training and bool(self.ready):
            return super().forward_each(inputs)
        if inputs.shape[0] != 1:
            raise EnfoldError(
                f"inputs must contain one batch until training has ended, as only one network exists, got "
                f"{inputs.shape[0]}: pass inputs of shape (1, B, ...), or train the ensemble with fit first"
            )
        return self._run(inputs, each=True)

    def on_fit_start(self, data: Data, config: TrainConfig) -> None:
        """Run only the centre until this training has ended."""
        self.ready.fill_(False)

    def on_fit_end(self, data: Data) -> None:
        """Make the members available, and estimate the batch-norm statistics of each."""
        centre = self.centre.state()
        for name, tensor in self.own.state().items():
            tensor.copy_(centre[name].expand_as(tensor))
        self.ready.fill_(True)
        self.reestimate_batch_norm(data)

    @torch.no_grad()
    def reestimate_batch_norm(self, data: Data) -> None:
        """Estimate the batch-norm statistics of every member on the training data."""
        if not self.own_names:
            return
        own, sampled = self.own.state(), self.expand()
        for index in range(self.num_members):
            network = self.network({name: tensor[index] for name, tensor in sampled.items()})
            reestimate(network, data)
            buffers = dict(network.named_buffers())
            for name, tensor in own.items():
                tensor[index].copy_(buffers[name])

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """Return the groups of the centre, which is trained as a single network."""
        named = [(parameter, parameter.ndim) for parameter in self.centre.parameters()]
        return decay_groups(named, weight_decay, decay)
