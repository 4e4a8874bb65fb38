"""LoRA-Ensemble: start, rank, adapted layers, frozen parameters and heads."""

import math

import pytest
import torch
from torch import Tensor, nn

import enfold
from clouds import three_clouds
from enfold.ensembles.lora_ensemble import LoRAEnsemble
from enfold.errors import EnfoldError
from enfold.networks import MLP, ResNet, ViT
from enfold.train import TrainConfig, fit
from fitting import any_network, fitted


class Attends(nn.Module):
    """Torch's own attention with keys of another width, a joint projection by name, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)
        self.fused = nn.ModuleDict({"qkv": nn.Linear(8, 24), "proj": nn.Linear(8, 8)})
        self.other = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x[..., :6], x[..., :6])
        q, k, v = self.fused["qkv"](y).chunk(3, -1)
        y = self.fused["proj"]((q @ k.transpose(1, 2)).softmax(-1) @ v)
        return self.head(self.other(y).mean(1))


def varied(members):
    """Values for B, which is 0 at first."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in members.low_rank.named_parameters():
            if name.endswith(".B"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return members


def test_members_start_as_the_source():
    network, inputs = ViT((3, 8, 8), 4, width=16, depth=2, heads=2), torch.randn(3, 3, 8, 8)
    members = LoRAEnsemble(network, 3).eval()
    torch.testing.assert_close(members(inputs), network.eval()(inputs).expand(3, 3, 4), rtol=1e-5, atol=1e-6)
    assert all((tensor == 0).all() for name, tensor in members.low_rank.named_parameters() if name.endswith(".B"))


def test_a_linear_layer_is_equation_1():
    layer, inputs = nn.Linear(6, 5), torch.randn(7, 6)
    members = varied(LoRAEnsemble(layer, 3, rank=2, alpha=4.0))
    down, up = members.low_rank.state()["weight.A"][:, 0], members.low_rank.state()["weight.B"][:, 0]
    expected = [layer(inputs) + 2.0 * (inputs @ down[m].T @ up[m].T) for m in range(3)]
    torch.testing.assert_close(members(inputs), torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [nn.Linear(12, 10), nn.Conv2d(4, 10, 3), nn.ConvTranspose1d(8, 6, 3)])
def test_what_a_member_adds_has_the_rank(layer):
    members = varied(LoRAEnsemble(layer, 2, rank=3))
    added = (members.expand()["weight"] - layer.weight).detach().double().flatten(2)
    values = torch.linalg.svdvals(added)
    assert (values[:, 3:] < 1e-5 * values[:, :1]).all()
    assert (values[:, 2] > 1e-3 * values[:, 0]).all()


def test_a_rank_above_the_layers_is_the_layers():
    assert LoRAEnsemble(nn.Linear(6, 4), 2, rank=64).low_rank.state()["weight.A"].shape == (2, 1, 4, 6)


def test_attention_is_adapted_by_default():
    adapted = set(LoRAEnsemble(ViT((3, 8, 8), 4, width=8, depth=1, heads=2), 2).shapes)
    assert adapted == {f"blocks.0.attention.{name}.weight" for name in ("query", "key", "value", "out")}
    others = set(LoRAEnsemble(MLP(6, [8, 8], 3), 2).shapes)
    assert others == {"hidden.0.weight", "hidden.1.weight"}
    residual = ResNet(width=4, depth=8)
    kernels = {f"{name}.weight" for name, part in residual.named_modules() if isinstance(part, nn.Conv2d)}
    assert set(LoRAEnsemble(residual, 2).shapes) == kernels  # the head is owned


def test_query_key_and_value_are_separate_blocks():
    network = Attends().eval()
    members = varied(LoRAEnsemble(network, 2, rank=2).eval())
    assert members.shapes == {
        "attention.q_proj_weight": (1, 8, 8),
        "attention.k_proj_weight": (1, 8, 6),
        "attention.v_proj_weight": (1, 8, 6),
        "attention.out_proj.weight": (1, 8, 8),
        "fused.qkv.weight": (3, 8, 8),
        "fused.proj.weight": (1, 8, 8),
    }
    added = (members.expand()["fused.qkv.weight"] - network.fused["qkv"].weight).view(2, 3, 8, 8)
    assert (torch.linalg.matrix_rank(added.detach().double(), rtol=1e-5) == 2).all()
    joint = LoRAEnsemble(nn.TransformerEncoderLayer(8, 2, 16), 2, rank=2)
    assert joint.shapes["self_attn.in_proj_weight"] == (3, 8, 8)
    inputs = torch.randn(3, 5, 8)
    torch.testing.assert_close(members(inputs)[1], members.member(1)(inputs), rtol=1e-4, atol=1e-5)


def test_patterns_choose_layers():
    network = MLP(6, [8, 8], 3)
    assert set(LoRAEnsemble(network, 2, include=(r"hidden\.1",)).shapes) == {"hidden.1.weight"}
    assert set(LoRAEnsemble(network, 2, exclude=(r"hidden\.1",)).shapes) == {"hidden.0.weight"}
    alone = LoRAEnsemble(network, 2, include=("head",))
    assert set(alone.shapes) == {"head.weight"}
    assert not alone.own.state()
    with pytest.raises(EnfoldError, match="'nothing' matches none of"):
        LoRAEnsemble(network, 2, include=("nothing",))


def test_the_head_is_each_members_own_copied_drawn_or_shared():
    network = MLP(6, [8], 3)
    own = LoRAEnsemble(network, 3)
    assert set(own.own.state()) == {"head.weight", "head.bias"}
    torch.testing.assert_close(own.own.state()["head.weight"][2], network.head.weight)
    drawn = LoRAEnsemble(network, 3, head="drawn").own.state()["head.weight"]
    assert not torch.allclose(drawn[0], drawn[1])
    assert not torch.allclose(drawn[0], network.head.weight)
    torch.testing.assert_close(LoRAEnsemble(network, 4, head="drawn").own.state()["head.weight"][:3], drawn)
    shared = LoRAEnsemble(network, 3, head="shared")
    assert not shared.own.state()
    assert "head.weight" in shared.shapes


@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
@pytest.mark.parametrize("frozen", [True, False])
def test_shared_weights_are_frozen_or_trained(frozen):
    torch.manual_seed(0)
    data, network = three_clouds(32, 0, 8), MLP(4, [8], 3)
    members = LoRAEnsemble(network, 2, rank=2, frozen=frozen)
    assert all(parameter.requires_grad != frozen for parameter in members.shared.parameters())
    assert all(parameter.requires_grad for parameter in members.low_rank.parameters())
    fit(members, data, config=TrainConfig(epochs=2, batch_size=16), quiet=True)
    same = torch.equal(members.shared.state()["hidden.0.weight"], network.hidden[0].weight)
    assert same == frozen
    assert members.member(0).hidden[0].weight.requires_grad  # a member taken out is as trainable as the source


def test_the_gain_is_the_size_of_a():
    layer = nn.Linear(40, 30)
    xavier = LoRAEnsemble(layer, 4).low_rank.state()["weight.A"]
    bound = 10 * math.sqrt(6 / 48)
    assert 0.95 * bound < xavier.abs().max() <= bound
    normal = LoRAEnsemble(layer, 4, init="normal").low_rank.state()["weight.A"]
    assert abs(float(normal.detach().std()) - 0.02) < 0.002
    torch.testing.assert_close(LoRAEnsemble(layer, 4, gain=1.0).low_rank.state()["weight.A"], xavier / 10)


def test_statistics_of_batch_norms_are_owned_and_their_parameters_not():
    members = LoRAEnsemble(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)), 2)
    assert members.own.state()["1.running_mean"].shape == (2, 6)
    assert "1.weight" in members.shared.state()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"rank .*got 0"),
        ({"gain": 0}, r"gain .*got 0"),
        ({"init": "ones"}, r"init .*got 'ones'"),
        ({"head": "none"}, r"head .*got 'none'"),
        ({"num_members": 0}, r"num_members .*got 0"),
    ],
)
def test_invalid_options_are_refused(settings, message):
    with pytest.raises(EnfoldError, match=message):
        LoRAEnsemble(any_network(), **settings)


def test_members_are_trained_with_separate_settings_and_stored(tmp_path):
    torch.manual_seed(0)
    data, network = three_clouds(96, 48, 8), MLP(4, [16, 16], 3)
    plan = TrainConfig(epochs=6, batch_size=16, lr=(0.02, 0.01, 0.03))  # all that is trained belongs to a member
    trained = fitted(LoRAEnsemble(network, 3, rank=2), data, plan)
    loaded = enfold.load(enfold.save(trained, tmp_path / "members.safetensors"), network)
    torch.testing.assert_close(loaded(data.test.inputs), trained(data.test.inputs), rtol=0, atol=0)
    right = trained(data.train.inputs).argmax(-1) == data.train.labels
    assert right.float().mean() > 0.6
