"""permAVG: equal to Algorithm 1 of the thesis, right on planted permutations, and each option does what it says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.errors import EnfoldError
from enfold.fold.perm_avg import PermAVG, published
from enfold.folding import mean_state
from enfold.members import Stacked
from enfold.merging import softness
from enfold.merging.aligning import Steps, watch
from enfold.merging.lazy import Lazy
from enfold.merging.soft import Balance, SoftAverage, mixed
from enfold.merging.states import Unaligned, states_of
from enfold.networks import MLP
from enfold.symmetry import permute, symmetries
from enfold.train import CrossEntropy, Plan
from enfold.train.objective import Moment

WIDTHS = [4, 7, 5, 3]
SHORT = Plan(epochs=2, batch_size=16, optimizer="adam", learning_rate=0.1, weight_decay=0.0, select="last")


def mlp(seed: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        layers = [nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)]
        return nn.Sequential(*layers).to(dtype)


def algorithm_one(networks: list[nn.Sequential], costs: list[list[Tensor]], inputs: Tensor, tau: float) -> Tensor:
    """Algorithm 1, written out: layers, members in each, a Sinkhorn wherever a matrix occurs, and its inverse."""

    def doubly_stochastic(cost: Tensor) -> Tensor:
        matrix = torch.exp(cost / tau)
        for _ in range(100):
            matrix = matrix / matrix.sum(dim=1, keepdim=True)
            matrix = matrix / matrix.sum(dim=0, keepdim=True)
        return matrix

    hidden = inputs
    for layer in range(3):
        outputs = []
        for n, network in enumerate(networks):
            own = hidden
            if layer > 0 and n > 0:
                own = own @ torch.linalg.inv(doubly_stochastic(costs[n - 1][layer - 1])).T
            own = F.linear(own, network[2 * layer].weight, network[2 * layer].bias)
            if layer < 2 and n > 0:
                own = own @ doubly_stochastic(costs[n - 1][layer]).T
            outputs.append(own)
        mean = torch.stack(outputs).mean(dim=0)
        hidden = torch.relu(mean) if layer < 2 else mean
    return hidden


def model_of(networks: list[nn.Sequential], costs: list[list[Tensor]], **settings: object) -> SoftAverage:
    """The soft average of networks, all but the first with these costs."""
    members = Stacked(networks)
    groups = symmetries(networks[0], torch.zeros(2, 4)).groups
    assert [group.size for group in groups] == [7, 5]
    scores = [torch.stack([own[k] for own in costs]) for k in range(2)]
    none = [each[:0] for each in scores]
    weights = [1 / len(networks)] * len(networks)
    return SoftAverage(members, states_of(members), weights, groups, scores, none, **settings)


def random_costs(count: int, seed: int = 0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.eye(d) + torch.randn(d, d, generator=generator, dtype=torch.float64) for d in (7, 5)]
        for _ in range(count)
    ]


def planted(order: list[int]) -> tuple[Stacked, Data]:
    """A network, and the same with its hidden units in another order and a little noise; labels are the network's."""
    generator = torch.Generator().manual_seed(1)

    def network() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 3))

    first, second = network(), network()
    with torch.no_grad():
        for parameter, scale in zip(first.parameters(), (1.5, 0.5, 1.5, 0.0), strict=True):
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    inputs = torch.randn(256, 6, generator=generator)
    part = Split(inputs, first(inputs).argmax(1))
    symmetry = symmetries(first, inputs[:2])
    state = permute(dict(first.named_parameters()), symmetry, {symmetry.groups[0].name: torch.tensor(order)})
    noisy = {name: t.detach() + 0.01 * torch.randn(t.shape, generator=generator) for name, t in state.items()}
    second.load_state_dict(noisy)
    return Stacked([first, second]), Data(part, part, part, 3, (6,))


