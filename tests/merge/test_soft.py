"""The soft average: equal to Algorithm 1 of the thesis in values and gradients, and to plain averages at the ends."""

from __future__ import annotations

import math
from itertools import chain, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.merge.common.lazy import Lazy
from enfold.merge.common.permutation_learning import PermutationOptions
from enfold.merge.common.sinkhorn import sinkhorn
from enfold.merge.common.soft import Balance, SoftAverage, mix_units, nearest_permutations
from enfold.merge.common.solve import condition
from enfold.merge.common.states import mean_of, states_of
from enfold.symmetry import permute, symmetries

WIDTHS = (7, 5)


def mlp(seed: int, widths: tuple[int, ...] = WIDTHS) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        hidden = [(nn.Linear(d, e), nn.ReLU()) for d, e in pairwise((4, *widths))]
        return nn.Sequential(*chain(*hidden), nn.Linear(widths[-1], 3)).double()


def algorithm_one(
    networks: list[nn.Sequential],
    costs: list[list[Tensor]],
    inputs: Tensor,
    tau: float,
    inverse: str = "exact",
) -> Tensor:
    """Algorithm 1, written out: layers, members in each, a Sinkhorn wherever a matrix occurs, and its inverse."""

    def doubly_stochastic(cost: Tensor) -> Tensor:
        matrix = torch.exp(cost / tau)
        for _ in range(100):
            matrix = matrix / matrix.sum(dim=1, keepdim=True)
            matrix = matrix / matrix.sum(dim=0, keepdim=True)
        return matrix

    hidden, last = inputs, len(networks[0]) // 2
    for layer in range(last + 1):
        outputs = []
        for n, network in enumerate(networks):
            own = hidden
            if layer > 0 and n > 0:
                matrix = doubly_stochastic(costs[n - 1][layer - 1])
                stands_in = {"exact": torch.linalg.inv(matrix), "transpose": matrix.T, "none": torch.eye(len(matrix))}
                own = own @ stands_in[inverse].to(own).T
            own = F.linear(own, network[2 * layer].weight, network[2 * layer].bias)
            if layer < last and n > 0:
                own = own @ doubly_stochastic(costs[n - 1][layer]).T
            outputs.append(own)
        mean = torch.stack(outputs).mean(dim=0)
        hidden = torch.relu(mean) if layer < last else mean
    return hidden


def model_of(networks: list[nn.Sequential], costs: list[list[Tensor]], **settings: object) -> SoftAverage:
    """The soft average of networks, all but the first with these costs."""
    members = DeepEnsemble(networks)
    groups = symmetries(networks[0], torch.zeros(2, 4)).groups
    assert [group.size for group in groups] == [len(cost) for cost in costs[0]]
    scores = [torch.stack(each) for each in zip(*costs, strict=True)]
    none = [each[:0] for each in scores]
    weights = [1 / len(networks)] * len(networks)
    return SoftAverage(members, states_of(members), weights, groups, scores, none, **settings)


def random_costs(count: int, widths: tuple[int, ...] = WIDTHS) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.eye(d) + torch.randn(d, d, generator=generator, dtype=torch.float64) for d in widths]
        for _ in range(count)
    ]


some_widths = pytest.mark.parametrize("widths", [WIDTHS, (6, 6), (7, 5, 7)], ids=str)  # equal ones are balanced at once


@pytest.mark.combinations
@some_widths
@pytest.mark.parametrize("inverse", ["exact", "transpose", "none"])
@pytest.mark.parametrize("tau", [1.0, 0.5])
@pytest.mark.parametrize("rows", [1, 9])  # with few rows weights are used factor by factor, with many they are folded
def test_it_equals_algorithm_one(tau, rows, widths, inverse):
    networks, costs = [mlp(seed, widths) for seed in range(3)], random_costs(2, widths)
    inputs = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    labels = torch.arange(rows) % 3
    for cost in (each for own in costs for each in own):
        cost.requires_grad_()
    expected = algorithm_one(networks, costs, inputs, tau, inverse=inverse)
    F.cross_entropy(expected, labels).backward()
    model = model_of(networks, [[each.detach() for each in own] for own in costs], temperature=tau, inverse=inverse)
    found = model(inputs)[0]
    F.cross_entropy(found, labels).backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for k, scores in enumerate(model.scores):
        gradients = torch.stack([own[k].grad for own in costs])
        torch.testing.assert_close(scores.grad, gradients, rtol=1e-8, atol=1e-10)


