"""What a search keeps to: candidates trained chunk by chunk, and members that count as often as they were picked."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.engines.base import Engine, EngineName
from enfold.engines.groups import Decay, decay_groups
from enfold.engines.initialization import initialised
from enfold.engines.skeleton import State, read_state
from enfold.ensemble import Ensemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.evaluate import predict
from enfold.io.files import part_file
from enfold.metrics.predictions import Predictions
from enfold.seeds import derive
from enfold.train import TrainConfig, fit
from enfold.train.diversity import LowDiversityWarning


class FewerCandidatesWarning(UserWarning):
    """A search picked fewer different networks than it was asked for."""


class Setting(NamedTuple):
    """What one candidate is trained with: the fields of a plan of which members may have their own."""

    lr: float
    weight_decay: float
    label_smoothing: float


@dataclass
class Pool:
    """Trains candidates chunk by chunk; a chunk that was finished before a kill is read from its checkpoint.

    Candidate k depends on the seed, the phase, k and its setting alone, not on the size of the chunks.
    """

    network: nn.Module
    data: Data
    plan: TrainConfig
    chunk: int
    seed: int
    engine: EngineName
    checkpoint: Path | None
    title: str
    quiet: bool
    networks: list[nn.Module] = field(default_factory=list)  # of the phases that kept them
    files: list[Path] = field(default_factory=list)

    def train(self, phase: str, settings: Sequence[Setting], *, keep: bool) -> list[Predictions]:
        """Train the candidates of one phase, and `keep` the networks or only what they say about validation data."""
        predictions = []
        for start in range(0, len(settings), self.chunk):
            members = self._trained(phase, start, settings[start : start + self.chunk])
            predictions.append(predict(members, self.data.val))
            if keep:
                self.networks += members.cpu().networks()
        return predictions

    def _trained(self, phase: str, start: int, settings: Sequence[Setting]) -> DeepEnsemble:
        numbers = range(start, start + len(settings))
        seed = derive(self.seed, "search", phase)
        members = DeepEnsemble([initialised(self.network, seed, number)[0] for number in numbers], self.engine)
        values = dict(zip(Setting._fields, zip(*settings, strict=True), strict=True))
        plan = self.plan.replace(**values, seed=derive(self.plan.seed, seed), first_member=start)
        file = self.checkpoint
        if file is not None:
            file = part_file(file, f"{phase}-{start}")
            self.files.append(file)
        title = f"{self.title}: {phase}, {start + 1} to {numbers.stop}"
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", LowDiversityWarning
            )  # candidates may be alike: members are picked from among them
            fit(members, self.data, config=plan, checkpoint=file, title=title, quiet=self.quiet)
        return members

    def clear(self) -> None:
        """Remove what was kept for going on after a kill."""
        for file in self.files:
            file.unlink(missing_ok=True)


class Chosen(Ensemble):
    """Room for K networks, of which each counts as often as it was picked, once to begin with.

    The plain mean over members is then the mean weighted by picks. In train mode each network runs once.
    """

    counts: Tensor
    settings: Tensor

    def __init__(self, network: nn.Module, num_members: int, seed: int, engine: EngineName = "auto") -> None:
        super().__init__(network, num_members, engine)
        self.tree = DeepEnsemble.make(network, num_members, seed=seed, engine=engine).tree
        self.register_buffer("counts", torch.ones(num_members, dtype=torch.long))  # (K,)
        self.register_buffer("settings", torch.zeros(num_members, len(Setting._fields)))  # (K, 3)

    @torch.no_grad()
    def choose(self, networks: Sequence[nn.Module], counts: Sequence[int], settings: Sequence[Setting]) -> None:
        """Hold these networks, at most K, each so many times, and what they were trained with."""
        self.counts.zero_()
        for index, (network, count, setting) in enumerate(zip(networks, counts, settings, strict=True)):
            self.counts[index] = count
            self.settings[index] = torch.tensor(setting)
            values = read_state(network)
            for name, tensor in self.tree.state().items():
                tensor[index].copy_(values[name])
        self._count()

    def _count(self) -> None:
        self.num_members = int(self.counts.sum())

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._count()

    @property
    def notice(self) -> str | None:
        """What a user should know: that fewer different networks were picked than there is room for."""
        different, room = int((self.counts > 0).sum()), len(self.counts)
        if different == room:
            return None
        picked = f"{different} different network" + "s" * (different > 1)
        return (
            f"the search picked {picked}, not the {room} asked for, because no other made the ensemble better on "
            "validation data: search more candidates, or wider ranges, if there should be more"
        )

    @property
    def trained_members(self) -> int:
        """All networks that are stored."""
        return len(self.counts)

    def expand(self) -> State:
        """Each network as often as it counts; the stored tensors themselves while each counts once."""
        return self._times(self.counts)

    def _times(self, counts: Tensor) -> State:
        state = self.tree.state()
        if bool((counts == 1).all()):
            return state
        return {name: tensor.repeat_interleave(counts, dim=0) for name, tensor in state.items()}

    def _running_state(self, engine: Engine) -> State:
        return self._times(torch.ones_like(self.counts) if self.training else self.counts.clamp(max=1))

    def _run(self, inputs: Tensor, *, each: bool) -> Tensor:
        if each and not self.training:
            return self.engine(inputs[0])(self.expand(), inputs, True)
        outputs = super()._run(inputs, each=each)  # of each network once
        return outputs if self.training else outputs.repeat_interleave(self.counts[self.counts > 0], dim=0)

    def looped(self, inputs: Tensor) -> bool:
        """As for all members, but for those that count otherwise than once, of which not all run in training."""
        return bool((self.counts == 1).all()) and super().looped(inputs)

    def forward_each(self, inputs: Tensor) -> Tensor:
        """Each member's logits for its own inputs; in train mode each network's, (K, B, ...) -> (K, B, C)."""
        if self.training and len(inputs) == self.trained_members:
            return self._run(inputs, each=True)
        return super().forward_each(inputs)

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """Every parameter carries the axis of the networks."""
        owned = [(parameter, parameter.ndim - 1) for parameter in self.parameters()]
        return decay_groups(owned, weight_decay, decay, member_axis=True)