@pytest.mark.parametrize("tau", [1.0, 0.5])
@pytest.mark.parametrize("rows", [1, 9])  # with few rows weights are used factor by factor, with many they are folded
def test_it_equals_algorithm_one(tau, rows):
    networks, costs = [mlp(seed) for seed in range(3)], random_costs(2)
    inputs = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    labels = torch.arange(rows) % 3
    for cost in (each for own in costs for each in own):
        cost.requires_grad_()
    expected = algorithm_one(networks, costs, inputs, tau)
    F.cross_entropy(expected, labels).backward()
    model = model_of(networks, [[each.detach() for each in own] for own in costs], temperature=tau)
    found = model(inputs)[0]
    F.cross_entropy(found, labels).backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for k, scores in enumerate(model.scores):
        gradients = torch.stack([own[k].grad for own in costs])
        torch.testing.assert_close(scores.grad, gradients, rtol=1e-8, atol=1e-10)


def test_weights_are_used_factor_by_factor_where_rows_are_few(monkeypatch):
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


def test_gradients_reach_the_costs_alone_and_there_are_as_many_as_published():
    networks = [mlp(seed) for seed in range(3)]
    model = model_of(networks, random_costs(2))
    model(torch.ones(4, 4, dtype=torch.float64)).square().sum().backward()
    assert {name for name, _ in model.named_parameters()} == {"scores.0", "scores.1"}
    assert all(bool((parameter.grad != 0).any()) for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == 2 * (7**2 + 5**2)  # (M-1) Σ d²
    assert all(parameter.grad is None for network in networks for parameter in network.parameters())


def test_the_warm_implicit_form_is_the_same_function_in_the_limit():
    networks, costs = [mlp(seed) for seed in range(3)], random_costs(2)
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


def test_identity_matrices_give_the_plain_average_and_a_hard_permutation_undoes_itself():
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
    for name, mean in mean_state(Stacked([first, second])).items():
        torch.testing.assert_close(model.average(eyes)[name], mean)
    back = [torch.eye(group.size, dtype=torch.float64)[orders[group.name]].T.unsqueeze(0) for group in symmetry.groups]
    for name, parameter in first.named_parameters():
        torch.testing.assert_close(model.average(back)[name], parameter)


def test_hard_permutations_leave_a_network_as_it_is_and_soft_ones_do_not():
    network = mlp(0)
    model = model_of([network, network], random_costs(1))
    inputs = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    soft = [each[0] for each in model.matrices()]
    hard = [torch.eye(d, dtype=torch.float64).flip(0) for d in (7, 5)]
    state = dict(network.named_parameters())
    for matrices, same in ((hard, True), (soft, False)):
        moved = torch.func.functional_call(network, mixed(state, model.groups, matrices), (inputs,))
        assert torch.allclose(moved, network(inputs)) == same


LONGER = published().replace(epochs=40, batch_size=256, schedule="constant", select="last")


def accuracy(logits: Tensor, data: Data) -> float:
    return float((logits.argmax(-1) == data.test.labels).float().mean())


@pytest.mark.parametrize("order", [[1, 0, 2], [1, 2, 0]], ids=["odd", "even"])
def test_a_planted_permutation_is_found_from_a_matching_and_kept_by_learning(order):
    members, data = planted(order)
    model = PermAVG(plan=LONGER, iterations=20, matched=10.0).learned(members, data)
    assert model.all_matrices()[0][0].argmax(1).tolist() == torch.tensor(order).argsort().tolist()
    assert float(softness(model.all_matrices()[0]).max()) < 0.5
    naive = members.network(mean_state(members))
    assert accuracy(model(data.test.inputs)[0], data) > max(0.95, accuracy(naive(data.test.inputs), data))


@pytest.mark.parametrize("settings", [{}, {"gradient": "implicit", "warm": True}], ids=str)
def test_learning_from_the_identity_beats_its_start_and_the_plain_average(settings):
    members, data = planted([1, 2, 0])
    fold = PermAVG(plan=LONGER, iterations=20, **settings)
    start = dataclasses.replace(fold, plan=LONGER.replace(epochs=0))
    naive = members.network(mean_state(members))(data.test.inputs)
    losses = [
        float(F.cross_entropy(logits, data.test.labels).detach())
        for logits in (fold(members, data)(data.test.inputs), start(members, data)(data.test.inputs), naive)
    ]
    assert losses[0] < 0.9 * min(losses[1:])


def test_the_determinant_keeps_its_sign_so_odd_permutations_are_out_of_reach_from_the_identity():
    members, data = planted([1, 0, 2])
    (matrices,) = PermAVG(plan=LONGER, iterations=20).learned(members, data).all_matrices()
    assert float(torch.linalg.det(matrices[0])) > 0


def test_the_published_settings_are_the_defaults():
    fold = PermAVG()
    assert (fold.temperature, fold.iterations, fold.matched, fold.gradient) == (1.0, 100, None, "unrolled")
    plan = published()
    assert (plan.epochs, plan.optimizer, plan.learning_rate, plan.schedule) == (20, "adam", 0.1, "cosine")
    assert fold.plan == plan


def test_one_member_or_many_equal_ones_are_returned_as_they_are(members, data):
    expected = members.member(1).state_dict()
    for given in (members[[1]], Stacked([members.member(1)] * 3)):
        found = PermAVG()(given, data).state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_two_members_are_the_same_in_order_and_jointly(members, data):
    one, other = (PermAVG(order=order, plan=SHORT)(members[:2], data) for order in ("sequential", "joint"))
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name])


