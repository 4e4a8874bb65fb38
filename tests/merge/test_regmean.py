"""RegMean: normal equations with torch.lstsq and with torch's own unfolding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.data.convert import as_data
from enfold.merge import average, regmean
from enfold.merge.regmean import conv_rows, measure_grams, solve
from fine_tuned import Mixed, family, images

LABELS = torch.randint(3, (40,), generator=torch.Generator().manual_seed(0))


def inputs(*shape: int) -> Tensor:
    return torch.randn(40, *shape, generator=torch.Generator().manual_seed(1))


def normal_equations(weights: list[Tensor], rows: list[Tensor], alpha: float) -> Tensor:
    """Equation (3) for one block, (out, in)."""
    total = product = 0
    for weight, each in zip(weights, rows, strict=True):
        gram = each.double().T @ each.double()
        gram = alpha * gram + (1 - alpha) * gram.diagonal().diag()
        total, product = total + gram, product + weight.double() @ gram
    return (product @ torch.linalg.inv(total)).float()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 1.0])
def test_linear_layers(alpha):
    members = [nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)) for _ in range(3)]
    found = regmean(members, (inputs(5), LABELS), alpha=alpha)
    first = normal_equations([each[0].weight for each in members], [inputs(5)] * 3, alpha)
    second = normal_equations([each[2].weight for each in members], [each[:2](inputs(5)) for each in members], alpha)
    torch.testing.assert_close(found[0].weight, first, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[2].weight, second, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[2].bias, sum(each[2].bias for each in members) / 3)


def test_least_squares():
    """With alpha = 1 the layer minimises the squared distance to all members' outputs."""
    members = [nn.Linear(5, 3, bias=False) for _ in range(2)]
    found = regmean(members, (inputs(5), LABELS), alpha=1.0)
    rows = torch.cat([inputs(5)] * 2)
    fitted = torch.linalg.lstsq(rows, torch.cat([each(inputs(5)) for each in members])).solution.T
    torch.testing.assert_close(found.weight, fitted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 1},
        {"padding": "same", "dilation": 2},
        {"stride": 2, "padding": (1, 2), "groups": 2},
        {"padding": 1, "padding_mode": "circular"},
    ],
    ids=str,
)
def test_patches_multiply_to_the_outputs(options):
    for layer, images_ in ((nn.Conv2d(4, 6, 3, **options), inputs(4, 7, 8)),):
        rows = conv_rows(layer, images_)
        weight = layer.weight.flatten(1).unflatten(0, (layer.groups, -1))
        outputs = (rows @ weight.mT).detach()  # (groups, N, out)
        expected = F.conv2d(images_, layer.weight, None) if not options else layer(images_) - layer.bias[:, None, None]
        expected = expected.movedim(1, -1).flatten(0, -2).unflatten(-1, (layer.groups, -1)).movedim(1, 0)
        torch.testing.assert_close(outputs, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [nn.Conv1d(2, 3, 3), nn.Conv3d(2, 3, 2, padding=1)])
def test_patches_of_other_dimensions(layer):
    given = inputs(2, *[5] * len(layer.kernel_size))
    outputs = conv_rows(layer, given)[0] @ layer.weight.flatten(1).T
    expected = (layer(given) - layer.bias.view(-1, *[1] * len(layer.kernel_size))).movedim(1, -1).flatten(0, -2)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)


def test_convolutions():
    members = [nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten()) for _ in range(2)]
    found = regmean(members, (inputs(2, 4, 4), torch.randint(48, (40,))), alpha=0.8)
    rows = F.unfold(inputs(2, 4, 4), 3, padding=1).mT.flatten(0, 1)
    expected = normal_equations([each[0].weight.flatten(1) for each in members], [rows] * 2, 0.8)
    torch.testing.assert_close(found[0].weight.flatten(1), expected, rtol=1e-3, atol=1e-4)


class Attending(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.attention(tokens, tokens, 2 * tokens, need_weights=False)[0].mean(1))


def test_attention():
    members = [Attending() for _ in range(2)]
    tokens = inputs(5, 4)
    grams = [measure_grams(each, as_data((tokens, LABELS)), 1000) for each in members]
    rows = tokens.flatten(0, 1)
    own = rows.T @ rows / 40
    for gram in grams:
        torch.testing.assert_close(gram["attention.in_proj_weight"].float(), torch.stack([own, own, 4 * own]))
    for member, gram in zip(members, grams, strict=True):
        before = heads(member.attention, tokens).flatten(0, 1)
        torch.testing.assert_close(
            gram["attention.out_proj.weight"][0].float(), before.T @ before / 40, rtol=1e-4, atol=1e-5
        )
    found = regmean(members, (tokens, LABELS))
    expected = normal_equations([each.attention.in_proj_weight[:4] for each in members], [rows] * 2, 0.9)
    torch.testing.assert_close(found.attention.in_proj_weight[:4], expected, rtol=1e-3, atol=1e-4)


def heads(layer: nn.MultiheadAttention, tokens: Tensor) -> Tensor:
    """The outputs of both heads, by hand."""
    weight, bias = layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((tokens, tokens, 2 * tokens), weight, bias, strict=True))
    parts = [
        torch.softmax(a @ b.mT / 2**0.5, -1) @ c
        for a, b, c in zip(q.split(2, -1), k.split(2, -1), v.split(2, -1), strict=True)
    ]
    return torch.cat(parts, -1).detach()


def test_a_transformer_layer_whose_fast_path_skips_its_modules():
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.layer(tokens).mean(1))

    grams = measure_grams(Encoder().eval(), as_data((inputs(5, 4), LABELS)), 1000)
    assert {"layer.self_attn.in_proj_weight", "layer.self_attn.out_proj.weight", "layer.linear1.weight"} <= grams.keys()
    assert torch.backends.mha.get_fastpath_enabled()


def test_weights_that_are_also_an_embedding_are_averaged():
    _, members = family()
    assert "embed.weight" not in measure_grams(Mixed().eval(), as_data(images()), 1000)
    torch.testing.assert_close(regmean(members, images()).embed.weight, average(members, images()).embed.weight)


def test_a_weight_of_two_layers_sums_over_both():
    network = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    network[1].weight = network[0].weight
    given = inputs(3)
    rows = torch.cat([given, network[0](given)]).detach()
    gram = measure_grams(network, as_data((given, LABELS)), 1000)
    torch.testing.assert_close(gram["0.weight"][0].float(), rows.T @ rows / 40)


def test_directions_without_examples_are_averaged():
    weights = [torch.randn(2, 3) for _ in range(2)]
    gram = torch.zeros(1, 3, 3)
    gram[0, 0, 0] = 1.0
    found = solve(weights, [gram, 3 * gram], 1.0, 1e-6)
    torch.testing.assert_close(found[:, 1:].float(), ((weights[0] + weights[1]) / 2)[:, 1:])
    torch.testing.assert_close(found[:, 0].float(), (weights[0] + 3 * weights[1])[:, 0] / 4, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(solve(weights, [0 * gram] * 2, 0.9, 1e-6).float(), (weights[0] + weights[1]) / 2)
