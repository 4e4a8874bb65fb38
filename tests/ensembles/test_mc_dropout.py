"""MC dropout: only dropout is active, samples are reproducible, and one pass gives what one pass a sample gives."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import enfold
from clouds import three_clouds
from enfold.ensembles.common.dropout import Dropping, Streams
from enfold.ensembles.mc_dropout import MCDropout
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.networks import MLP, MediumCNN, ResNet, ViT
from enfold.train import TrainConfig
from fitting import any_network, fitted
from specimens import Apply

CONTRACT = {"options": {"inject": 0.2}}


def encoder(sequence_first: bool = False) -> nn.Module:
    """Dropout in a transformer layer: in the attention, in the residual branches and between the linear layers."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=not sequence_first)
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not sequence_first)

    def forward(net: Apply, x: torch.Tensor) -> torch.Tensor:
        if sequence_first:
            return net.head(net.stack(x.transpose(0, 1)).mean(0))
        return net.head(net.stack(x).mean(1))

    return Apply(forward, stack=stack, head=nn.Linear(8, 3))


def attention_alone() -> nn.Module:
    attend = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
    return Apply(
        lambda net, x: net.head(net.attend(x, x, x, need_weights=False)[0].mean(1)), attend=attend, head=nn.Linear(8, 3)
    )


def functional() -> nn.Module:
    def forward(net: Apply, x: torch.Tensor) -> torch.Tensor:
        return net.second(F.dropout(torch.relu(net.first(x)), 0.5, training=net.training))

    return Apply(forward, first=nn.Linear(6, 8), second=nn.Linear(8, 3))


def residual() -> nn.Module:
    """What comes before the first dropout meets what comes after it."""
    return Apply(
        lambda net, x: net.head(x + net.drop(torch.relu(net.layer(x)))),
        layer=nn.Linear(6, 6), drop=nn.Dropout(0.5), head=nn.Linear(6, 3),
    )  # fmt: skip


def mixing() -> nn.Module:
    """Examples that see each other, behind a layer of zeros."""
    head = nn.Linear(6, 3)
    nn.init.zeros_(head.weight)
    return Apply(
        lambda net, x: net.head(net.drop(net.layer(x)) - net.drop(net.layer(x)).mean(0)),
        layer=nn.Linear(6, 6), drop=nn.Dropout(0.5), head=head,
    )  # fmt: skip


def dropped_weights() -> nn.Module:
    """Not activations but a weight: no two samples can run in one pass."""
    return Apply(
        lambda net, x: F.linear(x, F.dropout(net.weight, 0.5, net.training)), weight=nn.Parameter(torch.randn(3, 6))
    )


def recurrent() -> nn.Module:
    cell = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)
    return Apply(lambda net, x: net.head(net.cell(x)[0][:, -1]), cell=cell, head=nn.Linear(8, 3))


def by_hand() -> nn.Module:
    return Apply(lambda net, x: net.head(F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).mean(1)),
                 head=nn.Linear(8, 3))  # fmt: skip


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.5), nn.Conv2d(4, 4, 3),
        nn.FeatureAlphaDropout(0.2), nn.Flatten(2), nn.Dropout1d(0.2), nn.Flatten(), nn.SELU(), nn.AlphaDropout(0.1),
        nn.Linear(64, 3),
    )  # fmt: skip


VECTORS, SEQUENCES, IMAGES = (7, 6), (7, 5, 8), (7, 2, 8, 8)
NETWORKS = {
    "mlp": (lambda: MLP(6, [8, 8], 3, dropout=0.5), VECTORS, "late", [0, 0]),
    "functional": (functional, VECTORS, "late", [0]),
    "convolutional": (convolutional, IMAGES, "late", [0] * 4),
    "cnn": (lambda: MediumCNN((2, 8, 8), 3, channels=(4, 8), dropout=0.3), IMAGES, "late", [0, 0]),
    "vit": (lambda: ViT((2, 8, 8), 3, width=8, depth=1, heads=2, dropout=0.2), IMAGES, "late", [0] * 3),
    "residual": (residual, VECTORS, "early", [0]),
    "encoder": (encoder, SEQUENCES, "early", [0] * 8),
    "sequence first": (lambda: encoder(sequence_first=True), SEQUENCES, "early", [0, 1, 1, 1] * 2),
    "attention": (attention_alone, SEQUENCES, "early", [0]),
    "mixing": (mixing, VECTORS, "alone", [0, 0]),
    "weights": (dropped_weights, VECTORS, "alone", [None]),
    "recurrent": (recurrent, SEQUENCES, "alone", []),
    "by hand": (by_hand, SEQUENCES, "alone", []),
}


