"""BatchEnsemble: equations against explicit layers, numbers of parameters, and parameter groups of the optimizer."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from enfold.cost import parameters
from enfold.data import Data, Split
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.multi_head import MultiHead
from enfold.errors import EnfoldError, PartialCoverageWarning
from enfold.networks import MLP, ResNet, WideResNet
from enfold.train import TrainConfig, fit
from fitting import any_network


def factors(members, layer=""):
    fast = members.fast.state()
    prefix = f"{layer}." if layer else ""
    return fast[f"{prefix}r"][0], fast[f"{prefix}s"][0]


def test_a_linear_layer_is_equation_2():
    layer = nn.Linear(5, 3)
    members = BatchEnsemble(layer, 4)
    inputs = torch.randn(7, 5)
    r, s = factors(members)
    expected = [s[m] * F.linear(r[m] * inputs, layer.weight) + layer.bias for m in range(4)]
    torch.testing.assert_close(members(inputs), torch.stack(expected))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 6, 3, stride=2, padding=1), (4, 9)),
        (nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 6, 6)),
        (nn.Conv3d(2, 4, 2), (2, 4, 4, 4)),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), (4, 7)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 5, 5)),
        (nn.Conv2d(4, 4, 3, groups=4), (4, 6, 6)),
    ],
)
def test_a_convolution_scales_its_input_and_output_channels(layer, shape):
    members = BatchEnsemble(layer, 3)
    inputs = torch.randn(2, *shape)
    r, s = factors(members)
    axes = (-1, *(1,) * (len(shape) - 1))
    plain = [layer(r[m].view(axes) * inputs) - layer.bias.view(axes) for m in range(3)]
    expected = [s[m].view(axes) * plain[m] + layer.bias.view(axes) for m in range(3)]
    torch.testing.assert_close(members(inputs), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_biases():
    layer, inputs = nn.Linear(5, 3), torch.randn(7, 5)
    members = BatchEnsemble(layer, 2, bias="shared_pre")
    r, s = factors(members)
    torch.testing.assert_close(members(inputs)[1], s[1] * layer(r[1] * inputs))
    after = BatchEnsemble(layer, 2, bias="shared_post")
    assert "bias" in after.shared.state()
    assert "bias" in BatchEnsemble(layer, 2, bias="member").own.state()
    torch.testing.assert_close(after.expand()["bias"], layer.bias.expand(2, 3))


def test_ones_and_equal_biases_are_the_source_network():
    network, inputs = ResNet(width=8, depth=8), torch.randn(4, 3, 8, 8)
    members = BatchEnsemble(network, 3, init="ones").eval()
    torch.testing.assert_close(members(inputs), network.eval()(inputs).expand(3, 4, 10), rtol=1e-4, atol=1e-5)


@given(scale=st.floats(0.2, 5))
def test_the_gauge_is_free(scale):
    torch.manual_seed(0)
    members, inputs = BatchEnsemble(nn.Linear(4, 3), 2), torch.randn(5, 4)
    before = members(inputs)
    with torch.no_grad():
        members.fast.get_parameter("r").mul_(scale)
        members.fast.get_parameter("s").div_(scale)
    torch.testing.assert_close(members(inputs), before, rtol=1e-4, atol=1e-4)


def test_quotients_of_members_have_rank_one_and_signs_keep_sizes():
    layer = nn.Linear(6, 5)
    weights = BatchEnsemble(layer, 3).expand()["weight"]
    values = torch.linalg.svdvals((weights[0] / weights[1]).double())
    assert values[1] < 1e-4 * values[0]
    signs = BatchEnsemble(layer, 3, init="signs")
    assert set(signs.fast.state()["r"].unique().tolist()) <= {-1.0, 1.0}
    torch.testing.assert_close(signs.expand()["weight"].abs(), layer.weight.abs().expand(3, 5, 6))


def test_rank_k_sums_outer_products():
    layer = nn.Linear(6, 5)
    members = BatchEnsemble(layer, 2, rank=3)
    r, s = members.fast.state()["r"], members.fast.state()["s"]  # (rank, M, channels)
    expected = layer.weight * torch.einsum("jmo,jmi->moi", s, r)
    torch.testing.assert_close(members.expand()["weight"], expected)
    torch.testing.assert_close(BatchEnsemble(layer, 2, rank=3, init="ones").expand()["weight"][1], layer.weight)


def test_tabm_draws_the_first_input_vector_only():
    members = BatchEnsemble(MLP(6, [5, 5], 3), 4, init="tabm")
    fast = members.fast.state()
    first = next(iter(fast))
    assert set(fast[first].unique().tolist()) == {-1.0, 1.0}
    assert all((tensor == 1).all() for name, tensor in fast.items() if name != first)


@pytest.mark.slow
def test_the_published_count():
    assert parameters(BatchEnsemble(WideResNet(28, 10, 10), 4)) == 36_557_548


def test_ensemble_batch_norm_separates_members_in_train_mode():
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    own = BatchEnsemble(network, 2, batch_norm="own").train()
    assert own.own.state()["1.running_mean"].shape == (2, 6)
    inputs = torch.randn(2, 8, 4)
    changed = inputs.clone()
    changed[1] += 5
    torch.testing.assert_close(own.forward_each(inputs)[0], own.forward_each(changed)[0])
    assert BatchEnsemble(network, 2, batch_norm="joint").shared.state()["1.running_mean"].shape == (6,)


def test_patterns_choose_layers_and_one_that_matches_nothing_is_refused():
    network = MLP(6, [5, 5], 3)
    members = BatchEnsemble(network, 2, exclude=("head",))
    assert not any(name.startswith("head") for name in members.fast.state())
    assert {name.split(".")[0] for name in BatchEnsemble(network, 2, include=("head",)).fast.state()} == {"head"}
    with pytest.raises(EnfoldError, match="'nothing' matches none of"):
        BatchEnsemble(network, 2, include=("nothing",))
    with pytest.raises(EnfoldError, match="got none"):
        BatchEnsemble(nn.Sequential(nn.LayerNorm(4)), 2)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_fast_weights_decay_to_one_and_shared_gradients_are_one_networks(optimizer):
    torch.manual_seed(0)
    inputs, labels = torch.randn(32, 4), torch.randint(3, (32,))
    data = Data(Split(inputs, labels), [], Split(inputs, labels), 3, (4,))
    members = BatchEnsemble(nn.Linear(4, 3), 3, init="gaussian", fast_decay=1.0, fast_grad_scale=1e-7)
    before = {name: tensor.detach().clone() for name, tensor in members.fast.state().items()}
    rate, decay = 0.05, 0.2
    plan = TrainConfig(
        epochs=1, batch_size=32, optimizer=optimizer, lr=rate, weight_decay=decay, momentum=0.0,
        schedule="constant",
    )  # fmt: skip
    fit(members, data, config=plan, quiet=True)
    for name, tensor in members.fast.state().items():
        torch.testing.assert_close(tensor, before[name] + rate * decay * (1 - before[name]))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_scale_of_fast_steps_is_not_lost_on_any_optimizer(optimizer):
    inputs, labels = torch.randn(32, 4), torch.randint(3, (32,))
    data = Data(Split(inputs, labels), [], Split(inputs, labels), 3, (4,))
    plan = TrainConfig(epochs=1, batch_size=32, optimizer=optimizer, lr=0.01, weight_decay=0.0, momentum=0.0)
    moved = []
    network = nn.Linear(4, 3)
    for scale in (0.5, 1.0):
        members = BatchEnsemble(network, 3, fast_grad_scale=scale)
        before = members.fast.state()["r"].detach().clone()
        fit(members, data, config=plan, quiet=True)
        moved.append(members.fast.state()["r"].detach() - before)
    torch.testing.assert_close(2 * moved[0], moved[1], rtol=1e-2, atol=1e-6)


@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
@pytest.mark.parametrize("init", ["gaussian", "signs", "ones", "tabm", "tabm_normal"])
def test_every_rank_keeps_the_size_of_the_weight_and_trains(init):
    torch.manual_seed(0)
    network = MLP(40, [50], 3)
    members = BatchEnsemble(network, 3, rank=3, init=init, spread=0.5 if init == "signs" else 0.1).train()
    for name in ("hidden.0.weight", "head.weight"):
        size = dict(network.named_parameters())[name].norm()
        sizes = members.expand()[name].flatten(1).norm(dim=1) / size
        assert (sizes > 0.8).all()
        assert (sizes < 1.25).all()
    before = {name: tensor.detach().clone() for name, tensor in members.fast.state().items()}
    data = Data(*(Split(torch.randn(32, 40), torch.randint(3, (32,))) for _ in range(3)), 3, (40,))
    fit(members, data, config=TrainConfig(epochs=3, lr=0.01, select="last"), quiet=True)
    for name, tensor in members.fast.state().items():
        assert ((tensor - before[name]).flatten(1).abs().amax(1) > 0).all(), f"a rank of {name} never moves"


def test_an_embedding_of_higher_rank_starts_as_one_of_rank_one():
    table = nn.Embedding(7, 5)
    for init in ("ones", "signs"):
        members = BatchEnsemble(table, 2, rank=3, init=init)
        torch.testing.assert_close(members.expand()["weight"].abs(), table.weight.abs().expand(2, 7, 5))


def test_layers_that_compute_their_weight_are_refused_by_name():
    network = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    with pytest.raises(EnfoldError, match=r"'0' computes its weight .*exclude the layer"):
        BatchEnsemble(network, 2)
    assert BatchEnsemble(network, 2, include=("1",))(torch.zeros(3, 4)).shape == (2, 3, 2)


def test_one_batch_norm_each_is_m_batch_norms():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
    members = BatchEnsemble(network, 3, batch_norm="own").train()
    networks = [member.train() for member in members]
    own = torch.randn(3, 8, 4, dtype=torch.float64)
    torch.testing.assert_close(
        members.forward_each(own), torch.stack([n(x) for n, x in zip(networks, own, strict=True)])
    )
    members.eval()
    networks = [member.eval() for member in networks]
    torch.testing.assert_close(
        members.forward_each(own), torch.stack([n(x) for n, x in zip(networks, own, strict=True)])
    )


def test_a_training_is_not_continued_with_other_settings(tmp_path):
    data = Data(*(Split(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(3)), 3, (4,))
    file = tmp_path / "checkpoint.safetensors"
    network = nn.Linear(4, 3)
    fit(BatchEnsemble(network, 2), data, config=TrainConfig(epochs=1), checkpoint=file, quiet=True)
    with pytest.raises(EnfoldError, match="checkpoint"):
        fit(
            BatchEnsemble(network, 2, fast_grad_scale=9.0),
            data,
            config=TrainConfig(epochs=1),
            checkpoint=file,
            quiet=True,
        )


@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
def test_a_shared_weight_moves_as_in_one_network():
    torch.manual_seed(0)
    inputs, labels = torch.randn(16, 4), torch.randint(3, (16,))
    data = Data(Split(inputs, labels), [], Split(inputs, labels), 3, (4,))
    plan = TrainConfig(epochs=1, batch_size=16, optimizer="sgd", lr=0.1, weight_decay=0.0, schedule="constant")
    network = nn.Linear(4, 3)
    members = BatchEnsemble(network, 4, init="ones", fast_grad_scale=0.0)
    fit(members, data, config=plan.replace(order="shared"), quiet=True)
    fit(network, data, config=plan.replace(order="shared"), quiet=True)
    torch.testing.assert_close(members.shared.state()["weight"], network.weight)


def test_a_joint_batch_norm_sees_all_members_together():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).double()
    members = BatchEnsemble(network, num_members=3, batch_norm="joint").train()
    inputs = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    state = {name: tensor.detach().clone() for name, tensor in members.expand().items()}
    before = [F.conv2d(inputs, state["0.weight"][m], state["0.bias"][m]) for m in range(3)]  # each (5, 4, 2, 2)
    rows = torch.cat(before)
    normal = F.batch_norm(rows, None, None, state["1.weight"][0], state["1.bias"][0], training=True)
    hidden = normal.relu().flatten(1).unflatten(0, (3, 5))
    expected = torch.stack([F.linear(hidden[m], state["4.weight"][m], state["4.bias"][m]) for m in range(3)])
    torch.testing.assert_close(members(inputs), expected)
    torch.testing.assert_close(members.forward_each(inputs.expand(3, *inputs.shape)), expected)
    mean = rows.mean((0, 2, 3))
    torch.testing.assert_close(members.shared.state()["1.running_mean"], 0.1 * mean + 0.9 * 0.1 * mean)
    assert "1.running_mean" not in members.own.state()


def test_members_normalise_separately_in_training_and_inference():
    """What shared affine parameters and own statistics are for: eval mode is what training converged to."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3)).double()
    members = BatchEnsemble(network, num_members=3).train()
    inputs = torch.randn(400, 6, dtype=torch.float64)
    trained = members(inputs).detach()
    torch.testing.assert_close(members.eval()(inputs), trained, rtol=0.02, atol=0.02)
    assert members.own.state()["1.running_mean"].shape == (3, 8)
    assert members.shared.state()["1.weight"].shape == (8,)


