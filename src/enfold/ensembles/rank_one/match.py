"""Match the hidden units of members, so that their weights can be compared; see `enfold.symmetry.matching`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from enfold.ensemble import Ensemble
from enfold.ensembles.common.layer_shapes import CONVOLUTIONS, TRANSPOSED
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.rank_one.blocks import finite_blocks, member_layers
from enfold.errors import EnfoldError
from enfold.symmetry import match_state, symmetries


@torch.no_grad()
def match_units(members: Ensemble, *, example: Tensor | None = None, seed: int = 0) -> DeepEnsemble:
    """Return the members of a network of supported layers with their hidden units matched to those of member 0.

    Args:
        members: The ensemble, which is not modified.
        example: A few inputs, (B, ...), whose values do not matter; not needed where the first layer is linear.
        seed: The seed of the search for permutations.

    Returns:
        The members with permuted units; each computes the same function as before.

    Raises:
        EnfoldError: If no symmetries are known for the network, a weight is not finite, or an example is needed.
    """
    layers = member_layers(members)
    state = members.expand()
    for prefix, shape in layers.items():
        finite_blocks(state[f"{prefix}weight"], shape, prefix)
    stacked = {name: tensor.detach() for name, tensor in state.items()}
    first, *others = ({name: t[index] for name, t in stacked.items()} for index in range(members.num_members))
    network = members.network(first)
    inputs = _example(members) if example is None else example[:4]
    symmetry = symmetries(network, inputs, seed=seed, logits_only=True)
    if symmetry.note and not symmetry.groups:
        raise EnfoldError(
            f"network must have known symmetries for its units to be matched, but in this {type(network).__name__} "
            f"{symmetry.note}: leave matching out for it"
        )
    learned = set(members.skeleton.parameters)
    matched = [first, *(match_state(first, each, symmetry, seed=seed, learned=learned) for each in others)]
    return DeepEnsemble([members.network(each) for each in matched], engine=members.engine)


def _example(members: Ensemble) -> Tensor:
    layers = (nn.Linear, nn.Embedding, *CONVOLUTIONS, *TRANSPOSED)
    first = next(module for module in members.skeleton.network.modules() if isinstance(module, layers))
    if isinstance(first, nn.Linear):
        return torch.zeros(2, first.in_features)
    raise EnfoldError(
        f"example must be given for a network that starts with a {type(first).__name__}, got None: pass a few inputs"
    )
