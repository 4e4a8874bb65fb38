"""MIMO: slots for inputs and outputs, the shuffles of a batch, ordinary training as a special case, and its faults."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import enfold
from enfold.cost import parameters
from enfold.data import Data, Split
from enfold.data.batches import Batch
from enfold.ensembles.mimo import MIMO, MIMOLoss
from enfold.ensembles.packed_ensemble import PackedEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.networks import MLP, MediumCNN, ResNet, ViT
from enfold.train import TrainConfig, fit
from fitting import any_network, fitted
from zoo import Apply

CONTRACT = {"members_together": True}


def blobs(count=120, classes=3, features=6):
    """Classes that overlap a little."""
    source = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (count,), generator=source)
    centres = 1.2 * torch.randn(classes, features, generator=source)
    inputs = centres[labels] + torch.randn(count, features, generator=source)
    return Data(Split(inputs, labels), Split(inputs[:40], labels[:40]), Split(inputs, labels), classes, (features,))


def convolutions() -> nn.Module:
    """Grouped at both ends, and pooled after the last layer."""
    layers = (nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Conv2d(6, 4, 1, groups=2), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*layers, nn.Flatten())


CASES = {
    "bare": (lambda: nn.Linear(5, 4), (5,)),
    "mlp on images": (lambda: MLP(2 * 3 * 3, [8], 4), (2, 3, 3)),
    "cnn": (lambda: MediumCNN((3, 16, 16), 4, channels=(4, 8)), (3, 16, 16)),
    "residual": (lambda: ResNet(width=4, depth=8, num_classes=4), (3, 8, 8)),
    "vit": (lambda: ViT((3, 8, 8), 4, width=8, depth=1, heads=2, pooling="class"), (3, 8, 8)),
    "grouped": (convolutions, (4, 5, 5)),
    "tokens": (lambda: Apply(lambda net, x: net.b(net.a(x).mean(1)), a=nn.Linear(3, 8), b=nn.Linear(8, 4)), (7, 3)),
    "one token": (lambda: Apply(lambda net, x: net.b(net.a(x).mean(1)), a=nn.Linear(3, 8), b=nn.Linear(8, 4)), (1, 3)),
    "channels last": (
        lambda: Apply(lambda net, x: net.b(net.a(x.movedim(-1, 1)).mean((2, 3))), a=nn.Conv2d(3, 8, 3),
                      b=nn.Linear(8, 4)),
        (5, 6, 3),
    ),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    make, shape = CASES[request.param]
    return make().eval(), torch.randn(2, *shape)


def test_outputs_are_one_a_member_and_the_network_is_about_as_large(case):
    network, inputs = case
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    model = MIMO(network, 3).eval()
    assert model(inputs).shape == (3, 2, 4)
    assert not torch.allclose(model(inputs)[0], model(inputs)[1])
    torch.testing.assert_close(model.forward_mean(inputs).exp().sum(-1), torch.ones(2))
    changed = {name: key for name, key in model.module.state_dict().items() if key.shape != before[name].shape}
    assert 1 <= len(changed) <= 3  # first weight, last weight and bias
    for name, tensor in model.module.state_dict().items():
        if not name.startswith(tuple(key.rpartition(".")[0] for key in changed)):
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    torch.testing.assert_close(dict(network.state_dict()), before, rtol=0, atol=0)


def test_one_member_is_the_network(case):
    network, inputs = case
    torch.testing.assert_close(MIMO(network, 1).eval()(inputs)[0], network(inputs))


def test_every_slot_reaches_every_member_and_the_same_input_fills_all(case):
    network, inputs = case
    model = MIMO(network, 3).eval()
    same = inputs.expand(3, *inputs.shape)
    torch.testing.assert_close(model.forward_each(same), model(inputs))
    for slot in range(3):
        other = same.clone()
        other[slot] = torch.randn_like(inputs)
        differs = (model.forward_each(other) - model(inputs)).abs().amax((1, 2))
        assert (differs > 0).all()


def test_a_linear_layer_by_hand():
    model = MIMO(nn.Linear(3, 2), 2)
    inputs = torch.randn(2, 5, 3)
    layer = model.module
    flat = torch.cat([inputs[0], inputs[1]], dim=1) @ layer.weight.T + layer.bias  # (1)
    torch.testing.assert_close(model.forward_each(inputs), torch.stack([flat[:, :2], flat[:, 2:]]))
    assert parameters(model) == 4 * 6 + 4


def test_groups_contain_the_same_channels_of_all_slots():
    network = convolutions()
    model = MIMO(network, 3)
    inputs = torch.randn(3, 2, 4, 5, 5)
    other = inputs.clone()
    other[:, :, 2:] = 0  # the second group's channels
    first = model.module[0]
    hidden = [first(model._join(each))[:, :3] for each in (inputs, other)]
    torch.testing.assert_close(*hidden)
    last = model.module[2]
    assert (last.in_channels, last.out_channels, last.groups) == (6, 12, 2)


@given(
    size=st.integers(1, 12),
    members=st.integers(1, 4),
    repetition=st.integers(1, 4),
    rho=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_every_member_sees_every_example_batch_repetition_times(size, members, repetition, rho, seed):
    torch.manual_seed(seed)
    rows = MIMOLoss(members, repetition, rho).rows(size)
    assert rows.shape == (members, repetition * size)
    assert (rows.sort(1).values == torch.arange(size).repeat_interleave(repetition)).all()
    kept = rows.shape[1] - int(rows.shape[1] * (1 - rho))
    assert (rows[:, rows.shape[1] - kept :] == rows[:1, rows.shape[1] - kept :]).all()


def test_input_repetition_of_one_and_of_none():
    torch.manual_seed(0)
    same = MIMOLoss(3, 2, 1.0).rows(20)
    assert (same == same[0]).all()
    separate = MIMOLoss(3, 2, 0.0).rows(20)
    shared = [(separate[a] == separate[b]).float().mean() for a, b in ((0, 1), (0, 2), (1, 2))]
    assert max(shared) < 0.3


def test_labels_move_with_their_inputs():
    class Spy(nn.Module):
        def forward_each(self, inputs):
            self.seen = inputs
            return torch.zeros(*inputs.shape[:2], 10)

    labels = torch.arange(10)
    spy, losses = Spy(), MIMOLoss(3, 4, 0.3)
    torch.manual_seed(1)
    losses(spy, Batch(labels[:, None].float(), labels))
    torch.manual_seed(1)
    rows = losses.rows(10)
    assert (spy.seen[..., 0] == rows).all()

    class Knows(nn.Module):
        def forward_each(self, inputs):
            return 50 * F.one_hot(inputs[..., 0].long(), 10).float()

    assert losses(Knows(), Batch(labels[:, None].float(), labels)).max() < 1e-6  # each head finds its own label


def test_the_loss_is_the_sum_over_heads_of_means_with_the_plans_smoothing():
    build, data = partial(MIMO, num_members=3, batch_repetition=2), blobs()
    model = build(MLP(6, [8], 3))
    batch = Batch(data.train.inputs[:10], data.train.labels[:10])
    for smoothing in (0.0, 0.1, (0.0, 0.1, 0.2)):
        losses = build(any_network()).objective(TrainConfig(label_smoothing=smoothing))
        torch.manual_seed(5)
        found = losses(model, batch)
        torch.manual_seed(5)
        rows = losses.rows(10)
        logits = model.forward_each(batch.inputs[rows])
        each = smoothing if isinstance(smoothing, tuple) else [smoothing] * 3
        expected = [F.cross_entropy(logits[m], batch.targets[rows[m]], label_smoothing=each[m]) for m in range(3)]
        torch.testing.assert_close(found, torch.stack(expected))
    with pytest.raises(EnfoldError, match=r"label_smoothing .*got 2"):
        build(any_network()).objective(TrainConfig(label_smoothing=(0.1, 0.2)))


def test_batch_norm_sees_repeated_rows():
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    build, seen = partial(MIMO, num_members=2, batch_repetition=3), []
    model = build(network).train()
    model.module[1].register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    build(any_network()).objective(TrainConfig())(model, Batch(torch.randn(5, 6), torch.randint(3, (5,))))
    assert seen == [15]


def test_one_member_without_repetition_is_ordinary_training():
    network, data = MLP(6, [8], 3), blobs()
    plan = TrainConfig(epochs=3, batch_size=16, order="shared")
    model = fitted(MIMO(network, 1, batch_repetition=1), data, plan)
    fit(network, data, config=plan, quiet=True)
    torch.testing.assert_close(model.module.state_dict(), network.state_dict(), rtol=1e-4, atol=1e-5)


def test_it_learns_resumes_and_can_be_loaded(tmp_path):
    torch.manual_seed(0)
    network, data, build = (
        MLP(6, [32, 32], 3),
        blobs(),
        partial(MIMO, num_members=2, batch_repetition=2, input_repetition=0.2, seed=4),
    )
    plan = TrainConfig(epochs=8, batch_size=20, lr=0.01)
    model = fitted(build(network), data, plan)
    found = predict(model, data.test)
    assert found.num_members == 2
    assert enfold.evaluate(model, data).scores["accuracy"] > 0.7
    path = enfold.save(model, tmp_path / "mimo.safetensors")
    loaded = enfold.load(path, network)
    torch.testing.assert_close(loaded(data.test.inputs), model(data.test.inputs), rtol=0, atol=0)
    assert loaded.options() == model.options()
    assert build.keywords.items() <= loaded.options().items()
    assert loaded.network_name == "MLP"

    class Stop(Exception):
        pass

    def stop(epoch):
        if epoch.epoch == 3:
            raise Stop

    half, adapted = build(network), build(any_network()).configure(plan)
    checkpoint = tmp_path / "checkpoint"
    with pytest.raises(Stop):
        fit(
            half,
            data,
            config=adapted,
            objective=build(any_network()).objective(adapted),
            checkpoint=checkpoint,
            on_epoch=stop,
            quiet=True,
        )
    resumed = fitted(build(network), data, plan, checkpoint=checkpoint)
    torch.testing.assert_close(resumed.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_layers_may_be_named():
    network = nn.Sequential(
        nn.BatchNorm1d(6, affine=False, track_running_stats=False), nn.Linear(6, 8), nn.Linear(8, 3)
    )
    assert MIMO(network, 2, first_layer="1", last_layer="2").module[1].in_features == 12
    with pytest.raises(EnfoldError, match=r"last_layer= must name .* got 'head': choose one of 1, 2"):
        MIMO(network, 2, last_layer="head")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_members": 0}, r"num_members .*got 0"),
        ({"batch_repetition": 0}, r"batch_repetition .*got 0"),
        ({"input_repetition": 1.5}, r"input_repetition .*got 1\.5"),
        ({"input_repetition": -0.1}, r"input_repetition .*got -0\.1"),
    ],
)
def test_invalid_options_are_refused(settings, message):
    with pytest.raises(EnfoldError, match=message):
        MIMO(any_network(), **settings)


def test_invalid_networks_and_inputs_are_refused():
    words = Apply(lambda net, x: net.head(net.embed(x).mean(1)), embed=nn.Embedding(9, 4), head=nn.Linear(4, 2))
    with pytest.raises(EnfoldError, match=r"got 'embed' \(Embedding\): name the right one with first_layer="):
        MIMO(words)
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    with pytest.raises(EnfoldError, match=r"'2\.weight' is tied to '0\.weight'"):
        MIMO(tied)
    unsqueezed = Apply(lambda net, x: net.b(net.a(x[:, None]).mean((2, 3))), a=nn.Conv2d(1, 4, 3), b=nn.Linear(4, 2))
    with pytest.raises(EnfoldError, match=r"inputs .*got inputs of shape \(8, 8\)"):
        MIMO(unsqueezed)(torch.randn(2, 8, 8))
    other_last = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(12, 4, 1))
    with pytest.raises(EnfoldError, match=r"3 C channels, got \(2, 4, 6, 6\)"):
        MIMO(other_last, last_layer="1")(torch.randn(2, 3, 8, 8))
    with pytest.raises(EnfoldError, match="one tensor"):
        MIMO(any_network())({"x": torch.randn(2, 6)})


def test_inputs_that_the_widened_network_does_not_take_are_named():
    tokens = Apply(lambda net, x: net.b(net.a(x).mean(1)), a=nn.Linear(6, 8), b=nn.Linear(8, 4))
    with pytest.raises(EnfoldError, match=r"inputs of shape \(5, 7\) .* the 6 features of its first layer"):
        MIMO(tokens)(torch.randn(2, 5, 7))


def test_members_cannot_be_extracted():
    with pytest.raises(
        EnfoldError, match=r"do not exist as separate networks, got member\(1\): .*ensemble\(inputs\)\[1\]"
    ):
        MIMO(MLP(6, [8], 3)).member(1)


class Padded(nn.Conv2d):
    """Another forward, and nothing else."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(inputs, (1, 1, 1, 1)))


