"""Alignment without averaging: the members of a merge with their hidden units in matching orders.

    f(x; P_m(θ_m)) = f(x; θ_m),      P_m: the permutations by which a merge matches member m                 (1)

The papers are those of the merges. Differs from the paper: see the file of each merge.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

from enfold.arguments import arguments_of, check_arguments, checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.engines.skeleton import State
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge.activation_matching import activation_matching
from enfold.merge.activation_matching import match_members as match_by_activations
from enfold.merge.c2m3 import c2m3
from enfold.merge.c2m3 import match_members as match_in_universe
from enfold.merge.common.inputs import Models, prepare_inputs
from enfold.merge.common.merging import align_members
from enfold.merge.merge_many import match_members as match_to_mean
from enfold.merge.merge_many import merge_many
from enfold.merge.straight_through import match_members as match_by_loss
from enfold.merge.straight_through import straight_through
from enfold.merge.weight_matching import match_members as match_by_weights
from enfold.merge.weight_matching import weight_matching

Method = Literal["weight_matching", "activation_matching", "merge_many", "c2m3", "straight_through"]

METHODS: dict[str, tuple[Callable[..., nn.Module], Callable[..., list[State]]]] = {
    "weight_matching": (weight_matching, match_by_weights),
    "activation_matching": (activation_matching, match_by_activations),
    "merge_many": (merge_many, match_to_mean),
    "c2m3": (c2m3, match_in_universe),
    "straight_through": (straight_through, match_by_loss),
}
NEED_TRAIN = ("activation_matching", "straight_through")


@checked
def align(
    models: Models,
    train: Examples | None = None,
    *,
    example: Any = None,
    method: Method = "weight_matching",
    checkpoint: str | Path | None = None,
    unpack: Unpack | None = None,
    **options: Any,
) -> DeepEnsemble:
    """Return the members with their hidden units in the orders in which a merge averages them.

    Each member computes the same function as before.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples, for methods that need them.
        example: One or two inputs, (B, ...), in the structure that the network takes, to find its symmetries with; not
            needed with `train`.
        method: The merge whose matching is used.
        checkpoint: A file for "straight_through", which trains.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.
        **options: Options of that merge, such as `reference=1`; not `repair`, as nothing is merged.

    Raises:
        EnfoldError: If the networks cannot be matched, examples are missing, or an option is unknown.
    """
    merge, match = METHODS[method]
    if "repair" in options:
        raise EnfoldError(f"align does not merge, so it has no repair, got repair={options['repair']!r}: omit it")
    defaults = {name: argument.default for name, argument in arguments_of(merge).items() if name != "repair"}
    chosen = {**defaults, **check_arguments(merge, options)}
    inputs = prepare_inputs(
        "align", models, train, example=example, needs_train=method in NEED_TRAIN, warn=False, unpack=unpack
    )
    states = align_members(inputs, partial(match, **chosen), chosen["seed"], checkpoint)
    return DeepEnsemble([inputs.ensemble.network(state) for state in states], engine=inputs.ensemble.engine)
