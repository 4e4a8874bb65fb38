"""Adapters of peft are members of their base, with the weights that peft merges."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import enfold
from enfold import DeepEnsemble, EnfoldError

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    """Every kind of layer that has adapters."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 3, 1)
        self.inner = nn.Sequential(nn.Linear(18, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        maps = self.conv2(torch.tanh(self.conv1(self.embedding(tokens)[:, None])))
        return self.head(self.inner(maps.mean(2).flatten(1)))


X = torch.randint(0, 11, (5, 6), generator=torch.Generator().manual_seed(0))
TARGETS = ["embedding", "conv1", "conv2", "0", "2"]


def adapted(base, folder, **options):
    """Save a random adapter; return the network that peft merges it into."""
    settings = {"r": 2, "lora_alpha": 5, "target_modules": TARGETS, **options}
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**settings))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale = 1 + 0.3 * torch.rand_like(parameter) if "magnitude" in name else 1
            with torch.no_grad():
                parameter.mul_(scale).add_(0 if "magnitude" in name else 0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.merge_and_unload().eval()


def assert_equal(found, wanted, tolerance=1e-6):
    assert found.state_dict().keys() == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


OPTIONS = {
    "lora": {},
    "rank stabilization": {"use_rslora": True},
    "dora": {"use_dora": True},
    "both": {"use_dora": True, "use_rslora": True},
    "head": {"modules_to_save": ["head"], "bias": "all"},
    "patterns": {"rank_pattern": {"conv1": 3, r"inner\.\d+": 4}, "alpha_pattern": {"^inner.2": 7, "embedding": 1}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_members_have_the_weights_that_peft_merges(options, tmp_path):
    base = Net()
    before = copy.deepcopy(base.state_dict())
    merged = [adapted(base, tmp_path / f"a{index}", **options) for index in range(2)]
    members = DeepEnsemble.from_checkpoints(tmp_path, base)
    for found, wanted in zip(members.networks(), merged, strict=True):
        assert_equal(found, wanted)
        assert not torch.equal(found.conv1.weight, base.conv1.weight)
    torch.testing.assert_close(members(X)[1], merged[1](X))
    assert all(torch.equal(base.state_dict()[name], tensor) for name, tensor in before.items())


def model_of(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 30, "num_labels": 3}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, pad_token_id=0, **sizes)
        return transformers.AutoModelForSequenceClassification.from_config(config), ["c_attn", "c_fc"]
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, **sizes
    )
    return transformers.AutoModelForSequenceClassification.from_config(config), ["query", "value"]


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_of_transformers(kind, use_dora, tmp_path):
    base, targets = model_of(kind)
    options = {"target_modules": targets, "task_type": "SEQ_CLS", "use_dora": use_dora, "use_rslora": True}
    merged = [adapted(base, tmp_path / name, **options) for name in ("a", "b", "c")]
    members = DeepEnsemble.from_checkpoints(str(tmp_path / "*"), base)
    for found, wanted in zip(members.networks(), merged, strict=True):
        assert_equal(found, wanted)


def test_the_merge_of_members_is_that_of_their_changes(tmp_path):
    base = Net()
    merged = [adapted(base, tmp_path / name) for name in ("a", "b")]
    members = DeepEnsemble.from_checkpoints(tmp_path, base)
    found = enfold.merge.lora(members, base=base)
    wanted = (merged[0].inner[0].weight + merged[1].inner[0].weight) / 2
    torch.testing.assert_close(found.inner[0].weight, wanted)


@pytest.mark.slow
def test_compress_takes_adapters(tmp_path):
    base = Net()
    for name in ("a", "b"):
        adapted(base, tmp_path / name)
    tokens = torch.randint(0, 11, (40, 6))
    data = (tokens, base(tokens).argmax(1))
    result = enfold.compress(str(tmp_path), data, data, network=lambda: base, epochs=1, quiet=True, time=5)
    assert isinstance(result.network, Net)


def change(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def tensors(folder, edit):
    path = folder / "adapter_model.safetensors"
    state = load_file(path)
    save_file(edit(state), path)


LAYER = "base_model.model.inner.0"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"init_lora_weights": ["x"]}, "initialization"),
        ({"use_qalora": True}, "use_qalora"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"use_dora": True}, "only"),
        ({"r": 3}, "rank of"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "not a simple pattern"),
        ({"alpha_pattern": {".*.*.*.*.*x": 3}}, "not a simple pattern"),
        ({"alpha_pattern": {"inner": None}}, "alpha_pattern"),
        ({"rank_pattern": [3]}, "rank_pattern"),
    ],
)
def test_other_adapters_are_refused(config, message, tmp_path):
    base = Net()
    adapted(base, tmp_path)
    change(tmp_path, **config)
    with pytest.raises(EnfoldError, match=message):
        DeepEnsemble.from_checkpoints(tmp_path, base)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda s: {n.replace("inner.0", "iner.0"): t for n, t in s.items()},
            r"no 'iner\.0\.weight' \(nearest: 'inner",
        ),
        (lambda s: {n: t for n, t in s.items() if n != f"{LAYER}.lora_A.weight"}, "inner.0' has B only"),
        (lambda s: {**s, f"{LAYER}.lora_A.weight": torch.zeros(2, 17)}, "shapes"),
        (lambda s: {**s, f"{LAYER}.lora_B.weight": torch.zeros(8, 3)}, "shapes"),
        (lambda s: {**s, f"{LAYER}.lora_C.weight": torch.zeros(8)}, "lora_C"),
        (lambda s: {**s, "base_model.model.head.weight": torch.zeros(3, 9)}, r"head\.weight.*\(3, 9\)"),
        (lambda s: {**s, "head.weight": torch.zeros(3, 8)}, "begin with"),
        (lambda s: {}, "no lora_A"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(edit, message, tmp_path):
    base = Net()
    adapted(base, tmp_path)
    tensors(tmp_path, edit)
    before = copy.deepcopy(base.state_dict())
    with pytest.raises(EnfoldError, match=message):
        DeepEnsemble.from_checkpoints(tmp_path, base)
    assert all(torch.equal(base.state_dict()[name], tensor) for name, tensor in before.items())


def test_adapters_of_different_bases_are_refused(tmp_path):
    base = Net()
    for name in ("a", "b"):
        adapted(base, tmp_path / name)
        change(tmp_path / name, base_model_name_or_path=f"base-{name}")
    with pytest.raises(EnfoldError, match=r"adapters must have one base.*'base-a'.*'base-b'"):
        DeepEnsemble.from_checkpoints(tmp_path, base)


def test_a_function_that_draws_weights_is_no_base(tmp_path):
    adapted(Net(), tmp_path)
    with pytest.raises(EnfoldError, match=r"network must make the base .* differs in each call"):
        DeepEnsemble.from_checkpoints(tmp_path, Net)


def test_incomplete_folders_are_refused(tmp_path):
    base = Net()
    adapted(base, tmp_path)
    save_file(base.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(EnfoldError, match=r"'model\.safetensors' is beside it"):
        DeepEnsemble.from_checkpoints(tmp_path, base)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EnfoldError, match="adapter_config"):
        enfold.merge.task_arithmetic(DeepEnsemble(Net, 2), base=tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(EnfoldError, match=r"'adapter_model\.safetensors' is missing"):
        DeepEnsemble.from_checkpoints(tmp_path, base)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def test_adapters_of_tied_weights_are_refused(tmp_path):
    adapted(Tied(), tmp_path, target_modules=["first"])
    with pytest.raises(EnfoldError, match=r"'first\.weight' is one tensor with 'second\.weight'"):
        DeepEnsemble.from_checkpoints(tmp_path, Tied())
