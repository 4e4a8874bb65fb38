"""Search over candidates: networks with different seeds and hyper-parameters, trained in chunks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.engines.base import Engine, EngineName
from enfold.engines.initialization import initialize_member
from enfold.engines.parameters import Decay, decay_groups
from enfold.engines.skeleton import State, read_state
from enfold.ensemble import Ensemble
from enfold.ensembles.deep_ensemble import DeepEnsemble, Factory
from enfold.evaluate import predict
from enfold.io.files import part_file
from enfold.loggers import Log
from enfold.metrics.predictions import Predictions
from enfold.seeds import derive
from enfold.train import Epoch, History, TrainConfig, fit
from enfold.train.diversity import LowDiversityWarning


class FewerCandidatesWarning(UserWarning):
    """Training gave fewer different networks than `num_members`: a search selected fewer, or boosting ended."""


class Setting(NamedTuple):
    """The hyper-parameters of a candidate: fields of `TrainConfig` that may differ between members."""

    lr: float
    weight_decay: float
    label_smoothing: float


@dataclass
class Pool:
    """Candidates that are trained in chunks; a chunk that was complete before an interruption is read from its file.

    Candidate k depends on the seed, the phase, k and its hyper-parameters only, not on the size of the chunks.

    Args:
        network: The network, or a function that makes one.
        data: Training and validation data.
        config: How candidates are trained.
        chunk: The number of candidates that are trained together.
        seed: The seed of the candidates.
        engine: How candidates are run.
        checkpoint: A file; chunks have files beside it.
        title: The name on the progress bar.
        quiet: Show no progress bar.
        networks: The candidates of the phases that store them.
        files: The files of the chunks.
        history: The epochs of all chunks.
        on_epoch: Function called with the record of every epoch.
        log: Where settings and metrics are logged to.
    """

    network: nn.Module | Factory
    data: Data
    config: TrainConfig
    chunk: int
    seed: int
    engine: EngineName
    checkpoint: Path | None
    title: str
    quiet: bool
    networks: list[nn.Module] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    history: History = field(default_factory=History)
    on_epoch: Callable[[Epoch], None] | None = None
    log: Log = field(default_factory=Log)

    def train(self, phase: str, settings: Sequence[Setting], *, keep: bool) -> list[Predictions]:
        """Train the candidates of one phase, store the networks if `keep`, and return their validation predictions.

        Args:
            phase: The name of the phase, which its files contain.
            settings: The hyper-parameters of each candidate.
            keep: Whether the trained networks are stored.
        """
        predictions = []
        for start in range(0, len(settings), self.chunk):
            members = self._train_chunk(phase, start, settings[start : start + self.chunk])
            predictions.append(predict(members, self.data.val))
            if keep:
                self.networks += members.cpu().networks()
        return predictions

    def _train_chunk(self, phase: str, start: int, settings: Sequence[Setting]) -> DeepEnsemble:
        numbers = range(start, start + len(settings))
        seed = derive(self.seed, "search", phase)
        members = DeepEnsemble(
            [initialize_member(self.network, seed, number)[0] for number in numbers], engine=self.engine
        )
        values = dict(zip(Setting._fields, zip(*settings, strict=True), strict=True))
        config = self.config.replace(**values, seed=derive(self.config.seed, seed), first_member=start)
        file = self.checkpoint
        if file is not None:
            file = part_file(file, f"{phase}-{start}")
            self.files.append(file)
        title = f"{self.title}: {phase}, {start + 1} to {numbers.stop}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LowDiversityWarning)  # candidates may be similar, members are selected
            history = fit(
                members,
                self.data,
                config=config,
                checkpoint=file,
                on_epoch=self.on_epoch,
                logger=self.log.part(f"{phase}-{start}"),
                title=title,
                quiet=self.quiet,
            )
        self.history.epochs += history.epochs
        return members

    def clear(self) -> None:
        """Remove the files of the chunks."""
        for file in self.files:
            file.unlink(missing_ok=True)


class WeightedEnsemble(Ensemble):
    """K networks, of which each counts as a number of members: the mean over members is a weighted mean.

    In train mode each network runs once.

    Args:
        network: The network, or a function that makes one, from which K networks are drawn.
        num_members: K.
        seed: The seed of the networks.
        engine: How networks are run.
    """

    counts: Tensor
    settings: Tensor

    def __init__(self, network: nn.Module | Factory, num_members: int, seed: int, engine: EngineName = "auto") -> None:
        drawn = DeepEnsemble(network, num_members, seed=seed, engine=engine)
        super().__init__(network if isinstance(network, nn.Module) else drawn.member(0), num_members, engine)
        self.tree = drawn.tree
        self.register_buffer("counts", torch.ones(num_members, dtype=torch.long))  # (K,)
        self.register_buffer("settings", torch.zeros(num_members, len(Setting._fields)))  # (K, 3)

    @torch.no_grad()
    def set_networks(self, networks: Sequence[nn.Module], counts: Sequence[int], settings: Sequence[Setting]) -> None:
        """Store these networks, at most K, with the number of members that each counts as and its hyper-parameters.

        Args:
            networks: The networks.
            counts: The number of members that each network counts as.
            settings: The hyper-parameters of each network.
        """
        self.counts.zero_()
        for index, (network, count, setting) in enumerate(zip(networks, counts, settings, strict=True)):
            self.counts[index] = count
            self.settings[index] = torch.tensor(setting)
            values = read_state(network)
            for name, tensor in self.tree.state().items():
                tensor[index].copy_(values[name])
        self._update_size()

    def _update_size(self) -> None:
        self.num_members = int(self.counts.sum())

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._update_size()

    @property
    def notice(self) -> str:  # type: ignore[override]
        """A remark if fewer than K different networks were selected."""
        different, wanted = int((self.counts > 0).sum()), len(self.counts)
        if different == wanted:
            return ""
        selected = f"{different} different network" + "s" * (different > 1)
        return (
            f"the search selected {selected} instead of {wanted}, because no other improved the ensemble on validation "
            "data: raise candidates, or widen the ranges"
        )

    @property
    def trained_members(self) -> int:
        """K: every stored network is trained."""
        return len(self.counts)

    def expand(self) -> State:
        """Return each network as often as it counts; the stored tensors themselves if each counts once."""
        return self._repeat(self.counts)

    def _repeat(self, counts: Tensor) -> State:
        state = self.tree.state()
        if bool((counts == 1).all()):
            return state
        return {name: tensor.repeat_interleave(counts, dim=0) for name, tensor in state.items()}

    def engine_state(self, engine: Engine) -> State:
        """Return every network once; outputs are repeated instead."""
        return self._repeat(torch.ones_like(self.counts) if self.training else self.counts.clamp(max=1))

    def _run(self, inputs: Any, *, each: bool) -> Tensor:
        if each and not self.training:
            return self.choose_engine(inputs[0])(self.expand(), inputs, True)
        outputs = super()._run(inputs, each=each)  # of each network once
        return outputs if self.training else outputs.repeat_interleave(self.counts[self.counts > 0], dim=0)

    def is_looped(self, inputs: Any) -> bool:
        """Return whether members run one after the other; only if each network counts once."""
        return bool((self.counts == 1).all()) and super().is_looped(inputs)

    def forward_each(self, inputs: Tensor) -> Tensor:
        """Return the logits of each member for its own inputs; in train mode those of the K stored networks."""
        if self.training and len(inputs) == self.trained_members:
            return self._run(inputs, each=True)
        return super().forward_each(inputs)

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """Return groups of parameters with an axis of networks."""
        owned = [(parameter, parameter.ndim - 1) for parameter in self.parameters()]
        return decay_groups(owned, weight_decay, decay, member_axis=True)
