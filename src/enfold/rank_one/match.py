"""Matching hidden units: each member's units are put in the order in which its weights are nearest to member 0's.

    max over permutations P_l   Σ_l <W_l, P_l W'_l P_{l-1}^T> + <b_l, P_l b'_l>                                (1)

One P_l at a time, the others fixed, is a linear assignment problem, solved exactly; (1) never falls, and the first
round without a gain is the last. Scales and shifts of norms count like biases; running statistics follow.

S. K. Ainsworth, J. Hayase, S. Srinivasa: Git Re-Basin: Merging Models modulo Permutation Symmetries, ICLR 2023,
arXiv:2209.04836.

Differs from the paper: only for networks whose layers form a chain; nothing else known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from enfold.members import Members, Stacked, State
from enfold.rank_one.blocks import finite_blocks, member_layers
from enfold.rank_one.chain import Hidden, chain, reordered
from enfold.seeds import generator

ROUNDS = 100


@torch.no_grad()
def match_units(members: Members, *, example: Tensor | None = None, seed: int = 0) -> Stacked:
    """The members with their hidden units in the order that is nearest to member 0's; each stays the same function.

    `example` is a few inputs, (B, ...), whose values do not matter; it can be left out where the first layer is linear.
    """
    layers = member_layers(members)
    state = {name: tensor.detach() for name, tensor in members.expand().items()}
    for prefix, shape in layers.items():
        finite_blocks(state[f"{prefix}weight"], shape, prefix)
    hidden = chain(members, example)
    states = [{name: tensor[index] for name, tensor in state.items()} for index in range(members.num_members)]
    learned = set(members.skeleton.parameters)
    matched = [states[0], *(_matched(states[0], other, hidden, learned, seed) for other in states[1:])]
    return Stacked([members.network(found) for found in matched], members.engine_name)


def _matched(target: State, state: State, hidden: list[Hidden], learned: set[str], seed: int) -> State:
    """Coordinate ascent on equation (1), the layers in a new random order each round."""
    from scipy.optimize import linear_sum_assignment

    source, state = generator(seed, "match units"), dict(state)
    for _ in range(ROUNDS):
        gained = False
        for index in torch.randperm(len(hidden), generator=source).tolist():
            axes = hidden[index].axes
            pairs = [
                (axis.by_unit(target[axis.name]), axis.by_unit(state[axis.name]))
                for axis in axes
                if axis.name in learned
            ]
            products = sum(ours.double().cpu() @ theirs.double().cpu().mT for ours, theirs in pairs)
            order = torch.as_tensor(linear_sum_assignment(products.numpy(), maximize=True)[1])
            gain = float(products.gather(1, order.unsqueeze(1)).sum() - products.trace())
            if gain > 1e-12 * float(products.abs().sum()):
                gained = True
                state |= reordered(state, axes, order)
        if not gained:
            break
    return state