@pytest.mark.filterwarnings("ignore::enfold.errors.PartialCoverageWarning")
def test_unsupported_joint_batch_norm_gives_the_reason():
    network = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), nn.Flatten(), nn.BatchNorm1d(24))
    members = BatchEnsemble(network, num_members=2, batch_norm="joint").train()
    with pytest.raises(EnfoldError, match=r"joint in this network .*batch_norm='shared'"):
        members(torch.randn(4, 3, 8))
    with pytest.raises(EnfoldError, match=r"batch_norm .*got 'mine'"):
        BatchEnsemble(network, batch_norm="mine")


def test_norm_parameters_are_shared_or_each_members_own():
    network = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.Linear(6, 3))
    assert {"1.weight", "1.bias", "2.weight"} <= BatchEnsemble(network, 2).shared.state().keys()
    own = BatchEnsemble(network, 2, norms="own")
    assert own.own.state()["1.weight"].shape == (2, 6)
    assert own.own.state()["2.bias"].shape == (2, 6)
    with torch.no_grad():
        own.own.state()["1.weight"][1] *= 3
    inputs = torch.randn(5, 4)
    torch.testing.assert_close(own(inputs), torch.stack([member(inputs) for member in own]))


@pytest.mark.parametrize("wrong", [{"bias": "none"}, {"init": "zeros"}, {"norms": "mine"}])
def test_choices_that_do_not_exist(wrong):
    with pytest.raises(EnfoldError, match=rf"{next(iter(wrong))} .*got '{next(iter(wrong.values()))}'"):
        BatchEnsemble(any_network(), **wrong)