def test_the_default_tolerance_has_no_visible_effect():
    networks, costs = [mlp(seed, (64, 32)) for seed in range(3)], random_costs(2, (64, 32))
    inputs = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    found = model_of(networks, costs, balance=Balance(100, PermutationOptions().tolerance))(inputs)[0]
    torch.testing.assert_close(found, algorithm_one(networks, costs, inputs, 1.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "between", [nn.ReLU(), nn.LayerNorm(6), nn.Sequential(nn.PReLU(6), nn.BatchNorm1d(6))], ids=str
)
def test_a_gain_is_a_factor_of_a_units_output(between):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), between, nn.Linear(6, 3)).eval()
    members, inputs = DeepEnsemble([network, network]), torch.randn(5, 4)
    group = symmetries(network, inputs[:2]).groups
    scores, gain = [30 * torch.eye(6).unsqueeze(0)], torch.rand(6) + 0.5
    model = SoftAverage(members, states_of(members), [0.5, 0.5], group, scores, [scores[0][:0]], [gain]).eval()
    expected = network[2](network[1](network[0](inputs)) * gain)
    torch.testing.assert_close(model(inputs)[0], expected, rtol=1e-4, atol=1e-5)


def test_weights_are_factored_for_few_rows(monkeypatch):
    model = model_of([mlp(0), mlp(1)], random_costs(1)).train()
    assert model.lazy == {"0.weight": (0, None), "2.weight": (1, 0), "4.weight": (None, 1)}
    true, folded = Lazy.tensor.func, []
    monkeypatch.setattr(Lazy, "tensor", property(lambda own: folded.append(own) or true(own)))
    few, many = (torch.ones(rows, 4, dtype=torch.float64) for rows in (1, 50))
    first = model(few)
    assert not folded
    torch.testing.assert_close(model(many)[:, :1], first)
    assert len(folded) == 3
    weight = model._lazily("2.weight", model.matrices())
    torch.testing.assert_close(torch.relu(weight), torch.relu(model.expand()["2.weight"][0]))  # any other function
    assert weight.shape == (5, 7)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def first(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.a.weight * 0.5, self.a.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.b(torch.relu(self.first(inputs)))


class Named(Scaled):
    def first(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, weight=self.a.weight, bias=self.a.bias)


class Joined(Scaled):
    def first(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, torch.cat([self.a.weight, self.a.weight]))[:, :6]


class Sliced(Scaled):
    def first(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, -self.a.weight[:], self.a.bias) / (1 + (self.b.weight**2).mean())


@pytest.mark.parametrize("kind", [Scaled, Named, Joined, Sliced])
def test_lazy_weights_support_tensor_operations(kind):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        networks = [kind().double() for _ in range(2)]
    costs = random_costs(1, (6,))
    inputs = torch.tensor([[1.0, -1.0, 2.0, -2.0], [-1.0, 1.0, -2.0, 2.0]], dtype=torch.float64)
    model = model_of(networks, costs).train()
    assert model.lazy
    found = model(inputs)[0]
    torch.testing.assert_close(found, model.eval()(inputs)[0])
    found.sum().backward()
    assert bool((model.scores[0].grad != 0).any())


def test_only_the_scores_have_gradients():
    networks = [mlp(seed) for seed in range(3)]
    model = model_of(networks, random_costs(2))
    model(torch.ones(4, 4, dtype=torch.float64)).square().sum().backward()
    assert {name for name, _ in model.named_parameters()} == {"scores.0", "scores.1"}
    assert all(bool((parameter.grad != 0).any()) for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == 2 * (7**2 + 5**2)  # (M-1) Σ d²
    assert all(parameter.grad is None for network in networks for parameter in network.parameters())


@some_widths
def test_every_group_of_every_member_has_its_own_matrices(widths):
    costs = random_costs(2, widths)
    found = [matrix for each in model_of([mlp(0, widths)] * 3, costs).matrices() for matrix in each]
    alone = [sinkhorn(own[k], 100)[0] for k in range(len(widths)) for own in costs]
    for k, (matrix, expected) in enumerate(zip(found, alone, strict=True)):
        torch.testing.assert_close(matrix, expected, rtol=1e-12, atol=1e-12)
        assert not any(len(matrix) == len(other) and torch.allclose(matrix, other, rtol=0.1) for other in found[:k])


def test_a_ridge_preserves_sums_and_improves_conditioning():
    costs = [[0.01 * each for each in own] for own in random_costs(2)]  # almost uniform
    plain, ridged = (model_of([mlp(0)] * 3, costs, balance=Balance(ridge=ridge)).matrices() for ridge in (0.0, 0.5))
    starts = [nearest_permutations(torch.stack(each)) for each in zip(*costs, strict=True)]
    for own, other, permutation in zip(plain, ridged, starts, strict=True):
        torch.testing.assert_close(other, (own + 0.5 * permutation) / 1.5, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other.sum(-1), torch.ones_like(other[..., 0]))
        assert float(condition(other).max()) < 4 < 100 < float(condition(own).min())


@pytest.mark.parametrize("warm", [False, True])
def test_statistics_of_the_published_start_have_a_closed_form(warm):
    """S(I) = ((e - 1) I + 1 1ᵀ) / Z with Z = e + d - 1, whose eigenvalues are 1 and (e - 1) / Z."""
    z = torch.e + 6
    model = model_of([mlp(0, (7,)), mlp(1, (7,))], [[torch.eye(7).double()]], balance=Balance(warm=warm)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = model.figures()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    row = torch.tensor([torch.e, *[1.0] * 6], dtype=torch.float64) / z
    assert found["softness"] == pytest.approx(float(torch.special.entr(row).sum()) / math.log(7))
    assert found["condition"] == pytest.approx(z / (torch.e - 1))
    assert found["row error"] == pytest.approx(0, abs=1e-12)
    assert found["columns taken"] == 1


def test_statistics_reveal_soft_matrices():
    scores = torch.zeros(7, 7).double()
    scores[:4, 0] = 9.0
    found = model_of([mlp(0, (7,)), mlp(1, (7,))], [[scores]], balance=Balance(iterations=1)).figures()
    assert found["columns taken"] < 1
    assert found["row error"] > 0.1


@some_widths
def test_the_warm_implicit_form_is_the_same_function_in_the_limit(widths):
    networks, costs = [mlp(seed, widths) for seed in range(3)], random_costs(2, widths)
    inputs = torch.ones(4, 4, dtype=torch.float64)
    exact = model_of(networks, costs, balance=Balance(2000, 1e-14))
    warm = model_of(networks, costs, balance=Balance(30, 1e-14, "implicit", warm=True)).train()
    for _ in range(20):
        found = warm(inputs)
    expected = exact(inputs)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), list(warm.parameters())),
        torch.autograd.grad(expected.square().sum(), list(exact.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_warm_starts_are_used_in_training_only():
    costs = random_costs(2)
    model = model_of([mlp(seed) for seed in range(3)], costs, balance=Balance(1, warm=True))
    for training, done in ((True, 1), (True, 2), (True, 3), (False, 4), (False, 4), (True, 4)):
        expected = [sinkhorn(torch.stack(each), done)[0] for each in zip(*costs, strict=True)]
        torch.testing.assert_close(model.train(training).matrices(), expected, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(expected[0], sinkhorn(torch.stack([own[0] for own in costs]), 1)[0], rtol=0.01)


@pytest.mark.parametrize("rows", [1, 9])  # factor by factor, and folded
def test_random_mixing_weights_are_used_in_training_only(rows):
    networks, drawn = [mlp(seed) for seed in range(3)], [0.7, 0.1, 0.2]
    model = model_of(networks, random_costs(2))
    inputs = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    first, *others = states_of(DeepEnsemble(networks))
    matrices = zip(*model.matrices(), strict=True)
    aligned = [mix_units(state, model.groups, own) for state, own in zip(others, matrices, strict=True)]
    equal, weighted = (
        torch.func.functional_call(networks[0], mean_of([first, *aligned], weights), (inputs,))
        for weights in (None, drawn)
    )
    torch.testing.assert_close(model.train()(inputs)[0], equal)
    model.drawn = drawn
    torch.testing.assert_close(model(inputs)[0], weighted)
    torch.testing.assert_close(model.eval()(inputs)[0], equal)
    assert not torch.allclose(equal, weighted, rtol=0.01)


def test_identity_matrices_give_the_average():
    first = mlp(0)
    symmetry = symmetries(first, torch.zeros(2, 4))
    generator = torch.Generator().manual_seed(1)
    orders = {group.name: torch.randperm(group.size, generator=generator) for group in symmetry.groups}
    second = mlp(1)
    second.load_state_dict(permute(dict(first.named_parameters()), symmetry, orders))
    inputs = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(second(inputs), first(inputs))
    model = model_of([first, second], random_costs(1))
    eyes = [torch.eye(d, dtype=torch.float64).unsqueeze(0) for d in (7, 5)]
    for name, mean in DeepEnsemble([first, second]).mean_state().items():
        torch.testing.assert_close(model.average(eyes)[name], mean)
    back = [torch.eye(group.size, dtype=torch.float64)[orders[group.name]].T.unsqueeze(0) for group in symmetry.groups]
    for name, parameter in first.named_parameters():
        torch.testing.assert_close(model.average(back)[name], parameter)


def test_only_hard_permutations_preserve_the_function():
    network = mlp(0)
    model = model_of([network, network], random_costs(1))
    inputs = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    soft = [each[0] for each in model.matrices()]
    hard = [torch.eye(d, dtype=torch.float64).flip(0) for d in (7, 5)]
    state = dict(network.named_parameters())
    for matrices, same in ((hard, True), (soft, False)):
        moved = torch.func.functional_call(network, mix_units(state, model.groups, matrices), (inputs,))
        assert torch.allclose(moved, network(inputs)) == same
