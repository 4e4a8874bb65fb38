"""Ensemble: the one type of this package, M networks behind one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn

from enfold.arguments import arguments_of
from enfold.engines.base import EngineName
from enfold.engines.call import pack_inputs
from enfold.engines.inputs import from_arrays, in_type_of
from enfold.engines.modes import ensure_eval_mode
from enfold.engines.outputs import require_classes, set_output
from enfold.engines.parameters import Decay, decay_groups
from enfold.engines.precision import Precision, autocast, require_precision
from enfold.engines.runner import MemberView, Runner
from enfold.engines.skeleton import State
from enfold.errors import EnfoldError
from enfold.metrics.predictions import RowPredictions
from enfold.metrics.weights import Weights, as_weights, mean_log_probs
from enfold.tasks import Prediction, Task, as_task, remember_task, shared_task
from enfold.tasks.memory import TASK

if TYPE_CHECKING:
    from enfold.data import Data
    from enfold.loggers import Log, LoggerLike
    from enfold.train.config import TrainConfig
    from enfold.train.history import Epoch, History
    from enfold.train.objective import Objective
    from enfold.train.optimize import Optimizer

__all__ = ["Ensemble", "MemberView", "Prediction"]


P = TypeVar("P", bound=RowPredictions)
WEIGHTS = "member_weights"  # in a state dict


def called_network(model: nn.Module) -> nn.Module:
    """Return a network itself, or the first network that an ensemble or a wrapper with `called_networks` calls."""
    called: Any = getattr(model, "called_networks", None)
    network: nn.Module = model if called is None else next(iter(called()), model)
    return network


def predict_outputs(model: nn.Module, task: Task, outputs: Tensor) -> Prediction:
    """Return what outputs of a network, or of the members of an ensemble with its weights, predict together."""
    weights = model.member_weights if isinstance(model, Ensemble) else None
    return task.predict(outputs) if weights is None else task.predict(outputs, weights)


def with_member_weights(model: nn.Module, found: P) -> P:
    """Return predictions with the weights of the ensemble that made them."""
    weights = model.member_weights if isinstance(model, Ensemble) else None
    return found if weights is None else found.with_weights(weights)


def set_model_output(model: nn.Module, function: Callable[[Any], Tensor]) -> None:
    """Set the function that selects the output of a network, or of the networks of an ensemble."""
    model.set_output(function) if isinstance(model, Ensemble) else set_output(model, function)


def set_model_task(model: nn.Module, task: Task | None) -> None:
    """Set the task that a network or an ensemble was trained for."""
    if isinstance(model, Ensemble):
        model.task = task
    else:
        remember_task(model, task)


class Ensemble(Runner):
    """M networks behind one call; the base class of all ensemble methods.

    A method implements `expand`, which returns the parameters of all members; running, taking a member out, saving,
    merging and distilling follow from it. Methods whose members are not networks of their own override `forward` and
    raise an error in `expand` and `member`. A constructor stores every option as an attribute of its name.

    Args:
        network: The network that the members are made from, or one network per member. It is not modified.
        num_members: The number of members.
        engine: How members are run: "stacked" (one batched product per layer), "loop" (one network after the other),
            "vmap"; "auto" takes the fastest known for this kind of network, and "measure" times all of them.
    """

    notice: str = ""  # a remark about the members for tables and reports
    precision: str = "float32"
    """The precision of the forward pass in eval mode; see `set_precision`."""
    task: Task | None = None
    """The task; `fit` sets it, and `predict` uses it. None: unknown, outputs are read as logits of classes."""

    def __init__(self, network: nn.Module | Sequence[nn.Module], num_members: int, engine: EngineName = "auto") -> None:
        if num_members < 1:
            raise EnfoldError(f"num_members must be at least 1, got {num_members}: pass num_members >= 1")
        networks = [network] if isinstance(network, nn.Module) else list(network)
        super().__init__(networks, num_members, engine)
        self.task = shared_task(networks)
        for code in self.codes:  # copies of the networks
            vars(code.network).pop(TASK, None)
        self._member_weights: Weights = None

    # Prediction

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`, in eval mode in the precision that `set_precision` set."""
        if self.precision == "float32" or self.training:
            return super().__call__(*args, **kwargs)
        device = next((tensor.device for tensor in self.state_tensors()), torch.device("cpu"))
        with autocast(self.precision, device):
            return super().__call__(*args, **kwargs).float()

    def set_precision(self, precision: Precision) -> Self:
        """Set the precision of the forward pass in eval mode; that of a training is `fit`'s argument.

        It counts in `predict`, evaluation and as a teacher. Parameters stay in float32, and outputs are float32. It is
        not saved with the ensemble.

        Args:
            precision: "float32", or mixed precision by autocast with "bf16" or "fp16".

        Returns:
            The ensemble.

        Raises:
            EnfoldError: If there is no such precision.
        """
        self.precision = require_precision(precision)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of every member for the same inputs: (B, ...) -> (M, B, ...).

        It is called as the network is: with one tensor, several inputs, or keywords. A tuple or dictionary that a
        loader yielded may also be passed as it is.
        """
        return self._run(self._unwrap(pack_inputs(args, kwargs)), each=False)

    def forward_each(self, inputs: Tensor) -> Tensor:
        """Return the outputs of each member for its own inputs: (M, B, ...) -> (M, B, ...)."""
        if inputs.shape[0] != self.num_members:
            raise EnfoldError(
                f"inputs must hold one batch per member, got {inputs.shape[0]} batches for {self.num_members} members: "
                "pass inputs of shape (M, B, ...)"
            )
        return self._run(inputs, each=True)

    def forward_mean(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the log of the members' mean probability, (B, C), in place of the logits of a single network.

        Raises:
            UnsupportedOutput: If the outputs are not (M, B, C) with at least two classes.
        """
        outputs = require_classes(self(*args, **kwargs), "forward_mean")
        return mean_log_probs(torch.log_softmax(outputs, dim=-1), self.member_weights)

    @torch.no_grad()
    def predict(self, *args: Any, **kwargs: Any) -> Prediction:
        """Return the mean prediction, the members' predictions and their uncertainty, in eval mode.

        Args:
            *args: A batch as the network takes it: tensors on the device of the ensemble, or numpy arrays.
            **kwargs: The same by keyword.

        Returns:
            The prediction. What outputs mean is `task`, which `fit` sets; without it they are logits of classes.
        """
        with ensure_eval_mode(self):
            outputs = self(self.convert_inputs(from_arrays(self, pack_inputs(args, kwargs))))
        return predict_outputs(self, as_task(self.task), outputs)

    @property
    def member_weights(self) -> Weights:
        """The normalized weights of the members in every mean of their predictions; None for equal weights."""
        return self._member_weights

    def set_weights(self, weights: Sequence[float] | Tensor | None) -> Self:
        """Set the weights of the members in every mean of their predictions; None for equal weights.

        They count in `predict`, `forward_mean`, evaluation, calibration and as a teacher, and are saved with the
        ensemble. `enfold.fit_weights` fits them to validation examples. Means of parameters do not use them.

        Args:
            weights: A weight of each member, not negative; they are divided by their sum.

        Returns:
            The ensemble.

        Raises:
            EnfoldError: If the number of weights differs from that of members, one is negative, or all are 0.
        """
        self._member_weights = as_weights(weights, self.num_members)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.member_weights is not None:
            destination[f"{prefix}{WEIGHTS}"] = torch.tensor(self.member_weights, dtype=torch.float64)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        stored = state_dict.pop(f"{prefix}{WEIGHTS}", None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._member_weights = None if stored is None else tuple(stored.tolist())

    def convert_inputs(self, inputs: Any) -> Any:
        """Return floating-point inputs in the type of the parameters."""
        return in_type_of(self, inputs)

    def called_networks(self) -> list[nn.Module]:
        """Return the networks that the ensemble calls in its forward pass."""
        return [code.network for code in self.codes]

    def set_output(self, function: Callable[[Any], Tensor]) -> Self:
        """Set the function that selects the output that is trained and predicted from what the networks return.

        Args:
            function: Function from what a network returns to a tensor (B, ...).
        """
        for network in self.called_networks():
            set_output(network, function)
        return self

    # Members

    @torch.no_grad()
    def member(self, index: int) -> nn.Module:
        """Return a copy of member `index` as a network of the user's class."""
        index = self._index(index)
        code = self.codes[index] if len(self.codes) > 1 else self.skeleton
        with self.exclusive():
            return self._with_task(code.materialise({name: tensor[index] for name, tensor in self.expand().items()}))

    def _with_task(self, network: nn.Module) -> nn.Module:
        remember_task(network, self.task)
        return network

    def _index(self, index: int) -> int:
        if not -self.num_members <= index < self.num_members:
            raise EnfoldError(
                f"index must be between {-self.num_members} and {self.num_members - 1} for {self.num_members} members, "
                f"got {index}: change index"
            )
        return index

    def networks(self) -> list[nn.Module]:
        """Return copies of all members as networks of the user's class."""
        return [self.member(index) for index in range(self.num_members)]

    def network(self, state: State) -> nn.Module:
        """Return a network of the user's class with copies of these values, in the mode of the ensemble."""
        return self._with_task(self.skeleton.materialise(state))

    def mean_state(self) -> State:
        """Return the mean of the members' values; counters and index buffers, which have no mean, are member 0's."""
        return {
            name: stacked.mean(dim=0) if stacked.is_floating_point() or stacked.is_complex() else stacked[0]
            for name, stacked in self.expand().items()
        }

    def __len__(self) -> int:
        return self.num_members

    def __iter__(self) -> Iterator[nn.Module]:
        return (self.member(index) for index in range(self.num_members))

    def __getitem__(self, index: int | slice | Sequence[int]) -> Any:
        """Return one member, or a list of several: ``ensemble[0]``, ``ensemble[:3]``."""
        if isinstance(index, int):
            return self.member(index)
        chosen = range(self.num_members)[index] if isinstance(index, slice) else index
        return [self.member(k) for k in chosen]

    # Training

    @property
    def trained_members(self) -> int:
        """The number of networks that are trained, each with a loss of its own."""
        return self.num_members

    @property
    def owns_all_parameters(self) -> bool:
        """Return whether every tensor of the state dict has a leading member axis, by which members are selected."""
        return False

    @property
    def has_independent_members(self) -> bool:
        """Return whether a member is trained without the others, so that blocks of members can be trained anywhere."""
        return False

    @property
    def training_cost(self) -> float:
        """The cost of a complete training, relative to training the model once."""
        return 1.0

    @property
    def needs_trained_network(self) -> bool:
        """Return whether the network given to the constructor should be trained already."""
        return False

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Return the settings by which this method trains, given those for a single network."""
        return config

    def objective(self, config: TrainConfig) -> Objective | None:
        """Return what is minimised; None is the cross-entropy of every member."""
        return None

    def accepts_loss(self, config: TrainConfig) -> bool:
        """Return whether members can be trained by another loss than `objective`, as students of a distillation."""
        return self.objective(config) is None and type(self).fit_members is Ensemble.fit_members

    def fit_members(
        self,
        data: Data,
        config: TrainConfig,
        *,
        checkpoint: Path | None,
        title: str,
        quiet: bool,
        on_epoch: Callable[[Epoch], None] | None = None,
        logger: LoggerLike | Log = None,
    ) -> History | None:
        """Train in a way of the method's own, and return the history; None: `fit` trains by its loop.

        Args:
            data: Training and validation data.
            config: The training settings.
            checkpoint: File of the state after each epoch; None for none.
            title: Title of the progress bar.
            quiet: Whether to show no progress.
            on_epoch: Function that is called after each epoch.
            logger: Where metrics are logged.
        """
        return None

    def on_fit_start(self, data: Data, config: TrainConfig) -> None:
        """Prepare for a training, and reset the state of an earlier one; called before a checkpoint is restored."""

    def on_step_end(self, step: int, optimizer: Optimizer) -> None:
        """Update the method after a step of the optimizer; steps are counted from 1 over all epochs."""

    def on_epoch_end(self, epoch: int, config: TrainConfig) -> None:
        """Update the method after an epoch, counted from 1; called before the checkpoint is written."""

    def on_fit_end(self, data: Data) -> None:
        """Complete the ensemble after the last epoch."""

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """Return the parameter groups for an optimizer.

        Args:
            weight_decay: The weight decay of what is decayed.
            decay: Which parameters are decayed: "all", or "weights" without biases and norm parameters.

        Returns:
            Groups with `params`, `weight_decay` and, where they differ, `lr_scale` (a factor on the learning rate) and
            `member_axis` (whether the leading axis of the parameters is the member).
        """
        return decay_groups([(parameter, parameter.ndim) for parameter in self.parameters()], weight_decay, decay)

    # Options

    def options(self) -> dict[str, Any]:
        """Return the options of the constructor by name; with them and the network, the ensemble can be made again."""
        names = list(arguments_of(type(self)))
        missing = [name for name in names if not hasattr(self, name)]
        if missing:
            raise EnfoldError(
                f"every option must be an attribute of its name, but {type(self).__name__} has no '{missing[0]}': set "
                f"self.{missing[0]} in its constructor"
            )
        values = {name: getattr(self, name) for name in names}
        return values | {"engine": self.initial_engine} if "engine" in values else values

    @classmethod
    def from_options(cls, networks: Sequence[nn.Module], options: dict[str, Any]) -> Self:
        """Make an ensemble of this class to load values into.

        Args:
            networks: A network per member; methods that start from one network take the first.
            options: What `options` returned.
        """
        return cls(networks[0], **options)

    def stored_parameters(self) -> list[Tensor]:
        """Return the tensors that count as parameters of the ensemble when its size is measured."""
        return list(self.parameters())

    @property
    def network_name(self) -> str:
        """The class of the members' network; several classes are separated by commas."""
        return ", ".join(dict.fromkeys(type(network).__name__ for network in self.called_networks()))

    def _convert(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor as what it is in the network: a parameter, frozen or trained as there, or a buffer."""
        if name in self.skeleton.parameters:
            return nn.Parameter(tensor, requires_grad=name in self.skeleton.trainable)
        return tensor

    def __repr__(self) -> str:
        """One line for members with stacked parameters, which have no layers of their own to show."""
        return f"{type(self).__name__}({self.extra_repr()})" if self.is_expandable else super().__repr__()

    def extra_repr(self) -> str:
        """Return the summary that print(ensemble) shows."""
        count = sum(parameter.numel() for parameter in self.parameters())
        return f"{self.num_members} x {self.network_name}, {count:,} parameters, engine={self.engine!r}"
