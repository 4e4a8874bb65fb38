"""RegMean: each linear layer is the least-squares fit to the outputs of all members' layers on their own inputs.

    G_m = (1/N) X_mᵀ X_m,   X_m = inputs of the layer in member m on training examples, one row per place         (1)
    G̃_m = α G_m + (1 - α) diag(G_m) + ε I                                                                         (2)
    W = [Σ_m W_m G̃_m] [Σ_m G̃_m]⁻¹,   for W of shape out x in                                                      (3)

X. Jin, X. Ren, D. Preotiuc-Pietro, P. Cheng: Dataless Knowledge Fusion by Merging Weights of Language Models, ICLR
2023, arXiv:2212.09849.

(3) minimises Σ_m |X_m Wᵀ - X_m W_mᵀ|². The rows of a convolution are its patches (unfolding), separately for each
group of channels. In torch's attention, they are the queries, keys and values, and the heads' outputs before the last
projection. A weight that several layers have in common sums over all of them. All other parameters, with the biases,
are averaged.

Differs from the paper: convolutions; ε, relative to the mean of the diagonals, which makes directions that no example
has the average of the members; batch-norm statistics are measured again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from enfold.arguments import checked
from enfold.data.batches import Order, count_targets
from enfold.data.convert import Examples
from enfold.data.dataset import Data
from enfold.data.unpack import Unpack
from enfold.engines.modes import eval_mode
from enfold.engines.skeleton import find_places
from enfold.evaluate import member_logits
from enfold.merge.common.fine_tuned import finish
from enfold.merge.common.inputs import Models, prepare_inputs
from enfold.merge.common.layers import has_torch_forward
from enfold.merge.common.states import mean_of, states_of
from enfold.merge.repair import RepairKind

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Grams = dict[str, Tensor]  # (blocks, in, in) by the name of the weight


@checked
@torch.no_grad()
def regmean(
    models: Models,
    train: Examples,
    *,
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.9,
    ridge: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-6,
    examples: Annotated[int, Field(ge=1)] = 1024,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return one network whose linear layers and convolutions fit the outputs of the members' by least squares.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples, on which the inputs of layers are measured.
        alpha: α of equation (2), the factor on off-diagonal entries.
        ridge: ε of equation (2), relative to the mean of the diagonals.
        examples: Number of training examples, rounded up to a batch.
        repair: Statistics of the result: "reset" measures batch norms again, "none" averages their statistics,
            "repair", "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the choice of examples.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member is returned unchanged.

    Raises:
        EnfoldError: If the networks cannot be averaged, or examples are missing.
    """
    inputs = prepare_inputs("regmean", models, train, repair=repair, unpack=unpack, needs_train=True)
    states = states_of(inputs.ensemble)
    if len(states) == 1:
        return inputs.ensemble.member(0).eval()
    found = [measure_grams(inputs.ensemble.network(state), inputs.data, examples, seed) for state in states]
    state = mean_of(states)
    for name in found[0]:
        if all(name in grams for grams in found):
            each = [own[name] for own in states]
            state[name] = solve(each, [grams[name] for grams in found], alpha, ridge).to(state[name])
    return finish(inputs, state, repair, seed)


def solve(weights: list[Tensor], grams: list[Tensor], alpha: float, ridge: float) -> Tensor:
    """Return equations (2) and (3) of one layer.

    Args:
        weights: The weight of each member, (out, ...).
        grams: G of each member, (blocks, in, in); outputs are divided evenly among the blocks.
        alpha: The factor on off-diagonal entries.
        ridge: ε, relative to the mean of the diagonals.
    """
    stacked = torch.stack([gram.double() for gram in grams])  # (M, blocks, in, in)
    diagonals = stacked.diagonal(dim1=-2, dim2=-1)
    added = ridge * float(diagonals.mean()) or 1.0  # all inputs are 0: the average
    used = alpha * stacked + torch.diag_embed((1 - alpha) * diagonals + added)  # (2)
    blocks, width = stacked.shape[1], stacked.shape[-1]
    rows = torch.stack([weight.double().reshape(blocks, -1, width) for weight in weights])  # (M, blocks, out, in)
    middle = rows.mean(0)  # solved for the distance from it, which is exact for equal members
    product = ((rows - middle) @ used).sum(0)
    found: Tensor = middle + torch.linalg.solve(used.sum(0), product, left=False)  # (3)
    return found.view_as(weights[0])


def measure_grams(network: nn.Module, data: Data, examples: int, seed: int = 0) -> Grams:
    """Return equation (1) for all weights that are used in linear layers and convolutions alone.

    Args:
        network: The network.
        data: Data whose training examples are used.
        examples: Number of examples, rounded up to a batch.
        seed: Seed of the order of the examples.
    """
    sums: Grams = {}
    device, count = next(network.parameters()).device, 0
    with eval_mode(network), _watch(network, sums), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # a loader may draw
        for batch in Order(min(128, examples), seed=seed).batches(data, epoch=0):
            member_logits(network, batch.to(device).inputs)
            count += count_targets(batch.targets)
            if count >= examples:
                break
    return {name: gram / count for name, gram in sums.items()}


