"""Weights of the members of an ensemble that fit validation examples; `enfold.metrics.averaging` has the equations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from enfold.data.convert import Examples, require
from enfold.data.unpack import Unpack
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics.averaging import Averaging, averaging_weights
from enfold.tasks import TaskLike


def fit_weights(
    ensemble: nn.Module,
    val: Examples,
    kind: Averaging = "stacking",
    *,
    prior: Sequence[float] | None = None,
    draws: int = 1000,
    seed: int = 0,
    task: TaskLike = None,
    batch_size: int = 1024,
    unpack: Unpack | None = None,
) -> tuple[float, ...]:
    """Return weights of the members that fit validation examples; the ensemble is not modified.

    ``ensemble.set_weights(fit_weights(ensemble, val))`` uses them in every mean of the members' predictions, as does
    ``DeepEnsemble(networks, weights=...)``.

    Args:
        ensemble: An ensemble.
        val: Validation examples, which the members were not trained on.
        kind: "stacking": the weights whose mean prediction has the lowest NLL; "bma": the posterior probability of each
            member, which collapses on one member with many examples; "pseudo-bma": the same, averaged over the Bayesian
            bootstrap of the examples.
        prior: Prior probabilities of the members for "bma"; None for equal ones.
        draws: The number of bootstrap draws for "pseudo-bma".
        seed: The seed of the draws.
        task: What the outputs mean; None for the task that the ensemble was trained for, or to infer it.
        batch_size: Examples per forward pass, where `val` is not a loader.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A weight for each member; they sum to 1.

    Raises:
        EnfoldError: If an argument is invalid, or the outputs have no likelihood, as those of a regression with points.
    """
    require(val, "val", "fit_weights")
    if not isinstance(ensemble, Ensemble):
        raise EnfoldError(f"ensemble must be an Ensemble, got {type(ensemble).__name__}: pass DeepEnsemble([a, b])")
    found = predict(ensemble, val, batch_size, task=task, unpack=unpack)
    return averaging_weights(found, kind, prior=prior, draws=draws, seed=seed)
