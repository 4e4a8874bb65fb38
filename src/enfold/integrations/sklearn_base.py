"""The common part of the estimators for scikit-learn: a model for the rows of a table, its training and pickles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from enfold import ensembles
from enfold.arguments import arguments_of
from enfold.data.convert import Examples
from enfold.engines.initialization import call_factory
from enfold.ensemble import Ensemble, predict_outputs
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError, MissingExtra, closest
from enfold.evaluate import member_logits
from enfold.networks import MLP
from enfold.seeds import derive, generator, seed_scope
from enfold.tasks import Prediction, Task
from enfold.train import TrainConfig, fit
from enfold.train.example_weights import WeightedLoss
from enfold.train.objective import TaskLoss

try:
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise MissingExtra("scikit-learn>=1.6", "sklearn", "enfold.integrations.sklearn") from error

CHUNK = 4096  # rows in one forward pass
Table = Any
"""Rows and columns: an array or a DataFrame."""
Array = np.ndarray[Any, Any]
Network = Callable[[int, int], nn.Module]


class NetworkEstimator(BaseEstimator):  # type: ignore[misc]
    """The base of classifiers and regressors: a model for the rows of a table."""

    def __init__(
        self,
        network: Network | None = None,
        num_members: int = 4,
        *,
        method: str = "DeepEnsemble",
        method_options: Mapping[str, Any] | None = None,
        hidden: tuple[int, ...] = (64, 64),
        epochs: int = 50,
        batch_size: int = 32,
        lr: float = 3e-3,
        weight_decay: float = 1e-2,
        patience: int | None = None,
        train_options: Mapping[str, Any] | None = None,
        validation_fraction: float = 0.1,
        standardize: bool = True,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.network = network
        self.num_members = num_members
        self.method = method
        self.method_options = method_options
        self.hidden = hidden
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.patience = patience
        self.train_options = train_options
        self.validation_fraction = validation_fraction
        self.standardize = standardize
        self.random_state = random_state
        self.verbose = verbose

    # Making models

    def _task(self) -> Task:
        raise NotImplementedError

    def _num_outputs(self) -> int:
        raise NotImplementedError

    def _make_network(self) -> nn.Module:
        inputs, outputs = self.n_features_in_, self._num_outputs()
        return MLP(inputs, self.hidden, outputs) if self.network is None else self.network(inputs, outputs)

    def _check_network(self) -> None:
        """Refuse a network with another number of outputs before anything is trained."""
        if self.network is None:
            return
        if isinstance(self.network, nn.Module) or not callable(self.network):
            raise EnfoldError(
                "network must be a function of the numbers of columns and outputs, got a "
                f"{type(self.network).__name__}: pass lambda columns, outputs: MyNet(columns, outputs)"
            )
        with seed_scope(derive(self._seed_, "check")), torch.no_grad():
            outputs = member_logits(call_factory(self._make_network).eval(), torch.zeros(2, self.n_features_in_))[0]
        expected = (2, self._num_outputs())
        if tuple(outputs.shape) != expected:
            raise EnfoldError(
                f"network must make networks with {expected[1]} outputs for each row, got outputs of shape "
                f"{tuple(outputs.shape)} for 2 rows: use its second argument, the number of outputs"
            )

    def _make_ensemble(self) -> Ensemble:
        options = dict(self.method_options or {})
        if self.method not in ensembles.__all__:
            near = closest(str(self.method), ensembles.__all__)
            raise EnfoldError(
                f"method must be a class of enfold.ensembles, got {self.method!r}: "
                + (f"did you mean {near!r}?" if near else "pass for example 'BatchEnsemble'")
            )
        kind: Any = getattr(ensembles, self.method)
        known = {"num_members": self.num_members, "seed": self._seed_}
        options = {name: value for name, value in known.items() if name in arguments_of(kind)} | options
        with seed_scope(derive(self._seed_, "network")):  # members of a DeepEnsemble have seeds of their own
            network = self._make_network if issubclass(kind, DeepEnsemble) else self._make_network()
            made: Ensemble = kind(network, **options)
        return made

    def _make_blank(self) -> nn.Module:
        """Return a model into which the weights of a fitted one are loaded."""
        return self._make_ensemble()

    def _train(self, train: Examples, val: Examples | None, weights: Tensor | None) -> None:
        """Train the model and set it as `model_`."""
        self.model_: nn.Module = self._train_ensemble(train, val, weights)

    def _train_ensemble(self, train: Examples, val: Examples | None, weights: Tensor | None) -> Ensemble:
        """Return a trained ensemble."""
        ensemble, config = self._make_ensemble(), self._config()
        loss = None if weights is None else WeightedLoss(TaskLoss(self._task()), weights / weights.mean())
        self.history_ = fit(ensemble, train, val, config, objective=loss, quiet=not self.verbose, title="ensemble")
        return ensemble

    def _config(self) -> TrainConfig:
        return TrainConfig(
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            weight_decay=self.weight_decay,
            patience=self.patience,
            task=self._task(),
            seed=self._seed_,
        ).update(dict(self.train_options or {}))

    # Training and prediction on arrays

    def _checked_weights(self, sample_weight: Any, rows: Array) -> Array | None:
        if sample_weight is None:
            return None
        weights: Array = _check_sample_weight(sample_weight, rows, dtype=np.float64)
        if (weights < 0).any() or not (weights > 0).any():
            raise EnfoldError(
                "sample_weight must not be negative, and positive for a row, got weights from "
                f"{weights.min():g} to {weights.max():g}: change sample_weight"
            )
        return weights

    def _fit_arrays(self, rows: Array, targets: Tensor, sample_weight: Array | None) -> Self:
        """Train on checked rows and encoded targets."""
        self._seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        weights = None
        if sample_weight is not None:
            chosen = sample_weight > 0
            rows, targets, sample_weight = rows[chosen], targets[chosen], sample_weight[chosen]
            weights = torch.from_numpy(sample_weight.astype(np.float32))
        self._check_network()
        self.mean_, self.scale_ = np.zeros(rows.shape[1]), np.ones(rows.shape[1])
        if self.standardize:
            self.mean_ = np.average(rows, axis=0, weights=sample_weight)
            scale = np.sqrt(np.average((rows - self.mean_) ** 2, axis=0, weights=sample_weight))
            self.scale_ = np.where(scale > 0, scale, 1.0)
        inputs = self._inputs(rows)
        train, val = self._split(targets)
        self._train(
            (inputs[train], targets[train]),
            (inputs[val], targets[val]) if len(val) else None,
            None if weights is None else weights[train],
        )
        return self

    def _inputs(self, rows: Array) -> Tensor:
        return torch.from_numpy(((rows - self.mean_) / self.scale_).astype(np.float32))

    def _split(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of training and validation rows; validation rows are spread over classes and values."""
        fraction = self.validation_fraction
        if isinstance(fraction, bool) or not 0 <= fraction < 1:
            raise EnfoldError(
                f"validation_fraction must be at least 0 and below 1, got {fraction!r}: pass for example 0.1"
            )
        order = torch.randperm(len(targets), generator=generator(self._seed_, "validation"))
        order = order[targets[order].argsort(stable=True)]
        places = (torch.arange(round(fraction * len(targets))) + 0.5) / max(fraction, 1e-9)
        is_val = torch.zeros(len(targets), dtype=torch.bool)
        is_val[order[places.long().clamp(max=len(targets) - 1)]] = True
        return (~is_val).nonzero()[:, 0], is_val.nonzero()[:, 0]

    def _predict(self, table: Table) -> Prediction:
        check_is_fitted(self, "model_")
        inputs = self._inputs(validate_data(self, table, reset=False, dtype=np.float64))
        device = next(self.model_.parameters()).device
        self.model_.eval()
        with torch.no_grad():
            outputs = [member_logits(self.model_, chunk.to(device)) for chunk in inputs.split(CHUNK)]
        return predict_outputs(self.model_, self._task(), torch.cat(outputs, dim=1).cpu())

    # Pickles

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        if "model_" not in state:
            return state
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in self.model_.state_dict().items()}
        return {**state, "model_": arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = state.get("model_")
        super().__setstate__({name: value for name, value in state.items() if name != "model_"})
        if arrays is None:
            return
        with torch.random.fork_rng(devices=[]):
            model = self._make_blank()
        model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
        self.model_ = model.eval()