def test_members_are_added_one_after_the_other_and_settled_ones_stay(members, data):
    short, longer = (PermAVG(plan=SHORT).learned(members[:count], data) for count in (2, 3))
    for first, both in zip(short.all_matrices(), longer.all_matrices(), strict=True):
        assert both.shape[0] == 2
        torch.testing.assert_close(both[:1], first)
    assert longer.get_buffer("weights").tolist() == [1 / 3] * 3
    universe = PermAVG(plan=SHORT, universe=True).learned(members[:3], data)
    assert [len(each) for each in universe.all_matrices()] == [3]
    joint = PermAVG(plan=SHORT, order="joint").learned(members, data)
    assert joint.learned == 3


def test_it_resumes_in_a_later_stage_to_the_same_bits(members, data, tmp_path, monkeypatch):
    fold = PermAVG(plan=SHORT, gain=True, final_temperature=0.5, mixing="dirichlet")
    expected = fold(members, data)
    file = tmp_path / "fold.safetensors"
    true, calls = Steps.for_batch, iter(range(1000))

    def stopped(*args):
        if next(calls) == 16:  # 3 batches an epoch, 2 epochs a stage: in the last epoch of the last stage
            raise KeyboardInterrupt
        return true(*args)

    monkeypatch.setattr(Steps, "for_batch", stopped)
    with pytest.raises(KeyboardInterrupt):
        fold(members, data, checkpoint=file)
    monkeypatch.setattr(Steps, "for_batch", true)
    assert file.exists()
    found = fold(members, data, checkpoint=file)
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in expected.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["fold.safetensors"]
    with pytest.raises(EnfoldError, match="another plan, model or"):
        dataclasses.replace(fold, temperature=0.9)(members, data, checkpoint=file)


def test_temperature_and_weights_follow_the_training(members, data):
    model = PermAVG(plan=SHORT).learned(members[:3], data).train()
    steps = Steps(CrossEntropy(), "", 3, (1.0, 0.1), "dirichlet")
    drawn = []
    for progress in (0.0, 0.5, 1.0):
        steps.for_batch(model, None, Moment(int(10 * progress), progress))
        assert float(model.get_buffer("temperature")) == pytest.approx(0.1**progress)
        drawn.append(model.drawn)
    assert all(sum(weights) == pytest.approx(1.0) and min(weights) > 0 for weights in drawn)
    assert drawn[0] != drawn[1]
    inputs = data.test.inputs
    training = model(inputs)
    assert not torch.allclose(model.eval()(inputs), training)  # in eval mode members count alike