class Recurrent(nn.Module):
    """A GRU and a head, of which only the head is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.gru(inputs)[0][:, -1])


def test_the_fraction_of_the_network_that_is_scaled_is_shown():
    network = Recurrent()
    count = sum(parameter.numel() for parameter in network.parameters())
    with pytest.warns(PartialCoverageWarning, match=r"'gru\.weight_hh_l0'"):
        members = BatchEnsemble(network, 3)
    coverage = (16 * 3 + 3) / count
    assert members.coverage() == pytest.approx(coverage)
    assert f"{100 * coverage:.3g} %" in repr(members)
    assert "gru" in members.notice, "for tables"
    complete = BatchEnsemble(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), 3)
    assert complete.coverage() == 1
    assert "100 %" in repr(complete)
    BatchEnsemble(network, 3, include=("head",))  # which the user chose
    assert MultiHead(network, 3).coverage() == pytest.approx(coverage), "which is what it is for"


@pytest.mark.parametrize("batch_norm", ["shared", "own"])
def test_statistics_of_instance_norms_are_each_members_own(batch_norm):
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
    network = nn.Sequential(nn.Conv1d(4, 6, 3), norm, nn.Flatten(), nn.Linear(6 * 8, 3))
    members = BatchEnsemble(network, 3, batch_norm=batch_norm).train()
    expected = [member.train() for member in members]
    inputs = torch.randn(5, 4, 10)
    members(inputs)
    for index, alone in enumerate(expected):
        alone(inputs)
        for name in ("running_mean", "running_var"):
            found = getattr(members.member(index)[1], name)
            torch.testing.assert_close(found, getattr(alone[1], name), msg=f"{name} of member {index}")