class Scaled(nn.Linear):
    """A tensor as long as the layer is wide."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = torch.ones(sizes[1])


def with_hook(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda *_: None)
    return layer


def prepared_for_quantisation(network: nn.Module) -> nn.Module:
    quantization = pytest.importorskip("torch.ao.quantization")
    network.train().qconfig = quantization.get_default_qat_qconfig("x86")
    return quantization.prepare_qat(network)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("network", "name"),
    [
        (lambda: prepared_for_quantisation(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))), "0"),
        (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.utils.weight_norm(nn.Linear(4, 3))), "2"),
        (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))),
         "2"),
        (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), with_hook(nn.Linear(4, 3))), "2"),
    ],
    ids=["quantisation", "weight norm", "spectral norm", "hook"],
)  # fmt: skip
@pytest.mark.parametrize(
    "build", [partial(MIMO, num_members=3), partial(PackedEnsemble, num_members=2)], ids=["MIMO", "PackedEnsemble"]
)
def test_layers_with_more_than_their_weights_are_refused_by_name_before_anything_runs(build, network, name):
    made = network()
    made.register_forward_pre_hook(lambda *_: pytest.fail("the network was run"))
    with pytest.raises(EnfoldError, match=f"'{name}'"):
        build(made)


def test_tensors_that_a_class_of_its_own_adds_are_refused_by_name():
    with pytest.raises(EnfoldError, match=r"'2'.*'scale'"):
        MIMO(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), Scaled(4, 3)), 3, last_layer="2")
    with pytest.raises(EnfoldError, match=r"'1'.*'scale'"):
        PackedEnsemble(nn.Sequential(nn.Linear(6, 4), Scaled(4, 4), nn.Linear(4, 3)), 2)


def test_a_subclass_with_another_forward_is_widened():
    network = nn.Sequential(Padded(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    assert MIMO(network, 3, first_layer="0")(torch.randn(2, 3, 5, 5)).shape == (3, 2, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantisation_by_channel_is_refused_by_name_before_anything_runs():
    from torch.ao import quantization

    fake = quantization.FakeQuantize(
        observer=quantization.PerChannelMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric, ch_axis=1,
    )  # fmt: skip
    network = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3), fake)
    network(torch.randn(4, 6))
    with pytest.raises(EnfoldError, match="'3'"):
        MIMO(network, 3, last_layer="2")


class Checked(nn.Module):
    """A network that checks its inputs with an assertion or an error of another kind."""

    def __init__(self, error):
        super().__init__()
        self.layer, self.error = nn.Linear(4, 3), error

    def forward(self, inputs):
        if inputs.shape[1] != 4:
            raise self.error
        return self.layer(inputs)


@pytest.mark.parametrize("error", [ValueError("expected 4 channels"), AssertionError(), RuntimeError()])
def test_a_network_that_checks_the_width_of_its_inputs_is_refused(error):
    members = MIMO(Checked(error), num_members=2)
    with pytest.raises(EnfoldError, match=str(error) or type(error).__name__):
        members(torch.zeros(5, 4))
