"""A zoo of small networks that users write: each contract of the members is tested on all of them.

A specimen says which engines must run it. `stacked=False` is a promise too: that engine must refuse it, by name.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.networks import ViT
from specimens import (
    CLASSES,
    FEATURES,
    TOKENS,
    ZOO,
    Apply,
    Caches,
    Keeps,
    Nested,
    Output,
    Reassigns,
    Residual,
    images,
    own_inputs,
    population,
    sequences,
    specimen,
    tokens,
    vectors,
)

__all__ = ["CLASSES", "ZOO", "Apply", "own_inputs", "population", "vectors"]

# Linear layers


@specimen(vectors, stacked=True)
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


@specimen(vectors, stacked=True)
def bare_linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


@specimen(vectors, stacked=True)
def without_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8, bias=False), nn.Tanh(), nn.Linear(8, CLASSES, bias=False))


@specimen(vectors, stacked=True)
def nested() -> nn.Module:
    return Nested()


@specimen(sequences, stacked=True)
def linear_on_sequences() -> nn.Module:
    first, second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
    return Apply(lambda net, x: net.second(torch.relu(net.first(x)).mean(1)), first=first, second=second)


@specimen(vectors, stacked=True)
def gated() -> nn.Module:
    def forward(net: Apply, x: Tensor) -> Tensor:
        value, gate = net.first(x).chunk(2, dim=-1)
        return net.second(value * torch.sigmoid(gate)) + value.max(-1).values[:, None]

    return Apply(forward, first=nn.Linear(FEATURES, 8), second=nn.Linear(4, CLASSES))


@specimen(images, stacked=True)
def reshaping() -> nn.Module:
    def forward(net: Apply, x: Tensor) -> Tensor:
        hidden = net.first(x.view(x.size(0), -1))
        hidden = hidden.view(hidden.shape[0], 2, 4).transpose(1, 2).reshape(hidden.size(0), -1)
        return net.second(hidden)

    return Apply(forward, first=nn.Linear(128, 8), second=nn.Linear(8, CLASSES))


@specimen(vectors, stacked=True)
def layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, CLASSES))


@specimen(sequences, stacked=True)
def layer_norm_first() -> nn.Module:
    layers = (
        nn.LayerNorm((5, FEATURES)),
        nn.LayerNorm(FEATURES, bias=False),
        nn.LayerNorm(FEATURES, elementwise_affine=False),
    )
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(5 * FEATURES, CLASSES))


@specimen(tokens, stacked=True)
def embedding() -> nn.Module:
    embed, head = nn.Embedding(TOKENS, 4), nn.Linear(4, CLASSES)
    return Apply(lambda net, x: net.head(net.embed(x).mean(1)), embed=embed, head=head)


@specimen(tokens, stacked=False, vmap=False)
def padded_embedding() -> nn.Module:
    embed, head = nn.Embedding(TOKENS, 4, padding_idx=3), nn.Linear(4, CLASSES)
    return Apply(lambda net, x: net.head(net.embed(x).mean(1)), embed=embed, head=head)


@specimen(tokens, stacked=False)
def embedding_bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(TOKENS, 4, mode="mean"), nn.Linear(4, CLASSES))


# Norms


@specimen(vectors, stacked=True)
def batch_norm_1d() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))


@specimen(vectors, stacked=True)
def batch_norm_plain() -> nn.Module:
    untracked = nn.BatchNorm1d(8, track_running_stats=False)
    return nn.Sequential(nn.Linear(FEATURES, 8), untracked, nn.BatchNorm1d(8, affine=False), nn.Linear(8, CLASSES))


@specimen(vectors, stacked=False, vmap=False)
def batch_norm_cumulative() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, CLASSES))


@specimen(sequences, stacked=False)
def batch_norm_on_sequences() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(5), nn.Flatten(), nn.Linear(40, CLASSES))


@specimen(images, stacked=False)
def batch_norm_2d() -> nn.Module:
    convolution = nn.Conv2d(2, 4, 3, stride=2)
    return nn.Sequential(convolution, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES))


@specimen(images, stacked=False)
def residual() -> nn.Module:
    return Residual()


@specimen(images, stacked=False, vmap=False)
def group_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, CLASSES))


# Attention and recurrence


@specimen(sequences, stacked=False)
def attention() -> nn.Module:
    attend = nn.MultiheadAttention(FEATURES, 2, batch_first=True)
    return Apply(lambda net, x: net.head(net.attend(x, x, x)[0].mean(1)), attend=attend, head=mlp())


@specimen(sequences, stacked=False)
def encoder_layer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.0, batch_first=True)
    return Apply(lambda net, x: net.head(net.layer(x)[:, 0]), layer=layer, head=nn.Linear(FEATURES, CLASSES))


@specimen(images, stacked=False)
def vit() -> nn.Module:
    return ViT((2, 8, 8), CLASSES, patch=4, width=8, depth=1, heads=2, expansion=2, pooling="class")


@specimen(sequences, stacked=True)
def attention_by_hand() -> nn.Module:
    def forward(net: Apply, x: Tensor) -> Tensor:
        query, key, value = net.project(x).chunk(3, dim=-1)
        weights = torch.softmax(query @ key.transpose(1, 2), dim=-1)
        return net.head((weights @ value).mean(dim=1))

    return Apply(forward, project=nn.Linear(FEATURES, 12), head=nn.Linear(4, CLASSES))


@specimen(sequences, stacked=False, vmap=False)
def lstm() -> nn.Module:
    return Apply(
        lambda net, x: net.head(net.cell(x)[0][:, -1]),
        cell=nn.LSTM(FEATURES, 4, batch_first=True),
        head=nn.Linear(4, CLASSES),
    )


# Randomness and modes


@specimen(vectors, stacked=True, draws=True)
def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))


@specimen(vectors, stacked=False, draws=True)
def functional_dropout() -> nn.Module:
    def forward(net: Apply, x: Tensor) -> Tensor:
        return net.second(F.dropout(net.first(x), 0.5, training=net.training))

    return Apply(forward, first=nn.Linear(FEATURES, 8), second=nn.Linear(8, CLASSES))


@specimen(vectors, stacked=False)
def otherwise_in_training() -> nn.Module:
    def forward(net: Apply, x: Tensor) -> Tensor:
        return 2 * net.layer(x) if net.training else net.layer(x)

    return Apply(forward, layer=nn.Linear(FEATURES, CLASSES))


# Examples that see each other: the stacked engine merges members and batch, and would mix members too


@specimen(vectors, stacked=False)
def mixing() -> nn.Module:
    def forward(net: Apply, x: Tensor) -> Tensor:
        hidden = net.first(x)
        return net.second(hidden - hidden.mean(0))

    return Apply(forward, first=nn.Linear(FEATURES, 8), second=nn.Linear(8, CLASSES))


@specimen(vectors, stacked=False)
def mixing_inputs() -> nn.Module:
    return Apply(lambda net, x: net.layer(x - x.mean(0)), layer=nn.Linear(FEATURES, CLASSES))


@specimen(vectors, stacked=False)
def mixing_in_training() -> nn.Module:
    def forward(net: Apply, x: Tensor) -> Tensor:
        hidden = net.layer(x)
        return hidden - hidden.mean(0) if net.training else hidden

    return Apply(forward, layer=nn.Linear(FEATURES, CLASSES))


@specimen(vectors, stacked=False)
def mixing_by_softmax() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Softmax(dim=0), nn.Linear(8, CLASSES))


@specimen(vectors, stacked=False)
def mixing_behind_zeros() -> nn.Module:
    network = nn.Sequential(nn.Linear(FEATURES, 8), nn.Softmax(dim=0), nn.Linear(8, CLASSES))
    nn.init.zeros_(network[2].weight)  # as new, its outputs tell nothing of the layers before
    nn.init.zeros_(network[2].bias)
    return network


# Tensors that are shared, frozen, raw or replaced


@specimen(vectors, stacked=True)
def tied() -> nn.Module:
    network = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES), nn.Tanh())
    network[2].weight = network[0].weight
    return nn.Sequential(network, nn.Linear(FEATURES, CLASSES))


@specimen(tokens, stacked=False)
def tied_embedding() -> nn.Module:
    def forward(net: Apply, x: Tensor) -> Tensor:
        return F.linear(net.embed(x).mean(1), net.embed.weight) @ net.read

    return Apply(forward, embed=nn.Embedding(TOKENS, 4), read=nn.Parameter(torch.randn(TOKENS, CLASSES)))


@specimen(vectors, stacked=True)
def used_twice() -> nn.Module:
    layer, head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
    return Apply(lambda net, x: net.head(torch.tanh(net.layer(torch.tanh(net.layer(x))))), layer=layer, head=head)


@specimen(vectors, stacked=True)
def listed_twice() -> nn.Module:
    layer = nn.Linear(FEATURES, FEATURES)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))


@specimen(vectors, stacked=True)
def frozen() -> nn.Module:
    network = mlp()
    network[0].requires_grad_(False)
    return network


@specimen(vectors, stacked=False)
def raw_parameters() -> nn.Module:
    def forward(net: Apply, x: Tensor) -> Tensor:
        return F.linear(torch.relu(x @ net.first), net.second, net.bias) * net.scale

    first, second = torch.randn(FEATURES, 8), torch.randn(CLASSES, 8)
    bias, scale = torch.zeros(CLASSES), torch.randn(CLASSES)
    return Apply(forward, first=nn.Parameter(first), second=nn.Parameter(second), bias=nn.Parameter(bias), scale=scale)


@specimen(vectors, stacked=False)
def reassigned_buffer() -> nn.Module:
    return Reassigns()


@specimen(vectors, stacked=False)
def cached_buffer() -> nn.Module:
    return Caches()


@specimen(vectors, stacked=True)
def kept_activations() -> nn.Module:
    return Keeps()


@specimen(vectors, stacked=False, vmap=False)
def spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 8)), nn.Linear(8, CLASSES))


@specimen(vectors, stacked=False)
def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 8)), nn.Linear(8, CLASSES))


# Control flow and outputs


@specimen(vectors, stacked=False, vmap=False)
def control_flow() -> nn.Module:
    def forward(net: Apply, x: Tensor) -> Tensor:
        hidden = net.first(x)
        return net.second(torch.relu(hidden) if hidden.sum() > 0 else torch.tanh(hidden))

    return Apply(forward, first=nn.Linear(FEATURES, 8), second=nn.Linear(8, CLASSES))


@specimen(vectors, stacked=False)
def dictionary() -> nn.Module:
    def forward(net: Apply, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": x, "logits": net.layer(x)}

    return Apply(forward, layer=nn.Linear(FEATURES, CLASSES))


@specimen(vectors, stacked=False)
def output_object() -> nn.Module:
    return Apply(lambda net, x: Output(net.layer(x)), layer=nn.Linear(FEATURES, CLASSES))


@specimen(vectors, stacked=False)
def hooked() -> nn.Module:
    network = mlp()
    network.register_forward_hook(lambda module, inputs, output: 2 * output)
    return network