@pytest.fixture(params=NETWORKS)
def case(request):
    torch.manual_seed(0)
    make, shape, way, axes = NETWORKS[request.param]
    return make().eval(), torch.randn(shape), way, axes


def one_by_one(network, inputs, model):
    """The definition: a pass for each sample, with nothing but the dropout replaced."""
    streams = Streams(model.seed)
    outputs = []
    for sample in range(model.num_members):
        with torch.inference_mode(), Dropping(streams, model._axes, sample, per_example=model.per_example):
            outputs.append(network(inputs))
    return torch.stack(outputs)


@pytest.mark.parametrize("per_example", [True, False])
def test_one_pass_equals_a_pass_per_sample(case, per_example):
    network, inputs, way, axes = case
    build = partial(MCDropout, num_members=4, per_example=per_example)
    model = build(network)
    with torch.inference_mode():
        found = model(inputs)
    assert model._way == way
    assert model._axes == axes
    torch.testing.assert_close(found, one_by_one(network, inputs, model), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(inputs[:1]), one_by_one(network, inputs[:1], model), rtol=1e-4, atol=1e-5)


def test_samples_differ_are_reproducible_and_the_first_of_more(case):
    network, inputs, *_ = case
    if isinstance(network, Apply) and hasattr(network, "head"):  # which is zeros in one of them
        nn.init.normal_(network.head.weight)
    few, more = MCDropout(network, 3), MCDropout(network, 4)
    first = few(inputs)
    torch.manual_seed(123)
    few(inputs + 1)
    torch.testing.assert_close(few(inputs), first, rtol=0, atol=0)
    torch.testing.assert_close(more(inputs)[:3], first, rtol=1e-4, atol=1e-5)
    assert all(not torch.allclose(first[i], first[j]) for i in range(3) for j in range(i))
    assert not torch.allclose(MCDropout(network, 3, seed=1)(inputs), first)


def test_only_dropout_is_active(case):
    network, inputs, *_ = case
    model = MCDropout(network, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    model(inputs)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_batch_norm_in_train_mode_would_differ():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).eval()
    model, inputs = MCDropout(network, 2), 5 + torch.randn(7, 6)
    hidden = network[1](network[0](inputs))
    keep = Streams(0).draw_masks(0, 2, hidden.shape, 1 << 15)
    torch.testing.assert_close(model(inputs), network[3](2 * hidden * keep))
    assert int(model.module[1].num_batches_tracked) == 0


@pytest.mark.parametrize("per_example", [True, False])
def test_rate_zero_is_the_network(per_example):
    torch.manual_seed(0)
    network, inputs = MLP(6, [8, 8], 3, dropout=0.5).eval(), torch.randn(5, 6)
    model = MCDropout(network, 4, per_example=per_example)
    for module in model.module.dropouts:
        module.p = 0.0
    assert torch.equal(model(inputs), network(inputs).expand(4, 5, 3))


def test_the_mean_of_many_samples_of_a_linear_layer_is_its_output():
    torch.manual_seed(0)
    layer, inputs = nn.Linear(20, 3), torch.randn(4, 20)
    samples = MCDropout(layer, 20_000, inject=0.3).eval()(inputs)
    error = samples.std(0) / 20_000**0.5
    assert ((samples.mean(0) - layer(inputs)).abs() < 5 * error).all()
    expected = ((0.3 / 0.7) * (layer.weight**2 @ (inputs**2).T)).T  # the variance of a masked sum
    torch.testing.assert_close(samples.var(0), expected, rtol=0.05, atol=0.0)


@settings(max_examples=25, deadline=None)
@given(rate=st.floats(0.0, 0.999), seed=st.integers(0, 1000))
def test_masks_have_the_rate(rate, seed):
    kept = round((1 - rate) * 65536)
    keep = Streams(seed).draw_masks(0, 2, (101, 203), kept)  # an odd number of units
    assert keep.shape == (2, 101, 203)
    assert set(keep.unique().tolist()) <= {0, 1}
    spread = (rate * (1 - rate) / keep.numel()) ** 0.5
    assert abs(float(keep.float().mean()) - kept / 65536) <= 6 * spread


