"""Templates: the mixing against sums written out, the starts, and how often a blob's numbers are used."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from enfold.ensembles.common.template_budget import Group, Layout, Mix
from enfold.ensembles.common.templates import Banks, Blob, kaiming_spread, orthogonal_rows
from enfold.seeds import generator


def banks(disjoint: bool = False) -> Banks:
    mixes = (Mix(Group(("a", "b", "c"), 6), 2, 5), Mix(Group(("d", "e"), 4), 3, 3))
    shapes = [torch.Size((2, 3)), torch.Size((4, 1))]
    return Banks(Layout(mixes, 0, 0, 0), shapes, [1.0, 1.0], 2, disjoint=disjoint, seed=0)


def blob(size: int, sizes=((3, 6), (2, 4)), *, disjoint: bool = False, cap: int = 2) -> Blob:
    groups = [
        Group(tuple(f"{place}.{layer}" for layer in range(layers)), each) for place, (layers, each) in enumerate(sizes)
    ]
    mixes = tuple(Mix(group, max(1, min(cap, size // group.size))) for group in groups)
    shapes = [torch.Size((group.size,)) for group in groups]
    return Blob(Layout(mixes, size, 0, 0), shapes, [1.0] * len(groups), 3, disjoint=disjoint, seed=0)


@pytest.mark.parametrize("disjoint", [False, True])
def test_a_bank_is_equation_1(disjoint):
    mixture = banks(disjoint)
    for number, weights in enumerate(mixture.weights()):
        index = mixture.get_buffer(f"index{number}")
        alpha, templates = mixture.coefficients[number], mixture.templates[number]
        for layer in range(index.shape[1]):
            for member in range(2):
                terms = [a * templates[t] for a, t in zip(alpha[member, layer], index[member, layer], strict=True)]
                torch.testing.assert_close(weights[layer, member], sum(terms))


def test_all_weights_of_a_group_are_one_product():
    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += any(name in str(function) for name in ("aten.mm", "aten.bmm", "aten.addmm"))
            return function(*args, **(kwargs or {}))

    for mixture in (banks(), banks(disjoint=True), blob(20)):
        with Products() as products:
            mixture.weights()
        assert products.count == 2  # groups


@settings(max_examples=25)
@given(a=st.floats(-3, 3), b=st.floats(-3, 3), complete=st.booleans())
def test_weights_are_linear_in_the_coefficients(a, b, complete):
    mixture = blob(15) if complete else banks()
    source = torch.Generator().manual_seed(0)
    first = [torch.randn(each.shape, generator=source) for each in mixture.coefficients]
    second = [torch.randn(each.shape, generator=source) for each in mixture.coefficients]

    @torch.no_grad()
    def weights(values):
        for parameter, value in zip(mixture.coefficients, values, strict=True):
            parameter.copy_(value)
        return mixture.weights()

    both = weights([a * x + b * y for x, y in zip(first, second, strict=True)])
    expected = [a * x + b * y for x, y in zip(weights(first), weights(second), strict=True)]
    torch.testing.assert_close(both, expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=25)
@given(rows=st.integers(1, 12), columns=st.integers(1, 6), seed=st.integers(0, 99))
def test_rows_have_norm_one_and_are_orthogonal_where_possible(rows, columns, seed):
    drawn = orthogonal_rows(rows, columns, generator(seed))
    assert drawn.shape == (rows, columns)
    torch.testing.assert_close(drawn.norm(dim=1), torch.ones(rows))
    for start in range(0, rows, columns):
        block = drawn[start : start + columns]
        torch.testing.assert_close(block @ block.T, torch.eye(len(block)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("size", [6, 13, 20, 43])
def test_all_entries_of_a_blob_are_used_equally_often(size, disjoint):
    mixture = blob(size, disjoint=disjoint)
    with torch.no_grad():
        for alpha in mixture.coefficients:
            alpha.fill_(1.0)
    sum(weights.sum() for weights in mixture.weights()).backward()
    used = mixture.templates[0].grad.round().int()  # by (member, layer, template)
    assert used.max() - used.min() <= (1 if disjoint else 3)
    torch.testing.assert_close(mixture.templates[0].grad, used.float())


def test_a_blob_by_hand():
    mixture = blob(9, ((2, 4), (1, 9)))
    with torch.no_grad():
        mixture.templates[0].copy_(torch.arange(9.0))
        for alpha in mixture.coefficients:
            alpha.copy_(torch.arange(1.0, alpha.numel() + 1).view(alpha.shape))
    first, second = mixture.weights()
    # Layers of 4 take 0..7 and 8, 0..6, as two templates each; the layer of 9 goes on from there.
    torch.testing.assert_close(first[0, 0], 1 * torch.tensor([0.0, 1, 2, 3]) + 2 * torch.tensor([4.0, 5, 6, 7]))
    torch.testing.assert_close(first[1, 0], 3 * torch.tensor([8.0, 0, 1, 2]) + 4 * torch.tensor([3.0, 4, 5, 6]))
    torch.testing.assert_close(second[0, 2], 3 * torch.tensor([7.0, 8, 0, 1, 2, 3, 4, 5, 6]))


def test_a_layer_larger_than_the_blob_is_interpolated_and_rescaled():
    mixture = blob(4000, ((1, 6500), (1, 500)), cap=5)
    large, small = (weights.detach() for weights in mixture.weights())
    assert large.std() == pytest.approx(1.0, rel=0.05)
    assert small.std() == pytest.approx(1.0, rel=0.05)
    line = blob(2, ((1, 4),))
    with torch.no_grad():
        line.templates[0].copy_(torch.tensor([0.0, 1.0]))
        line.coefficients[0].fill_((2 / 3) ** 0.5)
    torch.testing.assert_close(line.weights()[0][0, 0], torch.tensor([0.0, 0.25, 0.75, 1.0]))


def test_standard_deviations_follow_the_fan_in():
    assert kaiming_spread(nn.Linear, torch.Size((5, 8))) == pytest.approx(0.5)
    assert kaiming_spread(nn.Conv2d, torch.Size((5, 2, 2, 2))) == pytest.approx(0.5)
    assert kaiming_spread(nn.Embedding, torch.Size((5, 8))) == 1.0


def test_templates_and_coefficients_are_the_first_of_more():
    few = banks()
    mixes = (Mix(few.layout.mixes[0].group, 2, 7),)
    more = Banks(Layout(mixes, 0, 0, 0), [torch.Size((2, 3))], [1.0], 3, disjoint=False, seed=0)
    torch.testing.assert_close(more.templates[0][:5], few.templates[0], rtol=0, atol=0)
    torch.testing.assert_close(more.coefficients[0][:2], few.coefficients[0], rtol=0, atol=0)


@pytest.mark.parametrize(("layers", "templates", "k"), [(3, 3, 1), (7, 7, 5), (4, 4, 2), (5, 6, 5), (3, 11, 4)])
def test_layers_are_initialised_at_their_own_weights(layers, templates, k):
    group = Group(tuple(str(layer) for layer in range(layers)), 6)
    mixture = Banks(
        Layout((Mix(group, k, templates),), 0, 0, 0), [torch.Size((2, 3))], [1.0], 2, disjoint=False, seed=0
    )
    own = list(torch.randn(layers, 2, 3, generator=torch.Generator().manual_seed(0)))
    mixture.start_from([own], spread=0.0)
    expected = torch.stack(own)[:, None].expand(layers, 2, 2, 3)
    torch.testing.assert_close(mixture.weights()[0], expected, rtol=0, atol=0)
    mixture.start_from([own], spread=0.1)
    assert not torch.equal(mixture.weights()[0][:, 0], mixture.weights()[0][:, 1])