def test_a_projection_averages_permuted_members(members, data):
    members = members[:2]
    network = PermAVG(plan=SHORT, project=True, reestimate_batch_norm=False)(members, data)
    if not isinstance(dict(members.member(0).named_modules()).get("norm"), nn.BatchNorm1d):
        first, second = (member.inner.weight.detach() for member in members.networks())
        permuted = 2 * network.inner.weight.detach() - first
        distances = torch.cdist(permuted, second)
        assert float(distances.min(1).values.max()) < 1e-5
        assert sorted(distances.argmin(1).tolist()) == list(range(6))
    assert network(data.test.inputs).shape == (30, 3)


def test_gains_are_learned_and_scale_what_is_produced(members, data):
    model = PermAVG(plan=SHORT, gain=True).learned(members[:2], data)
    assert float((model.gains[0].detach() - 1).abs().max()) > 0.01
    with torch.no_grad():
        model.gains[0].fill_(2.0)
        doubled = model.average(model.matrices())
        model.gains[0].fill_(1.0)
        plain = model.average(model.matrices())
    torch.testing.assert_close(doubled["inner.weight"], 2 * plain["inner.weight"])
    torch.testing.assert_close(doubled["head.weight"], plain["head.weight"])


def test_it_learns_from_the_ensemble(members, data, tmp_path):
    alone, taught = (PermAVG(plan=SHORT, alpha=a)(members, data, answers=tmp_path) for a in (0.0, 1.0))
    assert not torch.equal(alone(data.test.inputs), taught(data.test.inputs))
    assert list(tmp_path.glob("*.safetensors"))  # what the members said was kept


def test_bad_settings_are_refused_before_anything():
    for settings, message in (
        ({"temperature": 0.0}, "temperatures must be above 0, got 0.0"),
        ({"final_temperature": -1.0}, "temperatures must be above 0, got -1.0"),
        ({"matched": 0.0}, "matched must be above 0"),
        ({"iterations": 0}, "iterations must be 1 or more"),
        ({"alpha": 2.0}, r"alpha must be in \[0, 1\], got 2.0"),
        ({"order": "random"}, "the order must be one of sequential, joint, got 'random'"),
        ({"mixing": "some"}, "the mixing must be one of equal, dirichlet"),
        ({"gradient": "none"}, "the gradient must be one of unrolled, implicit"),
    ):
        with pytest.raises(EnfoldError, match=message):
            PermAVG(**settings)


def test_members_of_different_shapes_are_refused(data):
    with pytest.raises(EnfoldError, match="all members must be of one architecture"):
        PermAVG()(Stacked([MLP(4, [6], 3), MLP(4, [7], 3)]), data)


def test_a_singular_matrix_says_what_to_change(members, data):
    with pytest.raises(EnfoldError, match=r"must be invertible.*lower the temperature, start from a matching"):
        PermAVG(temperature=1e9, plan=SHORT)(members[:2], data)


def test_matrices_near_to_singular_ones_are_watched(members, data):
    model = PermAVG(plan=SHORT).learned(members[:2], data)
    with torch.no_grad():
        for scores in model.scores:
            scores.mul_(1e-6)
    with pytest.warns(UserWarning, match=r"condition number of .*lower the temperature"):
        watch(model)


class Deciding(nn.Module):
    """A network whose graph depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.inner(inputs))
        return self.head(hidden if float(hidden.sum()) > 0 else -hidden)


def test_a_network_that_cannot_be_followed_is_averaged_and_the_user_is_told(data):
    members = Stacked.make(Deciding, 2)
    with pytest.warns(Unaligned, match="no unit is aligned, and all are averaged as they are, because the graph"):
        network = PermAVG(plan=SHORT)(members, data)
    for name, mean in mean_state(members).items():
        torch.testing.assert_close(network.state_dict()[name], mean)


def test_half_precision_is_refused_with_what_to_do(data):
    with pytest.raises(
        EnfoldError, match=r"takes members in float32 or float64, got torch.bfloat16: use members.float"
    ):
        PermAVG(plan=SHORT)(Stacked([MLP(4, [6], 3).bfloat16() for _ in range(2)]), data)