def test_everything_dropped_is_zero():
    model = MCDropout(nn.Sequential(nn.Dropout(1.0), nn.Linear(4, 3)), 2).eval()
    torch.testing.assert_close(model(torch.randn(5, 4)), model.module[1].bias.expand(2, 5, 3))


def dropped(layer, inputs, **settings):
    return MCDropout(layer, 200, **settings).eval()(inputs)


def test_masks_of_examples_and_of_batches():
    ones = torch.ones(6, 50)
    own, shared = dropped(nn.Dropout(0.5), ones), dropped(nn.Dropout(0.5), ones, per_example=False)
    assert not torch.equal(own[:, 0], own[:, 1])
    assert torch.equal(shared, shared[:, :1].expand_as(shared))
    assert not torch.equal(shared[0], shared[1])
    assert set(own.unique().tolist()) == {0.0, 2.0}


def test_complete_channels_are_dropped():
    outputs = dropped(nn.Dropout2d(0.25), torch.ones(4, 8, 3, 3))
    assert torch.equal(outputs, outputs[..., :1, :1].expand_as(outputs))
    assert abs(float((outputs == 0).float().mean()) - 0.25) < 0.02


@pytest.mark.parametrize("layer", [nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)])
def test_alpha_dropout_preserves_moments_and_equals_torch(layer):
    inputs = torch.randn(16, 32, 8, generator=torch.Generator().manual_seed(0))
    outputs = dropped(layer, inputs)
    assert abs(float(outputs.mean())) < 0.02
    assert abs(float(outputs.var()) - 1) < 0.02
    kept = layer.train()(torch.zeros(16, 32, 8)).unique()  # torch's own two values for a unit of 0
    torch.testing.assert_close(dropped(layer.eval(), torch.zeros(16, 32, 8)).unique(), kept, rtol=1e-3, atol=1e-3)


def test_attention_without_dropout_equals_torch():
    torch.manual_seed(0)
    network, inputs = encoder().eval(), torch.randn(4, 5, 8)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = MCDropout(network, 1)
    for module in model.module.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 1e-5  # rounds to 1 of 65536: a mask that keeps next to all
    torch.testing.assert_close(model(inputs)[0], network(inputs), rtol=1e-3, atol=1e-3)


def test_train_mode_is_the_network_with_its_dropout():
    network, inputs = MLP(6, [8], 3, dropout=0.5).train(), torch.randn(5, 6)
    model = MCDropout(network, 4)
    torch.manual_seed(1)
    found = model(inputs)
    torch.manual_seed(1)
    torch.testing.assert_close(found, network(inputs)[None], rtol=0, atol=0)
    assert (model.training, model.trained_members, model.network_name) == (True, 1, "MLP")
    assert list(model.state_dict()) == [f"module.{name}" for name in network.state_dict()]


def test_injected_dropout_comes_before_every_layer_but_the_first():
    torch.manual_seed(0)
    first, second, head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
    network = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), head).eval()
    drops = nn.Dropout(0.25), nn.Dropout(0.25)
    explicit = nn.Sequential(first, nn.ReLU(), drops[0], second, nn.ReLU(), drops[1], head).eval()
    inputs = torch.randn(5, 6)
    torch.testing.assert_close(MCDropout(network, 3, inject=0.25)(inputs), MCDropout(explicit, 3)(inputs))
    torch.manual_seed(1)
    found = MCDropout(network, 3, inject=0.25).train()(inputs)
    torch.manual_seed(1)
    torch.testing.assert_close(found[0], explicit.train()(inputs))
    assert not any(module._forward_pre_hooks for module in network.modules())


@pytest.mark.parametrize("channels", [False, True])
def test_injection_into_convolutions(channels):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 8, 1), nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    model, seen = MCDropout(network, 3, inject=0.5, channels=channels), []
    model.module[1].register_forward_pre_hook(lambda module, args: seen.append(args[0] == 0))
    model(torch.randn(6, 2, 4, 4))
    complete = seen[-1].flatten(2).float().mean(2)  # (3 * 6, channels): how much of a channel is gone
    assert complete.shape == (18, 8)
    assert (set(complete.unique().tolist()) == {0.0, 1.0}) == channels


