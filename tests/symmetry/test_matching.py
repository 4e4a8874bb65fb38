"""Weight matching: planted orders are recovered, the objective never falls, functions stay as they are."""

from itertools import permutations

import pytest
import torch
from known_networks import KNOWN, made, shared_keys, symmetry_of
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge import align, c2m3, weight_matching
from enfold.networks import MLP, ResNet
from enfold.symmetry import Group, Symmetry, match_weights, permute, symmetries
from planted import assert_back, pixels

PLAIN = [
    "mlp",
    "cnn",
    "residual",
    "projected residual",
    "dense",
    "resnet",
    "padded resnet",
    "squeezed",
    "text",
    "low rank",
]
NESTED = [
    "vit",
    "vit with a class token",
    "attention",
    "encoder",
    "packed attention",
    "relative",
    "rotary",
    "separable",
    "grouped residual",
    "group norm",
    "grouped queries",
    "interleaved keys",
    "expanded keys",
    "one head of keys",
    "experts",
    "experts by einsum",
    "experts last",
    "experts of blocks",
]


def shuffled(state: dict[str, Tensor], symmetry: Symmetry, seed: int = 0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return permute(state, symmetry, {g.name: torch.randperm(g.size, generator=source) for g in symmetry.groups})


def agreement(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name] * other[name]).detach().sum()) for name in one if "running" not in name)


@pytest.mark.parametrize("seed", range(5))
def test_one_hidden_layer_is_always_recovered(seed):
    torch.manual_seed(seed)
    network = MLP(6, [20], 4)
    symmetry, state = symmetries(network, torch.zeros(2, 6)), dict(network.state_dict())
    other = shuffled(state, symmetry, seed)
    found = permute(other, symmetry, match_weights(state, other, symmetry, seed=seed, rounds=1))  # one is enough
    torch.testing.assert_close(found, state, rtol=0, atol=0)