@contextmanager
def _watch(network: nn.Module, sums: Grams) -> Iterator[None]:
    """Add the products of layer inputs to `sums` in every call inside the block."""
    watcher = _Watcher(_weights(network), sums)
    handles = [handle for module in network.modules() for handle in [watcher.hook(module)] if handle is not None]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it does not call the layers
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class _Watcher:
    """Hooks of layers that add to equation (1)."""

    names: dict[tuple[int, str], str]  # see `_weights`
    sums: Grams

    def hook(self, module: nn.Module) -> RemovableHandle | None:
        """Return the hook of a layer; None for modules without a weight that is fitted."""
        if isinstance(module, nn.MultiheadAttention):
            return module.register_forward_pre_hook(self.attention, with_kwargs=True)
        return module.register_forward_pre_hook(self.layer) if (id(module), "weight") in self.names else None

    def add(self, layer: nn.Module, key: str, rows: Tensor, block: int = 0, blocks: int = 1) -> None:
        """Add the rows of all blocks of a weight, (blocks, N, in), or of one of several, (1, N, in).

        Args:
            layer: The layer.
            key: The name of its weight.
            rows: Its inputs, (blocks, N, in) or (1, N, in).
            block: Index of the first block.
            blocks: Number of blocks of the weight.
        """
        name = self.names.get((id(layer), key))
        if name is None:
            return
        own = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
        product = (own.mT @ own).double()
        if name not in self.sums:
            self.sums[name] = product.new_zeros(max(blocks, len(product)), *product.shape[1:])
        self.sums[name][block : block + len(product)] += product

    def layer(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Observe a linear layer or a convolution."""
        rows = _linear_rows(layer, args[0]) if isinstance(layer, nn.Linear) else conv_rows(layer, args[0])
        self.add(layer, "weight", rows)

    def attention(self, layer: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Observe all projections of torch's attention.

        Args:
            layer: The layer.
            args: Positional arguments of its call.
            kwargs: Keyword arguments of its call.
        """
        given = {**dict(zip(("query", "key", "value"), args, strict=False)), **kwargs}
        for index, key in enumerate(("query", "key", "value")):
            rows = given[key].reshape(1, -1, given[key].shape[-1])
            self.add(layer, "in_proj_weight", rows, index, 3)
            self.add(layer, f"{key[0]}_proj_weight", rows)
        if (id(layer.out_proj), "weight") in self.names:
            heads = _before_projection(layer, args, kwargs)
            self.add(layer.out_proj, "weight", heads.reshape(1, -1, heads.shape[-1]))


def _before_projection(layer: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the outputs of all heads, by a call in which the last projection is the identity."""
    last = layer.out_proj
    weight, bias = last.weight, last.bias
    try:
        last.weight = nn.Parameter(torch.eye(len(weight)).to(weight), requires_grad=False)
        last.register_parameter("bias", None)
        found: Tensor = layer.forward(*args, **kwargs)[0]
    finally:
        last.weight = weight
        last.register_parameter("bias", bias)
    return found


def _weights(network: nn.Module) -> dict[tuple[int, str], str]:
    """Return the names of the weights that only such layers use, by the layer and the key."""
    places, _ = find_places(network)
    owners = {id(module._parameters): module for module in network.modules()}
    attention = {id(m.out_proj) for m in network.modules() if isinstance(m, nn.MultiheadAttention)}
    found: dict[tuple[int, str], str] = {}
    for name, where in places.items():
        used = [(owners[id(tensors)], key) for tensors, key in where]
        if all(_is_linear(module, key, id(module) in attention) for module, key in used):
            found |= {(id(module), key): name for module, key in used}
    return found


def _is_linear(module: nn.Module, key: str, is_projection: bool) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return key.endswith("proj_weight") and has_torch_forward(module)
    kinds = (nn.Linear, *CONVOLUTIONS)
    return key == "weight" and isinstance(module, kinds) and (is_projection or has_torch_forward(module))


def _linear_rows(layer: nn.Linear, inputs: Tensor) -> Tensor:
    return inputs.detach().reshape(1, -1, layer.in_features)


def conv_rows(layer: Any, inputs: Tensor) -> Tensor:
    """Return the patches of a convolution's inputs, (groups, N, in): one row for each place of the output."""
    axes = len(layer.kernel_size)
    found = inputs.detach() if inputs.ndim == axes + 2 else inputs.detach()[None]
    sides = layer._reversed_padding_repeated_twice
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    found = F.pad(found, sides, mode=mode) if any(sides) else found
    for axis in range(axes):
        size, stride, gap = layer.kernel_size[axis], layer.stride[axis], layer.dilation[axis]
        found = found.unfold(axis + 2, (size - 1) * gap + 1, stride)[..., ::gap]  # (B, C, places..., kernel...)
    places = list(range(2, axes + 2))
    found = found.unflatten(1, (layer.groups, -1))  # (B, groups, C', places..., kernel...)
    order = [1, 0, *[axis + 1 for axis in places], 2, *range(axes + 3, 2 * axes + 3)]
    rows: Tensor = found.permute(order).flatten(axes + 2).flatten(1, axes + 1)
    return rows
