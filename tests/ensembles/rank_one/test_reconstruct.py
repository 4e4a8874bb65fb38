"""The nearest BatchEnsemble: exact where there is one, never farther after a sweep, stationary at the end."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import enfold
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.common.layer_shapes import layer_shape
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.rank_one import fit_batch_ensemble, representable
from enfold.ensembles.rank_one.alternating import Factors, _normalize, _sweep, _update
from enfold.ensembles.rank_one.blocks import from_blocks, to_blocks
from enfold.errors import EnfoldError
from enfold.networks import MLP, MediumCNN, ViT

LAYERS = {
    "linear": lambda: nn.Linear(5, 4),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "depthwise": lambda: nn.Conv1d(4, 8, 3, groups=4),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 2),
    "grouped transposed": lambda: nn.ConvTranspose1d(4, 6, 3, groups=2),
    "embedding": lambda: nn.Embedding(7, 5),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_blocks_have_the_layout_of_the_factors(kind):
    layer = LAYERS[kind]()
    shape = layer_shape(layer)
    blocks = to_blocks(layer.weight, shape)
    torch.testing.assert_close(from_blocks(blocks, shape, layer.weight.shape), layer.weight.detach().double())
    members = BatchEnsemble(layer, 2)
    fast = members.fast.state()
    s = fast["s"][0, 1].view(shape.groups, -1, 1, 1).double()
    r = fast["r"][0, 1].view(shape.groups, 1, -1, 1).double() if shape.inputs else 1
    torch.testing.assert_close(to_blocks(members.expand()["weight"], shape)[1], (blocks * s * r).detach())


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("init", ["gaussian", "signs"])
def test_a_batch_ensemble_is_recovered(kind, init):
    torch.manual_seed(0)
    members = BatchEnsemble(LAYERS[kind](), 3, init=init)
    found = fit_batch_ensemble(members)
    assert found.residuals[""][-1] < 1e-8
    torch.testing.assert_close(dict(found.ensemble.expand()), dict(members.expand()), rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(2, 8), columns=st.integers(2, 8), M=st.integers(1, 4))
def test_where_theorem_1_holds_recovery_is_exact(seed, rows, columns, M):
    source = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(columns, rows, dtype=torch.float64) for _ in range(M)]
    weight = torch.randn(rows, columns, generator=source, dtype=torch.float64)
    with torch.no_grad():
        for layer in layers:
            s, r = (torch.randn(size, generator=source, dtype=torch.float64) for size in (rows, columns))
            layer.weight.copy_(weight * torch.outer(s, r))
    members = DeepEnsemble(layers)
    assert representable(members)
    found = fit_batch_ensemble(members, start="svd")
    assert found.residuals[""][-1] < 1e-8


@pytest.mark.combinations
@pytest.mark.parametrize("start", ["mean", "svd", "best"])
@pytest.mark.parametrize("rank", [1, 2])
def test_no_sweep_increases_the_residual(start, rank):
    torch.manual_seed(0)
    members = DeepEnsemble(MediumCNN((3, 8, 8), 4, channels=(4, 6)), 3)
    found = fit_batch_ensemble(members, rank=rank, sweeps=40, start=start)
    for name, residuals in found.residuals.items():
        assert found.sweeps[name] == len(residuals) - 1 > 5
        assert all(after <= before for before, after in pairwise(residuals))
        assert 0 < residuals[-1] < 1
    again = fit_batch_ensemble(members, rank=rank, sweeps=40, start=start)
    assert again.residuals == found.residuals


def test_the_residual_is_that_of_the_members_returned():
    torch.manual_seed(0)
    members = DeepEnsemble(MLP(6, [5], 3), 3)
    found = fit_batch_ensemble(members, sweeps=30)
    for name, residuals in found.residuals.items():
        target, reached = (model.expand()[f"{name}.weight"].detach() for model in (members, found.ensemble))
        relative = (target - reached).square().sum() / target.square().sum()
        assert float(relative) == pytest.approx(residuals[-1], rel=1e-4)


def test_the_end_is_a_stationary_point():
    torch.manual_seed(0)
    networks = BatchEnsemble(nn.Linear(5, 4), 3, spread=0.2).double().networks()
    with torch.no_grad():
        for network in networks:
            network.weight.add_(0.02 * torch.randn_like(network.weight))
    members = DeepEnsemble(networks)
    found = fit_batch_ensemble(members, tolerance=1e-9).ensemble.double()
    target = members.expand()["weight"].detach()
    distance = (found.expand()["weight"] - target).square().sum()
    distance.backward()
    assert 1e-4 < float(distance.detach()) < 0.02
    for parameter in (found.shared.get_parameter("weight"), *found.fast.parameters()):
        assert float(parameter.grad.abs().max()) < 1e-5


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), rank=st.integers(1, 3), groups=st.integers(1, 2), taps=st.integers(1, 3))
def test_each_update_is_the_least_squares_solution(seed, rank, groups, taps):
    source = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=source, dtype=torch.float64)

    weight, target = draw(groups, 5, 4, taps), draw(2, groups, 5, 4, taps)
    r, s = draw(rank, 2, groups, 4), draw(rank, 2, groups, 5)
    solved = _update(r, s, (weight * target).sum(-1), weight.square().sum(-1)).requires_grad_()
    (Factors(weight, solved, s).scales() * weight - target).square().sum().backward()
    assert float(solved.grad.abs().max()) < 1e-6
    after = _sweep(target, Factors(weight, r, s), with_r=True)
    last = after.weight.requires_grad_()
    (after.scales() * last - target).square().sum().backward()
    assert float(last.grad.abs().max()) < 1e-6
    before = Factors(weight, r, s)
    moved = _normalize(before, with_r=True)
    torch.testing.assert_close(moved.scales() * moved.weight, before.scales() * before.weight)
    torch.testing.assert_close(moved.s.abs().amax(-1), torch.ones(rank, 2, groups, dtype=torch.float64))


def test_higher_ranks_reduce_the_residual():
    torch.manual_seed(0)
    members = DeepEnsemble(nn.Linear(8, 6), 4)
    one, two = (fit_batch_ensemble(members, rank=rank, sweeps=100).residuals[""][-1] for rank in (1, 2))
    assert two < one
    planted = BatchEnsemble(nn.Linear(12, 16), 3, rank=2)
    assert fit_batch_ensemble(planted, rank=2, sweeps=300).residuals[""][-1] < 1e-8
    assert fit_batch_ensemble(planted, sweeps=300).residuals[""][-1] > 1e-4


@pytest.mark.parametrize("rank", [1, 2])
def test_one_member_is_itself(rank):
    network = MLP(5, [4], 3)
    found = fit_batch_ensemble(DeepEnsemble([network]), rank=rank, start="mean")
    torch.testing.assert_close(
        {name: tensor[0].detach() for name, tensor in found.ensemble.expand().items()}, dict(network.state_dict())
    )
    assert found.residuals["head"] == (0.0,)
    if rank == 1:
        assert all((tensor == 1).all() for tensor in found.ensemble.fast.state().values())


def test_the_gauge_is_fixed():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(6, 3))
    fast = fit_batch_ensemble(DeepEnsemble(network, 3), sweeps=5).ensemble.fast.state()
    torch.testing.assert_close(fast["0.s"][0].view(3, 2, 3).abs().amax(-1), torch.ones(3, 2))
    torch.testing.assert_close(fast["2.s"][0].abs().amax(-1), torch.ones(3))


def test_dead_and_zero_weights_are_supported():
    torch.manual_seed(0)
    networks = [nn.Linear(4, 3, bias=False) for _ in range(3)]
    with torch.no_grad():
        networks[0].weight[1] = 0
        for network in networks:
            network.weight[0, 0] = 0
            network.weight[:, 3] = 0
    found = fit_batch_ensemble(DeepEnsemble(networks), sweeps=200)
    assert all(tensor.isfinite().all() for tensor in found.ensemble.state_dict().values())
    weight = found.ensemble.expand()["weight"]
    assert float(weight[0, 1].detach().abs().max()) < 1e-5
    assert float(weight[:, :, 3].detach().abs().max()) == 0
    nothing = [nn.Linear(2, 2) for _ in range(2)]
    for network in nothing:
        nn.init.zeros_(network.weight)
    assert fit_batch_ensemble(DeepEnsemble(nothing)).residuals[""] == (0.0,)


def normed() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    network[1].running_mean.normal_()
    network[1].running_var.uniform_(0.5, 2)
    nn.init.normal_(network[1].weight)
    network[1].num_batches_tracked.fill_(7)
    return network


def test_biases_and_norms_are_copied_or_averaged():
    torch.manual_seed(0)
    members = DeepEnsemble([normed() for _ in range(3)])
    state = members.expand()
    own = fit_batch_ensemble(members, batch_norm="own", sweeps=2).ensemble.expand()
    for name, tensor in state.items():
        if not name.endswith("weight") or name == "1.weight":
            torch.testing.assert_close(own[name], tensor, rtol=0, atol=0)
    shared = fit_batch_ensemble(members, bias="shared_post", batch_norm="joint", sweeps=2).ensemble.shared.state()
    for name in ("0.bias", "1.weight", "1.bias", "1.running_mean"):
        torch.testing.assert_close(shared[name], state[name].mean(0))
    # Samples of all members together have this variance.
    between = (state["1.running_mean"] - state["1.running_mean"].mean(0)).square().mean(0)
    torch.testing.assert_close(shared["1.running_var"], state["1.running_var"].mean(0) + between)
    assert shared["1.num_batches_tracked"] == 7
    affine = fit_batch_ensemble(members, batch_norm="shared", sweeps=2).ensemble.expand()
    torch.testing.assert_close(affine["1.running_var"], state["1.running_var"], rtol=0, atol=0)
    torch.testing.assert_close(affine["1.weight"][2], state["1.weight"].mean(0))


def test_biases_scaled_with_the_output_are_fitted_to_the_s_found():
    torch.manual_seed(0)
    members = DeepEnsemble([nn.Linear(4, 3) for _ in range(3)])
    model = fit_batch_ensemble(members, bias="shared_pre", sweeps=5).ensemble
    (model.expand()["bias"] - members.expand()["bias"].detach()).square().sum().backward()
    assert float(model.shared.get_parameter("bias").grad.abs().max()) < 1e-5


def test_other_parameters_and_excluded_layers_are_averaged():
    torch.manual_seed(0)
    members = DeepEnsemble(ViT((3, 8, 8), 4, width=8, depth=1, heads=2), 2)
    nn.init.normal_(members.get_parameter("tree.positions"))
    found = fit_batch_ensemble(members, exclude=("head",), sweeps=2)
    state, reached = members.expand(), found.ensemble.expand()
    for name in ("positions", "head.weight"):
        torch.testing.assert_close(reached[name][1], state[name].mean(0))
    assert "head" not in found.residuals


def test_members_are_not_modified_and_the_result_can_be_saved(tmp_path):
    torch.manual_seed(0)
    members = DeepEnsemble(MLP(6, [5], 3), 3)
    before = {name: tensor.clone() for name, tensor in members.state_dict().items()}
    found = fit_batch_ensemble(members, sweeps=3)
    torch.testing.assert_close(dict(members.state_dict()), before, rtol=0, atol=0)
    enfold.save(found.ensemble, tmp_path / "members.safetensors")
    loaded = enfold.load(tmp_path / "members.safetensors", MLP(6, [5], 3))
    inputs = torch.randn(4, 6)
    torch.testing.assert_close(loaded(inputs), found.ensemble(inputs), rtol=0, atol=0)
    assert representable(found.ensemble)
    assert str(found).splitlines()[0].split() == ["layer", "start", "residual", "sweeps"]
    assert str(found).splitlines()[-1].startswith("head")


def test_invalid_inputs_are_refused():
    members = DeepEnsemble([nn.Linear(3, 2), nn.Linear(3, 2)])
    with pytest.raises(EnfoldError, match=r"num_members .* 2, got num_members=4"):
        fit_batch_ensemble(members, num_members=4)
    with pytest.raises(EnfoldError, match=r"sweeps .*got 0"):
        fit_batch_ensemble(members, sweeps=0)
    with pytest.raises(EnfoldError, match=r"tolerance must be in \[0, 1\), got 1"):
        fit_batch_ensemble(members, tolerance=1)
    with pytest.raises(EnfoldError, match=r"start .*got 'random'"):
        fit_batch_ensemble(members, start="random")
    with torch.no_grad():
        members.expand()["weight"][1, 0, 0] = torch.nan
    with pytest.raises(EnfoldError, match="'weight' of member 1 is not"):
        fit_batch_ensemble(members)