@pytest.mark.combinations
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*PLAIN, *NESTED])
def test_planted_orders_are_recovered(name, seed):
    network, _ = made(name)
    symmetry, state = symmetry_of(name), dict(network.state_dict())
    other = shuffled(state, symmetry, seed)
    found = permute(other, symmetry, match_weights(state, other, symmetry))
    torch.testing.assert_close(found, state, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("widths", [[6] * 4, [8] * 10])
def test_planted_orders_of_deep_narrow_networks_are_recovered(widths, seed):
    torch.manual_seed(seed)
    network = MLP(4, widths, 3)
    symmetry, state = symmetries(network, torch.zeros(2, 4)), dict(network.state_dict())
    other = shuffled(state, symmetry, seed)
    found = permute(other, symmetry, match_weights(state, other, symmetry, seed=seed))
    torch.testing.assert_close(found, state, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(5))
def test_matched_states_are_unchanged(seed):
    """The first layer says nothing of its units: placed by it, they are in an order of chance."""
    torch.manual_seed(seed)
    network = MLP(4, [6, 6, 6], 3)
    symmetry, state = symmetries(network, torch.zeros(2, 4)), dict(network.state_dict())
    state["hidden.0.weight"], state["hidden.0.bias"] = torch.randn(4).expand(6, 4), torch.ones(6)
    other = {name: tensor + 1e-3 * torch.randn_like(tensor) for name, tensor in state.items()}
    for order in match_weights(state, other, symmetry, seed=seed).values():
        assert torch.equal(order, torch.arange(6))


class Waves(nn.Module):
    """Complex weights with large imaginary parts only; absolute values are passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(6, 4) * 1j + 1e-3 * torch.randn(6, 4))
        self.head = nn.Parameter(torch.randn(3, 6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x.to(self.inner.dtype) @ self.inner.T).abs()
        return (hidden.to(self.head.dtype) @ self.head.T).real


@pytest.mark.parametrize("fold", [weight_matching, c2m3])
def test_complex_weights_are_matched_by_both_their_parts(fold):
    torch.manual_seed(0)
    network, inputs = Waves(), torch.randn(2, 4)
    symmetry, state = symmetries(network, inputs), dict(network.state_dict())
    assert [group.size for group in symmetry.groups] == [6]
    other = shuffled(state, symmetry, 1)
    found = permute(other, symmetry, match_weights(state, other, symmetry))
    torch.testing.assert_close(found, state, rtol=0, atol=0)
    members = DeepEnsemble([network, DeepEnsemble([network]).network(other)])
    assert_back(fold(members, pixels((4,))), network, pixels((4,)))


@pytest.mark.parametrize("seed", range(6))
def test_heads_with_common_keys_are_recovered_under_noise(seed):
    """Queries are most of the weights, and compared at random while their heads are in other orders."""
    torch.manual_seed(seed)
    network = shared_keys("flag", 1, share=16, units=16, width=32)
    symmetry, state = symmetries(network, torch.zeros(2, 3, 4)), dict(network.state_dict())
    other = shuffled(state, symmetry, seed)
    source = torch.Generator().manual_seed(seed)
    noisy = {name: t + t.std() * torch.randn(t.shape, generator=source) for name, t in other.items()}
    found = permute(other, symmetry, match_weights(state, noisy, symmetry))
    torch.testing.assert_close(found, state, rtol=0, atol=0)


def test_one_hidden_layer_is_matched_optimally():
    torch.manual_seed(0)
    one, other = (dict(MLP(3, [4], 2).state_dict()) for _ in range(2))
    symmetry = symmetries(MLP(3, [4], 2), torch.zeros(2, 3))
    every = [permute(other, symmetry, {"hidden.0": torch.tensor(order)}) for order in permutations(range(4))]
    best = max(agreement(one, state) for state in every)
    found = permute(other, symmetry, match_weights(one, other, symmetry))
    assert agreement(one, found) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "bare linear"])
def test_matching_never_lowers_the_objective_and_never_changes_the_function(name):
    network, inputs = made(name)
    symmetry, state = symmetry_of(name), dict(network.state_dict())
    source = torch.Generator().manual_seed(1)
    goal = {n: torch.randn(t.shape, generator=source) if t.is_floating_point() else t for n, t in state.items()}
    before = agreement(goal, state)
    for rounds in (1, 2, 100):
        found = permute(state, symmetry, match_weights(goal, state, symmetry, rounds=rounds))
        after = agreement(goal, found)
        assert after >= before - 1e-4
        before = after
    torch.testing.assert_close(functional_call(network, found, inputs), network(inputs), rtol=1e-3, atol=1e-4)
    assert before > agreement(goal, state)


def test_matched_members_compute_the_same_function():
    torch.manual_seed(0)
    networks = [ResNet(depth=8, width=4).eval() for _ in range(3)]
    members, inputs = DeepEnsemble(networks), torch.randn(4, 3, 8, 8)
    before = {name: tensor.clone() for name, tensor in members.state_dict().items()}
    matched = align(members, example=inputs)
    torch.testing.assert_close(matched(inputs), members(inputs), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dict(members.state_dict()), before, rtol=0, atol=0)
    for index in (1, 2):
        ours, theirs = ({n: t[index] for n, t in held.expand().items()} for held in (matched, members))
        first = {name: tensor[0] for name, tensor in members.expand().items()}
        assert agreement(first, ours) > agreement(first, theirs)
    torch.testing.assert_close(dict(matched.member(0).state_dict()), dict(networks[0].state_dict()), rtol=0, atol=0)


def test_states_that_cannot_be_matched_are_refused():
    network = MLP(3, [4], 2)
    symmetry, state = symmetries(network, torch.zeros(2, 3)), dict(network.state_dict())
    with pytest.raises(EnfoldError, match=r"'head.weight' is missing"):
        match_weights(state, {name: t for name, t in state.items() if name != "head.weight"}, symmetry)
    with pytest.raises(EnfoldError, match=r"'hidden.0.bias' is not"):
        match_weights(state, state | {"hidden.0.bias": torch.full((4,), torch.nan)}, symmetry)


def test_networks_of_other_shapes_are_refused():
    one, other = MLP(3, [4], 2), MLP(3, [5], 2)
    with pytest.raises(EnfoldError, match=r"'hidden.0.weight' is \(4, 3\) in one and \(5, 3\) in the other"):
        match_weights(one.state_dict(), other.state_dict(), symmetries(one, torch.zeros(2, 3)))


def best_gain(goal: dict[str, Tensor], found: dict[str, Tensor], group: Group) -> float:
    """What the best order of one group would add, if no tensor has it on two axes; in float64."""
    axes = [axis for axis in group.axes if "running" not in axis.name and not axis.tied_to]
    products = sum(axis.by_unit(goal[axis.name]).double() @ axis.by_unit(found[axis.name]).double().mT for axis in axes)
    rows, columns = linear_sum_assignment(products.numpy(), maximize=True)
    return float(products[rows, columns].sum() - products.trace())


@pytest.mark.parametrize("name", ["cnn", "dense", "resnet", "vit", "packed attention", "rotary", "tied readout"])
@pytest.mark.parametrize(
    "kinds",
    [(torch.float32, torch.float32), (torch.float32, torch.float64), (torch.float16, torch.bfloat16)],
    ids=str,
)
def test_no_single_group_can_be_improved_at_the_end(name, kinds):
    symmetry, state = symmetry_of(name), dict(made(name)[0].state_dict())
    source = torch.Generator().manual_seed(2)
    goal, other = (
        {n: torch.randn(t.shape, generator=source).to(kind) if t.is_floating_point() else t for n, t in state.items()}
        for kind in kinds
    )
    found = permute(other, symmetry, match_weights(goal, other, symmetry))
    assert {tensor.dtype for tensor in found.values()} == {tensor.dtype for tensor in other.values()}
    for group in symmetry.groups:
        assert best_gain(goal, found, group) <= 1e-4


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_weights_whose_products_leave_the_range_of_float32_are_matched(scale):
    network, _ = made("mlp")
    symmetry = symmetry_of("mlp")
    state = {name: scale * tensor for name, tensor in network.state_dict().items()}
    other = shuffled(state, symmetry)
    torch.testing.assert_close(permute(other, symmetry, match_weights(state, other, symmetry)), state, rtol=0, atol=0)


def test_products_that_nearly_cancel_out_do_not_lower_the_objective():
    """The large parts of all products cancel out; what float32 leaves of the small ones is noise."""
    symmetry = symmetries(MLP(800, [6], 2), torch.zeros(2, 800))
    for seed in range(8):
        source = torch.Generator().manual_seed(seed)
        one, other = (dict(MLP(800, [6], 2).state_dict()) for _ in range(2))
        large = 1e3 * torch.rand(6, 400, generator=source)
        noise = 1e-3 * torch.randn(2, 6, 800, generator=source)
        one["hidden.0.weight"] = torch.cat([large, large], 1) + noise[0]
        other["hidden.0.weight"] = torch.cat([large, -large], 1) + noise[1]
        found = permute(other, symmetry, match_weights(one, other, symmetry))
        wide = [{name: tensor.double() for name, tensor in each.items()} for each in (one, other, found)]
        assert agreement(wide[0], wide[2]) >= agreement(wide[0], wide[1])


class Multiplications(TorchDispatchMode):
    """How many there are in products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.addmm_, torch.ops.aten.addmm, torch.ops.aten.mm):
            left, right = args[-2:]
            self.count += left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_products_of_weights_are_updated_incrementally():
    torch.manual_seed(0)
    one, other = ResNet(depth=20, width=16).eval(), ResNet(depth=20, width=16).eval()
    symmetry = symmetries(one, torch.zeros(2, 3, 8, 8))
    weights = {name: tensor.detach() for name, tensor in one.named_parameters()}
    axes = [axis for group in symmetry.groups for axis in group.axes if axis.name in weights]
    once = sum(axis.size * weights[axis.name].numel() for axis in axes)
    with Multiplications() as spent:
        match_weights(one.state_dict(), other.state_dict(), symmetry, learned=set(weights))
    assert spent.count < 1.8 * once  # 3 times, if products were computed again after every move
