"""scikit-learn: ensembles and compressed ensembles as estimators for tables.

    model = EnsembleClassifier(num_members=4, epochs=30).fit(frame, labels)
    model.predict_proba(frame)                            # the mean prediction of the members
    model.predict_uncertainty(frame).epistemic            # their disagreement
    CompressedClassifier().fit(frame, labels).network_    # one network in place of the ensemble

They work in pipelines, `GridSearchCV`, `clone` and pickles. A pickle contains the weights as arrays. `network` is a
function and pickled by name, so it must be defined in an importable module.
"""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from enfold.compress import compress
from enfold.data.convert import Examples
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError, MissingExtra
from enfold.integrations.sklearn_base import Array, NetworkEstimator, Table
from enfold.metrics.calibration import FewExamplesWarning
from enfold.tasks import Classification, Regression, Task

try:
    from sklearn.base import ClassifierMixin, RegressorMixin
    from sklearn.utils import Bunch, column_or_1d
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise MissingExtra("scikit-learn>=1.6", "sklearn", "enfold.integrations.sklearn") from error


class _Classes(ClassifierMixin):  # type: ignore[misc]
    """Predictions of classes of any type, such as strings."""

    def _task(self) -> Task:
        return Classification()

    def _num_outputs(self) -> int:
        return len(self.classes_)

    def _fit(self, table: Table, labels: Any, sample_weight: Any = None) -> Self:
        rows, labels = validate_data(self, table, labels, dtype=np.float64)
        check_classification_targets(labels)
        weights = self._checked_weights(sample_weight, rows)
        self.classes_ = np.unique(labels if weights is None else labels[weights > 0])
        if len(self.classes_) < 2:
            raise EnfoldError(
                f"y must have at least 2 classes, got {len(self.classes_)} class in n_samples={len(labels)}: pass "
                "examples of another class"
            )
        codes = torch.from_numpy(np.searchsorted(self.classes_, labels))
        return self._fit_arrays(rows, codes, weights)  # type: ignore[no-any-return]

    def predict(self, X: Table) -> Array:
        """Return the most probable class of every row."""
        probabilities = self.predict_proba(X)
        found: Array = self.classes_[probabilities.argmax(1)]
        return found

    def predict_proba(self, X: Table) -> Array:
        """Return the probabilities of `classes_`, the mean over members: (N, C)."""
        found: Array = self._predict(X).mean.numpy()
        return found

    def predict_uncertainty(self, X: Table) -> Bunch:
        """Return `total`, `aleatoric` and `epistemic` uncertainty of every row in nats, (N,).

        The last two sum to `total`. The epistemic part, the mutual information, is the disagreement of the members; a
        single network has none.
        """
        found = self._predict(X)
        return Bunch(total=found.total.numpy(), aleatoric=found.aleatoric.numpy(), epistemic=found.epistemic.numpy())


class _Numbers(RegressorMixin):  # type: ignore[misc]
    """Predictions of one number per row, with a mean and a variance."""

    def _task(self) -> Task:
        return Regression(head="gaussian", variance="softplus", min_variance=1e-4)

    def _num_outputs(self) -> int:
        return 2

    def _fit(self, table: Table, values: Any, sample_weight: Any = None) -> Self:
        rows, values = validate_data(self, table, values, dtype=np.float64, y_numeric=True)
        values = column_or_1d(values, warn=True).astype(np.float64)
        weights = self._checked_weights(sample_weight, rows)
        self.y_mean_ = float(np.average(values, weights=weights))
        scale = float(np.sqrt(np.average((values - self.y_mean_) ** 2, weights=weights)))
        self.y_scale_ = scale if scale > 0 else 1.0
        scaled = torch.from_numpy(((values - self.y_mean_) / self.y_scale_).astype(np.float32))
        return self._fit_arrays(rows, scaled, weights)  # type: ignore[no-any-return]

    def predict(self, X: Table, return_std: bool = False) -> Any:
        """Return the mean of every row, (N,).

        Args:
            X: The rows.
            return_std: Return the standard deviation of the prediction as well, from noise and disagreement.
        """
        found = self._predict(X)
        mean = self.y_mean_ + self.y_scale_ * found.mean[:, 0].numpy()
        return (mean, self.y_scale_ * found.total[:, 0].sqrt().numpy()) if return_std else mean

    def predict_uncertainty(self, X: Table) -> Bunch:
        """Return the variances `total`, `aleatoric` (noise) and `epistemic` (disagreement of members) of every row."""
        found, square = self._predict(X), self.y_scale_**2
        parts = {"total": found.total, "aleatoric": found.aleatoric, "epistemic": found.epistemic}
        return Bunch(**{name: square * values[:, 0].numpy() for name, values in parts.items()})