def test_injection_into_a_residual_network():
    torch.manual_seed(0)
    network, inputs = ResNet(width=4, depth=8, num_classes=4).eval(), torch.randn(6, 3, 8, 8)
    build = partial(MCDropout, num_members=3, inject=0.1, channels=True)
    model = build(network)
    outputs = model(inputs)
    assert model._way == "early"
    torch.testing.assert_close(outputs, one_by_one(model.module, inputs, model), rtol=1e-4, atol=1e-4)
    assert outputs.std(0).min() > 0


def test_samples_do_not_depend_on_the_group_size(monkeypatch):
    torch.manual_seed(0)
    network, inputs = MLP(6, [8, 8], 3, dropout=0.5).eval(), torch.randn(7, 6)
    complete = MCDropout(network, 5)(inputs)
    monkeypatch.setattr("enfold.ensembles.mc_dropout.MOST_UNITS", 2 * 7 * 8)
    torch.testing.assert_close(MCDropout(network, 5)(inputs), complete)


def test_layers_before_the_first_dropout_run_once():
    network = MLP(6, [8, 8], 3, dropout=0.5).eval()
    model, rows = MCDropout(network, 4), []
    model(torch.randn(7, 6))
    for layer in (*model.module.hidden, model.module.head):
        layer.register_forward_hook(lambda module, args, output: rows.append(len(output)))
    model(torch.randn(7, 6))
    assert rows == [7, 28, 28]


def test_gradients_pass_through_the_samples():
    model = MCDropout(MLP(6, [8], 3, dropout=0.5), 3).eval()
    inputs = torch.randn(5, 6, requires_grad=True)
    model(inputs).square().sum().backward()
    assert inputs.grad is not None
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model(inputs[:0]).shape == (3, 0, 3)


def test_a_network_without_dropout_is_refused_with_a_remedy():
    with pytest.raises(EnfoldError, match=r"MLP has none: .*inject=0\.1"):
        MCDropout(MLP(6, [8], 3)).eval()(torch.randn(5, 6))
    with pytest.raises(EnfoldError, match="MLP has none"):  # before it is trained
        MCDropout(MLP(6, [8], 3)).train()(torch.randn(5, 6))
    with pytest.raises(EnfoldError, match=r"'dropouts\.0' has the rate 0\.5 and inject is 0\.1"):
        MCDropout(MLP(6, [8], 3, dropout=0.5), inject=0.1)
    with pytest.raises(EnfoldError, match=r"inject .*Embedding has none"):
        MCDropout(nn.Embedding(5, 3), inject=0.1)
    with pytest.raises(EnfoldError, match=r"inject .*got 1"):
        MCDropout(any_network(), inject=1)
    with pytest.raises(EnfoldError, match=r"num_members .*got 0"):
        MCDropout(any_network(), 0)


def test_trained_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    data, network = three_clouds(96, 48, 48), MLP(4, [16], 3)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    build = partial(MCDropout, num_members=3, inject=0.1)
    model = fitted(build(network), data, TrainConfig(epochs=10, batch_size=16, lr=0.02))
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    predictions = predict(model, data.test)
    assert predictions.log_probs.shape == (3, 48, 3)
    assert (predictions.log_probs.mean(0).argmax(1) == predictions.labels).float().mean() > 0.6
    enfold.save(model, tmp_path / "model.safetensors")
    loaded = enfold.load(tmp_path / "model.safetensors", network)
    assert loaded.options() == model.options()
    assert build.keywords.items() <= loaded.options().items()
    torch.testing.assert_close(predict(loaded, data.test).log_probs, predictions.log_probs, rtol=0, atol=0)
    mean = model.forward_mean(data.test.inputs).exp()
    torch.testing.assert_close(mean, predictions.log_probs.exp().mean(0))


def test_members_cannot_be_extracted():
    model = MCDropout(MLP(6, [8], 3), inject=0.1)
    with pytest.raises(EnfoldError, match=r"do not exist as separate networks, got member\(0\): .*ensemble\.module"):
        model.member(0)
