"""Surgery: which layers are first and last, layers exchanged in a copy, and narrow networks that still run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from enfold.cost import parameters
from enfold.ensembles.common.surgery import first_and_last, narrow_network, replace_modules, resize_layer, widths_of
from enfold.ensembles.common.surgery.narrow import scale_widths
from enfold.errors import EnfoldError
from enfold.networks import MLP, MediumCNN, ResNet, ViT, WideResNet
from zoo import ZOO, Apply


def pooled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (nn.Linear(3, 2), ("", "")),
        (MLP(6, [5, 4], 3), ("hidden.0", "head")),
        (ResNet(width=4, depth=8), ("conv", "head")),
        (ViT((3, 8, 8), 4, width=8, depth=1, heads=2), ("embed", "head")),
        (ViT((3, 8, 8), 4, width=8, depth=1, heads=2, pooling="class"), ("embed", "head")),
        (pooled(), ("0", "2")),
    ],
    ids=["bare", "mlp", "residual", "vit", "class token", "conv and pooling"],
)
def test_first_and_last_come_from_the_graph(network, expected):
    assert first_and_last(network) == expected


def test_the_graph_counts_and_not_the_order_of_registration():
    def forward(net, x):
        return net.a_head(torch.relu(net.z_body(x)))

    assert first_and_last(Apply(forward, a_head=nn.Linear(5, 2), z_body=nn.Linear(3, 5))) == ("z_body", "a_head")


def test_a_network_that_cannot_be_traced_is_read_in_the_order_of_registration():
    assert first_and_last(ZOO["control_flow"].make()) == ("first", "second")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "embedding",
            r"first layer must be one linear layer or convolution, got 'embed' \(Embedding\): name .* first_layer=",
        ),
        ("batch_norm_1d", r"first layer must be .* got '0' \(BatchNorm1d\)"),
        ("lstm", r"first layer must be .* got 'cell' \(LSTM\)"),
        ("nested", r"first layer must be one .*'blocks.0.layers.first' \(Linear\) and"),
        ("gated", r"last layer must be one .* got 'second' \(Linear\) and 'first' \(Linear\): name .* last_layer="),
        ("used_twice", "'layer' is called 2 times"),
    ],
)
def test_networks_without_first_or_last_layer_are_refused(name, message):
    with pytest.raises(EnfoldError, match=message):
        first_and_last(ZOO[name].make())


def test_tensors_between_the_inputs_and_the_first_layer_are_seen():
    def forward(net, x):
        return net.head((x - net.mean) * net.scale)

    scale = nn.Parameter(torch.ones(4))
    network = Apply(forward, head=nn.Linear(4, 2), scale=scale)
    network.register_buffer("mean", torch.zeros(1))  # a single number fits any inputs
    with pytest.raises(EnfoldError, match=r"first layer must be .* got 'scale' \(a tensor\)"):
        first_and_last(network)
    assert first_and_last(network, first="head") == ("head", "head")


def test_given_names_are_checked():
    network = MLP(6, [5, 5], 3)
    assert first_and_last(network, "hidden.1", "hidden.0") == ("hidden.1", "hidden.0")
    with pytest.raises(
        EnfoldError, match=r"first_layer= must name .* got 'hidden': choose one of hidden.0, hidden.1, head"
    ):
        first_and_last(network, first="hidden")


def test_replaced_copies_and_replaces_every_appearance():
    layer = nn.Linear(4, 4)
    network = nn.Sequential(layer, nn.ReLU(), layer)
    new = nn.Linear(4, 4)
    twin = replace_modules(network, {"0": new})
    assert twin[0] is new
    assert twin[2] is new
    assert network[0] is layer
    assert network[2] is layer
    assert replace_modules(layer, {"": new}) is new
    assert replace_modules(network, {})[0] is not layer


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 6), (8, 2)),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1), (8, 2, 3, 3)),
        (nn.ConvTranspose1d(4, 6, 3), (2, 8, 3)),
    ],
)
def test_resized_preserves_values_that_fit(layer, shape):
    before = layer.weight.detach().clone()
    twin = resize_layer(layer, 2, 8)
    assert twin.weight.shape == shape
    assert widths_of(twin) == (2, 8)
    common = tuple(slice(min(a, b)) for a, b in zip(before.shape, shape, strict=True))
    torch.testing.assert_close(twin.weight[common], before[common])
    torch.testing.assert_close(twin.bias[:6], layer.bias)
    torch.testing.assert_close(layer.weight, before)
    assert twin(torch.randn(3, 2, 5, 5) if twin.weight.ndim == 4 else torch.randn(2, 2)).isfinite().all()


def test_a_computed_weight_cannot_be_resized():
    for name in ("weight_norm", "spectral_norm"):
        with pytest.raises(EnfoldError, match=r"also has .*: remove weight norm"):
            narrow_network(ZOO[name].make(), 0.5)


IMAGE = (3, 32, 32)


@pytest.mark.combinations
@pytest.mark.parametrize("fraction", [0.5, 2 / 3, 1.5])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: MLP(20, [33, 100], 3), (20,)),
        (lambda: MediumCNN(IMAGE, 5, channels=(4, 8)), IMAGE),
        (lambda: ResNet(width=8, depth=8), IMAGE),
        (lambda: ResNet(width=8, depth=8, shortcut="pad"), IMAGE),  # holds a width as an attribute
        (lambda: WideResNet(10, 1, 7), IMAGE),
        (lambda: ViT(IMAGE, 4, width=16, depth=1, heads=4), IMAGE),
        (lambda: ViT(IMAGE, 4, patch=8, width=16, depth=1, heads=4, pooling="class"), IMAGE),  # as many tokens as width
    ],
    ids=["odd widths", "flattened", "residual", "pad", "wide", "vit", "class token"],
)
def test_a_narrow_network_runs_and_has_the_class_and_the_names(make, shape, fraction):
    network = make().eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    narrow = narrow_network(network, fraction)
    inputs = torch.randn(2, *shape)
    assert type(narrow) is type(network)
    assert narrow.state_dict().keys() == network.state_dict().keys()
    assert narrow(inputs).shape == network(inputs).shape
    assert (parameters(narrow) < parameters(network)) == (fraction < 1)
    torch.testing.assert_close(dict(network.state_dict()), before, rtol=0, atol=0)


def test_half_the_widths_are_a_smaller_network_of_the_same_class():
    for narrow, small in [
        (narrow_network(ResNet(width=8, depth=8), 0.5), ResNet(width=4, depth=8)),
        (narrow_network(ViT(IMAGE, 4, width=16, heads=2), 0.5), ViT(IMAGE, 4, width=8, heads=2)),
        (narrow_network(MLP(9, [8, 6], 3), 0.5), MLP(9, [4, 3], 3)),
    ]:
        assert str(narrow) == str(small)
        shapes = {name: tensor.shape for name, tensor in small.state_dict().items()}
        assert {name: tensor.shape for name, tensor in narrow.state_dict().items()} == shapes


@given(
    widths=st.lists(st.integers(2, 200), min_size=1, max_size=4, unique=True),
    fraction=st.floats(0.05, 2),
    multiple=st.integers(1, 6),
)
def test_one_ratio_scales_all_widths(widths, fraction, multiple):
    table, ratio = scale_widths(widths, fraction, multiple)
    assert ratio >= fraction - 1e-6
    assert all(new == pytest.approx(old * ratio) and new % multiple == 0 and new > 0 for old, new in table.items())


@settings(deadline=None, max_examples=20)
@given(widths=st.lists(st.integers(1, 40), min_size=1, max_size=3), fraction=st.floats(0.1, 1))
def test_any_perceptron_can_be_narrowed(widths, fraction):
    narrow = narrow_network(MLP(7, widths, 3), fraction)
    assert narrow(torch.randn(2, 7)).shape == (2, 3)
    for layer, width in zip(narrow.hidden, widths, strict=True):
        assert width * fraction - 1e-6 <= layer.out_features <= max(1.25 * width * fraction + 1, 1)


def separable() -> nn.Module:
    """Depth-wise, grouped, group-normalised, with a mask of one channel."""
    layers = [nn.Conv2d(3, 12, 3), nn.GroupNorm(4, 12), nn.Conv2d(12, 12, 3, groups=12), nn.Conv2d(12, 24, 1, groups=3)]
    return nn.Sequential(*layers, nn.BatchNorm2d(24), nn.Conv2d(24, 1, 1), nn.Flatten(), nn.LazyLinear(5))


def test_groups_stay_valid():
    network = separable()
    network(torch.zeros(2, 3, 8, 8))
    narrow = narrow_network(network.eval(), 0.5)
    assert [(m.in_channels, m.out_channels, m.groups) for m in narrow if isinstance(m, nn.Conv2d)] == [
        (3, 6, 1), (6, 6, 6), (6, 12, 3), (12, 1, 1),
    ]  # fmt: skip
    assert (narrow[1].num_groups, narrow[1].num_channels) == (3, 6)  # 4 groups do not divide 6 channels
    assert narrow(torch.randn(2, 3, 8, 8)).shape == (2, 5)


def test_hidden_convolutions_are_grouped_and_the_ends_are_not():
    layers = (nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.Conv2d(12, 4, 1), nn.Flatten())
    narrow = narrow_network(nn.Sequential(*layers), 0.5, groups=2)
    assert [(m.in_channels, m.out_channels, m.groups) for m in narrow if isinstance(m, nn.Conv2d)] == [
        (4, 4, 1), (4, 6, 2), (6, 4, 1),
    ]  # fmt: skip


def test_concatenation_and_chunks_scale_with_their_parts():
    def forward(net, x):
        first = torch.relu(net.first(x))
        value, gate = net.second(first).chunk(2, -1)
        return net.head(torch.cat([first, value * gate], -1))

    network = Apply(forward, first=nn.Linear(5, 8), second=nn.Linear(8, 24), head=nn.Linear(20, 3))
    narrow = narrow_network(network, 0.5)
    assert narrow.head.in_features == 10
    assert narrow(torch.randn(2, 5)).shape == (2, 3)


def test_attention_keeps_its_heads():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(20, 12)
            self.block = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)
            self.head = nn.Linear(12, 4)

        def forward(self, tokens):
            return self.head(self.block(self.embedding(tokens)).mean(1))

    narrow = narrow_network(Words(), 0.4)
    attention = narrow.block.self_attn
    assert (attention.embed_dim, attention.num_heads, attention.head_dim) == (6, 3, 2)
    assert narrow.embedding.num_embeddings == 20
    assert narrow(torch.randint(20, (2, 5))).shape == (2, 4)
    assert narrow.train()(torch.randint(20, (2, 5))).shape == (2, 4)


def test_norms_before_the_first_layer_keep_the_input():
    for name in ("batch_norm_1d", "layer_norm_first"):
        network = ZOO[name].make().eval()
        inputs = ZOO[name].inputs(4)
        assert narrow_network(network, 0.5)(inputs).shape == network(inputs).shape
    plain = nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    assert narrow_network(plain, 0.5)[1].weight.shape == (4, 6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reshaping", r"with 0.5 of its hidden widths this Apply does not run, and stops at 'first'"),
        ("encoder_layer", r"inputs .*got 'layer' \(TransformerEncoderLayer\)"),
        ("tied_embedding", r"outputs .*got 'read' \(a parameter"),
        ("batch_norm_on_sequences", "that do not follow from the others"),
    ],
)
def test_what_cannot_be_narrowed_is_refused(name, message):
    with pytest.raises(EnfoldError, match=message):
        narrow_network(ZOO[name].make(), 0.5)


def test_tensors_outside_of_layers():
    def forward(net, x):
        return net.head(torch.relu(net.body(x)) @ net.mix * net.gain)

    def network(mix):
        gain = nn.Parameter(torch.ones(1, 8))
        return Apply(forward, body=nn.Linear(5, 8), head=nn.Linear(8, 3), mix=mix, gain=gain)

    with pytest.raises(EnfoldError, match=r"'mix' of shape \(8, 8\) has 2 such axes"):
        narrow_network(network(nn.Parameter(torch.eye(8))), 0.5)
    unknown = nn.Sequential(nn.Linear(5, 8), nn.PReLU(8), nn.Linear(8, 3))
    with pytest.raises(EnfoldError, match="got '1', a PReLU"):
        narrow_network(unknown, 0.5)