class _Ensembles(NetworkEstimator):
    """An estimator whose model is an ensemble."""

    def fit(self, X: Table, y: Any, sample_weight: Any = None) -> Self:
        """Train the ensemble.

        Args:
            X: The rows, an array or a DataFrame of numbers.
            y: The target of every row.
            sample_weight: The weight of every row in the loss; rows with the weight 0 are left out.
        """
        fitted: Self = self._fit(X, y, sample_weight)
        return fitted

    @property
    def ensemble_(self) -> Ensemble:
        """The trained ensemble, for the functions of enfold."""
        check_is_fitted(self, "model_")
        return self.model_  # type: ignore[return-value]


class _Compressed(NetworkEstimator):
    """An estimator whose model is one network, to which an ensemble was compressed."""

    def fit(self, X: Table, y: Any) -> Self:
        """Train an ensemble and compress it.

        Args:
            X: The rows, an array or a DataFrame of numbers.
            y: The target of every row.
        """
        fitted: Self = self._fit(X, y)
        return fitted

    def _make_blank(self) -> nn.Module:
        return self._make_network()

    def _train(self, train: Examples, val: Examples | None, weights: Tensor | None) -> None:
        if val is None:
            raise EnfoldError(
                "validation_fraction must leave rows to choose the network by, got "
                f"{self.validation_fraction} and too few rows (n_samples = 1): raise it, or pass more rows"
            )
        ensemble = self._train_ensemble(train, val, weights)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FewExamplesWarning)  # networks are chosen by their likelihood
            result = compress(ensemble, train, val, config=self._config(), quiet=not self.verbose)
        self.report_ = str(result)
        self.model_ = result.network

    @property
    def network_(self) -> nn.Module:
        """The network, a plain module that needs no enfold."""
        check_is_fitted(self, "model_")
        return self.model_


class EnsembleClassifier(_Classes, _Ensembles):
    """An ensemble of networks that classifies rows; its prediction is the mean of the members'.

    Args:
        network: Function of the number of columns and the number of outputs that makes a network; None for an MLP. The
            outputs are one logit per class; of a regressor, a mean and a value of which the softplus is the variance.
        num_members: The number of members.
        method: The class of the ensemble in `enfold.ensembles`, such as "DeepEnsemble" or "BatchEnsemble".
        method_options: Further options of that class.
        hidden: Widths of the hidden layers of the MLP.
        epochs: Passes over the rows.
        batch_size: Rows per step.
        lr: Learning rate.
        weight_decay: Weight decay.
        patience: Stop after this many epochs without a better validation loss; None to train for all epochs.
        train_options: Further fields of `enfold.TrainConfig`.
        validation_fraction: Fraction of the rows that select the best epoch and are not trained on; 0 for none.
        standardize: Scale each column to mean 0 and standard deviation 1, by the rows of `fit`.
        random_state: Seed of weights, order and validation rows: an integer, a `RandomState`, or None for a random one.
        verbose: Show the progress.
    """


class EnsembleRegressor(_Numbers, _Ensembles):
    """An ensemble of networks that predicts a number for each row, with its uncertainty.

    Targets are standardized for the training. The arguments are those of `EnsembleClassifier`.
    """


class CompressedClassifier(_Classes, _Compressed):
    """One network that classifies rows with about the quality of an ensemble, by `enfold.compress`.

    `report_` is the table of what was tried. The arguments are those of `EnsembleClassifier`, and those of the members.
    """


class CompressedRegressor(_Numbers, _Compressed):
    """One network that predicts a number for each row with about the quality of an ensemble, by `enfold.compress`.

    `report_` is the table of what was tried. The arguments are those of `EnsembleClassifier`, and those of the members.
    """
