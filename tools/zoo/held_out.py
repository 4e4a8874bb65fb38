"""Held-out networks: checks and fixes are made without them. They are run last, with `--held-out`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor, nn

from tools.zoo.entry import CLASSES, TOKENS, Entry, images, library, tokens, vectors
from tools.zoo.networks.hugging import TEXT, hugging


class Head(nn.Module):
    """A body that returns a sequence, or a sequence and a state, followed by logits of the mean."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        found = self.body(inputs)
        found = found[0] if isinstance(found, tuple) else found
        return self.head(found.mean(1) if found.ndim == 3 else found)


def _timm(name: str, size: int, **settings: Any) -> Entry:
    def make(_: int) -> nn.Module:
        network: nn.Module = import_module("timm").create_model(name, num_classes=CLASSES, **settings)
        return network

    return Entry(f"timm {name}", "timm", make, images(size))


def _headed(package: str, module: str, name: str, width: int, inputs: Any, *args: Any, **settings: Any) -> Entry:
    return Entry(
        f"{package} {name}",
        package,
        lambda _: Head(getattr(import_module(module), name)(*args, **settings), width),
        inputs,
    )


def _liquid(_: int) -> nn.Module:
    module = import_module("ncps.torch")
    return Head(module.CfC(6, 12, batch_first=True), 12)


def _orthogonal(_: int) -> nn.Module:
    geotorch = import_module("geotorch")
    network = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    geotorch.orthogonal(network[0], "weight")
    return network


def _numbers(_: int) -> nn.Module:
    module = import_module("rtdl_num_embeddings")
    embedding = module.PeriodicEmbeddings(6, 8, lite=False)
    return nn.Sequential(embedding, nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def _adversarial(_: int) -> nn.Module:
    module = import_module("pytorch_revgrad")
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), module.RevGrad(), nn.Linear(16, CLASSES))


class Registered(nn.Module):
    """A cosine head whose scale is a property, and a norm whose statistics a flag of the member switches off."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.first, self.norm = (
            nn.Linear(8, 16),
            nn.BatchNorm1d(16, momentum=0.1 * (1 + index), eps=10.0 ** -(2 + index)),
        )
        self.last = nn.Linear(16, CLASSES)
        self.temperature = type("Temperature", (), {"value": 1.0 + index})()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        return self.last(self.norm(self.first(inputs)).relu()) / self.temperature.value


class Counting(nn.Module):
    """Counts its calls in a plain number that changes outputs in train mode only."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.first, self.last, self.calls = nn.Linear(8, 16), nn.Linear(16, CLASSES), 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        self.calls += self.training
        return self.last(self.first(inputs).relu()) * (0.5**self.calls if self.training else 1.0)


HELD_OUT: tuple[Entry, ...] = (
    _timm("levit_128s", 32, img_size=32, embed_dim=(16, 16, 16), key_dim=8, num_heads=(2, 2, 2), depth=(1, 1, 1)),
    _timm("resnetv2_50", 32, layers=(1, 1, 1, 1), channels=(8, 8, 16, 16), stem_chs=8),
    library("torchvision", "torchvision.models", "VisionTransformer", images(16), image_size=16, patch_size=8,
            num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=CLASSES),
    hugging("ElectraForSequenceClassification", tokens(), embedding_size=8, **TEXT),
    hugging("RoFormerForSequenceClassification", tokens(), embedding_size=16, **TEXT),
    hugging("ConvNextV2ForImageClassification", images(32), hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    hugging("GPTNeoXForCausalLM", tokens(), TOKENS, use_cache=False, **TEXT),
    library("vit-pytorch", "vit_pytorch.nest", "NesT", images(16), image_size=16, patch_size=4, dim=8, heads=2,
            num_hierarchies=2, block_repeats=(1, 1), num_classes=CLASSES, label="vit-pytorch NesT"),
    library("res-mlp-pytorch", "res_mlp_pytorch", "ResMLP", images(16), image_size=16, patch_size=4, dim=16, depth=2,
            num_classes=CLASSES),
    _headed("minGRU-pytorch", "minGRU_pytorch", "minGRU", 8, vectors(6, 8), 8),
    _headed("nystrom-attention", "nystrom_attention", "Nystromformer", 16, vectors(8, 16), dim=16, depth=1, heads=2,
            dim_head=8, num_landmarks=4, pinv_iterations=2),
    library("local-attention", "local_attention", "LocalTransformer", tokens(8), num_tokens=TOKENS, dim=16, depth=1,
            max_seq_len=8, causal=True, local_attn_window_size=4, heads=2, dim_head=8),
    _headed("soft-moe-pytorch", "soft_moe_pytorch", "SoftMoE", 16, vectors(8, 16), dim=16, seq_len=8, num_experts=2),
    Entry("ncps CfC", "ncps", _liquid, vectors(5, 6)),
    Entry("geotorch orthogonal layer", "geotorch", _orthogonal, vectors(8)),
    Entry("rtdl periodic embeddings", "rtdl_num_embeddings", _numbers, vectors(6)),
    Entry("gradient reversal", "pytorch-revgrad", _adversarial, vectors(8)),
    library("torch_geometric", "torch_geometric.nn", "MLP", vectors(8), [8, 16, CLASSES], dropout=0.2,
            label="PyG MLP"),
    Entry("hazard: settings of a norm, an object", "by hand", Registered, vectors(8)),
    Entry("hazard: counts calls in train mode", "by hand", Counting, vectors(8)),
)  # fmt: skip
