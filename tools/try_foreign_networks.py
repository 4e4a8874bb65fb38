"""Find and try the symmetries of small networks that other people wrote: results/foreign-networks.json.

pip install transformers x-transformers vit-pytorch perceiver-pytorch mlp-mixer-pytorch linformer conformer mambapy \
    efficientnet-pytorch pytorchcv rtdl_revisiting_models tabm torchvision timm segmentation-models-pytorch monai
python tools/try_foreign_networks.py

A network whose package is missing is left out, and a line says what to install. Every network is built small, with
random weights; then every group is given a random order, all at once, in float64, and outputs are compared with those
before. Weights and statistics are drawn anew for that, so that a zero at the start hides nothing.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.files import write_json
from enfold.store import versions
from enfold.symmetry import Symmetry, permute, symmetries
from enfold.symmetry.trace import float_outputs, in_double

RESULT = Path(__file__).parent.parent / "results" / "foreign-networks.json"
EVERYWHERE = (  # reasons that any network has
    "they are the network's inputs",
    "they are the network's outputs",
    "they are the places of a kernel",
    "the network's inputs number them",
)
TOKENS = 50
TEXT = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
IMAGES = {"image_size": 16, "patch_size": 4}
VIT = {**IMAGES, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 24}

Made = tuple[nn.Module, Tensor]


class Foreign(NamedTuple):
    """A network: what it is called, the package it is from, and how a small one and two inputs are made."""

    name: str
    package: str
    make: Callable[[], Made]


class Called(nn.Module):
    """A network that takes more than one argument."""

    def __init__(self, body: nn.Module, *more: Any) -> None:
        super().__init__()
        self.body, self.more = body, more

    def forward(self, x: Tensor) -> Any:
        """Of the one input."""
        return self.body(x, *self.more)


def text() -> Tensor:
    """Two sentences of eight tokens."""
    return torch.randint(1, TOKENS, (2, 8))


def images(size: int = 16, channels: int = 3) -> Tensor:
    """Two images."""
    return torch.randn(2, channels, size, size)


def made(module: str, name: str, *args: Any, **settings: Any) -> nn.Module:
    """A class or function of a module, called."""
    found: nn.Module = getattr(import_module(module), name)(*args, **settings)
    return found


def hugging(name: str, inputs: Callable[[], Tensor], **settings: Any) -> Foreign:
    """A network of transformers: NAME is its class, and the settings are of its configuration."""

    def make() -> Made:
        library = import_module("transformers")
        kind = getattr(library, name.split()[0])
        return kind(kind.config_class(**settings)), inputs()

    return Foreign(name, "transformers", make)


def foreign(name: str, package: str, inputs: Callable[[], Tensor], module: str, *args: Any, **settings: Any) -> Foreign:
    """A network that a class or function called NAME in a module makes."""
    return Foreign(name, package, lambda: (made(module, name.split()[0], *args, **settings), inputs()))


def _x_transformer() -> Made:
    layers = made(
        "x_transformers", "Encoder", dim=16, depth=2, heads=2, attn_dim_head=8, rotary_pos_emb=True, ff_glu=True
    )
    settings = {"num_tokens": TOKENS, "max_seq_len": 16, "use_abs_pos_emb": False}
    return made("x_transformers", "TransformerWrapper", attn_layers=layers, **settings), text()


def _ft_transformer() -> Made:
    kind = import_module("rtdl_revisiting_models").FTTransformer
    settings = {**kind.get_default_kwargs(n_blocks=2), "d_block": 16, "attention_n_heads": 2}
    return Called(kind(n_cont_features=4, cat_cardinalities=[], d_out=3, **settings), None), torch.randn(2, 4)


def _tabm() -> Made:
    kind = import_module("tabm").TabM
    return kind.make(n_num_features=4, d_out=3, n_blocks=2, d_block=16, k=4), torch.randn(2, 4)


def _mamba() -> Made:
    module = import_module("mambapy.mamba")
    return module.Mamba(module.MambaConfig(d_model=8, n_layers=2, d_state=4)), torch.randn(2, 8, 8)


def _efficientnet() -> Made:
    kind = import_module("efficientnet_pytorch").EfficientNet
    settings = {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.5}
    return kind.from_name("efficientnet-b0", num_classes=5, **settings), images(32)


def _timm(name: str, size: int, **settings: Any) -> Foreign:
    return Foreign(name, "timm", lambda: (made("timm", "create_model", name, num_classes=5, **settings), images(size)))


def _pytorchcv(name: str) -> Foreign:
    make = lambda: (made("pytorchcv.model_provider", "get_model", name, num_classes=5), images(224))  # noqa: E731
    return Foreign(name, "pytorchcv", make)


VISION = "torchvision.models"
NETWORKS = (
    hugging("BertForSequenceClassification", text, **TEXT),
    hugging(
        "DistilBertForSequenceClassification", text, vocab_size=TOKENS, dim=16, n_layers=2, n_heads=2, hidden_dim=24
    ),
    hugging("AlbertForSequenceClassification", text, embedding_size=8, **TEXT),
    hugging("DebertaV2ForSequenceClassification", text, relative_attention=True, pos_att_type=["p2c", "c2p"], **TEXT),
    hugging("GPT2LMHeadModel", text, vocab_size=TOKENS, n_embd=16, n_layer=2, n_head=2, use_cache=False),
    hugging("LlamaForCausalLM", text, num_key_value_heads=1, use_cache=False, **TEXT),
    hugging("MixtralForCausalLM", text, num_key_value_heads=1, num_local_experts=4, use_cache=False, **TEXT),
    hugging("MixtralForCausalLM (eager experts)", text, num_key_value_heads=1, num_local_experts=4, use_cache=False,
            experts_implementation="eager", **TEXT),
    hugging("BigBirdForSequenceClassification", text, **TEXT),
    hugging("FNetForSequenceClassification", text, **{k: v for k, v in TEXT.items() if k != "num_attention_heads"}),
    hugging("FunnelForSequenceClassification", text, vocab_size=TOKENS, d_model=16, n_head=2, d_head=8, d_inner=24,
            block_sizes=[1, 1]),
    hugging(
        "T5ForTokenClassification", text, vocab_size=TOKENS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2
    ),
    hugging("MambaForCausalLM", text, vocab_size=TOKENS, hidden_size=16, state_size=4, num_hidden_layers=2),
    hugging("ViTForImageClassification", images, **{**TEXT, **IMAGES}),
    hugging("SwinForImageClassification", lambda: images(32), image_size=32, embed_dim=8, depths=[2, 2],
            num_heads=[2, 2], window_size=4),
    hugging("ConvNextForImageClassification", lambda: images(32), hidden_sizes=[8, 16], depths=[2, 2], num_stages=2),
    hugging("ResNetForImageClassification", lambda: images(32), embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2]),
    hugging("MobileNetV2ForImageClassification", lambda: images(64), depth_multiplier=0.25, image_size=64),
    hugging("Wav2Vec2ForSequenceClassification", lambda: torch.randn(2, 200), conv_dim=(8, 8), conv_stride=(5, 2),
            conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
            classifier_proj_size=8, **{k: v for k, v in TEXT.items() if k != "max_position_embeddings"}),
    Foreign("TransformerWrapper (rotary, GLU)", "x-transformers", _x_transformer),
    foreign("ViT", "vit-pytorch", images, "vit_pytorch.vit", dim_head=8, **VIT),
    foreign("CaiT", "vit-pytorch", images, "vit_pytorch.cait", dim_head=8, cls_depth=1, **VIT),
    foreign("CvT", "vit-pytorch", lambda: images(32), "vit_pytorch.cvt", num_classes=5, s1_emb_dim=8, s1_depth=1,
            s2_emb_dim=16, s2_heads=2, s2_depth=1, s3_emb_dim=16, s3_heads=2, s3_depth=1),
    foreign("PiT", "vit-pytorch", images, "vit_pytorch.pit", dim_head=8, **{**VIT, "depth": (1, 1)}),
    foreign("Perceiver", "perceiver-pytorch", lambda: torch.randn(2, 8, 8, 3), "perceiver_pytorch", num_freq_bands=2,
            depth=2, max_freq=4.0, input_channels=3, num_latents=6, latent_dim=16, cross_heads=1, latent_heads=2,
            cross_dim_head=8, latent_dim_head=8, num_classes=5),
    foreign("MLPMixer", "mlp-mixer-pytorch", images, "mlp_mixer_pytorch", channels=3, dim=16, depth=2, num_classes=5,
            **IMAGES),
    foreign("LinformerLM", "linformer", text, "linformer", num_tokens=TOKENS, dim=16, seq_len=8, depth=2, heads=2,
            dim_head=8, k=4),
    foreign("Conformer", "conformer", lambda: torch.randn(2, 10, 16), "conformer", dim=16, depth=2, dim_head=8, heads=2,
            ff_mult=2, conv_kernel_size=3),
    Foreign("Mamba", "mambapy", _mamba),
    Foreign("EfficientNet-B0, narrow", "efficientnet-pytorch", _efficientnet),
    _pytorchcv("shufflenet_g3_wd4"),
    _pytorchcv("igcv3_wd4"),
    Foreign("FTTransformer", "rtdl_revisiting_models", _ft_transformer),
    Foreign("TabM", "tabm", _tabm),
    foreign("DenseNet", "torchvision", lambda: images(64), VISION, growth_rate=4, block_config=(2, 2, 2, 2),
            num_init_features=8, num_classes=5),
    foreign("shufflenet_v2_x0_5", "torchvision", lambda: images(64), VISION, num_classes=5),
    foreign("mobilenet_v3_small", "torchvision", lambda: images(64), VISION, num_classes=5, width_mult=0.5),
    foreign("MaxVit", "torchvision", lambda: images(32), VISION, input_size=(32, 32), stem_channels=8, head_dim=4,
            block_channels=[8], block_layers=[1], stochastic_depth_prob=0.0, partition_size=4, num_classes=5),
    _timm("ghostnet_050", 32),
    _timm("xcit_nano_12_p16_224", 224, depth=2, embed_dim=16, num_heads=2),
    foreign("Unet", "segmentation-models-pytorch", lambda: images(32), "segmentation_models_pytorch", "mobilenet_v2",
            encoder_weights=None, classes=2, decoder_channels=(32, 16, 16, 8, 8)),
    foreign("UNETR", "monai", lambda: images(32, 1), "monai.networks.nets", in_channels=1, out_channels=2,
            img_size=(32, 32), spatial_dims=2, feature_size=4, hidden_size=16, mlp_dim=24, num_heads=2),
)  # fmt: skip


def declare_operators() -> None:
    """Let a torchvision import whose binary is for another torch: its networks need none of its operators."""
    try:
        import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(library)


KEPT: list[object] = []  # definitions end with the library that made them


def drawn(network: nn.Module) -> nn.Module:
    """The network in float64 with weights and statistics moved away from where they start."""
    network = network.double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in network.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(0.1 * torch.rand_like(buffer))
    return network


def outputs_of(network: nn.Module, inputs: Tensor) -> Tensor:
    """All outputs in one row; what is random in the network is the same each time."""
    torch.manual_seed(1)
    with torch.no_grad(), in_double():
        return torch.cat([output.flatten() for output in float_outputs(network(inputs))])


def difference(network: nn.Module, inputs: Tensor, symmetry: Symmetry) -> float:
    """Largest difference of the outputs after a random order of every group, relative to the largest output."""
    network = drawn(network)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    before = outputs_of(network, inputs)
    tensors = {
        **dict(network.named_parameters(remove_duplicate=False)),
        **dict(network.named_buffers(remove_duplicate=False)),
    }
    orders = {group.name: torch.randperm(group.size) for group in symmetry.groups}
    changed = permute({name: tensor.detach().clone() for name, tensor in tensors.items()}, symmetry, orders)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(changed[name])
    return float((outputs_of(network, inputs) - before).abs().max() / before.abs().max())


def share_of(network: nn.Module, symmetry: Symmetry) -> float:
    """How much of all parameters some group moves."""
    moved = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in network.named_parameters()}
    for axis in (axis for group in symmetry.groups for axis in group.axes if axis.name in moved):
        axis.units_first(moved[axis.name]).fill_(True)
    return sum(int(mask.sum()) for mask in moved.values()) / sum(mask.numel() for mask in moved.values())


def tried(one: Foreign) -> dict[str, Any]:
    """What was found for one network, or why it was refused."""
    torch.manual_seed(0)
    network, inputs = one.make()
    network.eval()
    learned = dict(network.named_parameters())
    parameters = sum(tensor.numel() for tensor in learned.values())
    row: dict[str, Any] = {"package": one.package, "version": version(one.package), "parameters": parameters}
    start = time.perf_counter()
    try:
        symmetry = symmetries(network, inputs)
    except EnfoldError as error:
        return {**row, "refused": str(error)}
    seconds = round(time.perf_counter() - start, 2)
    reasons = Counter(fixed.reason for fixed in symmetry.fixed if fixed.name in learned)
    found = {"groups": len(symmetry), "share": share_of(network, symmetry), "seconds": seconds, "note": symmetry.note}
    if symmetry.groups:
        found["difference"] = difference(network, inputs, symmetry)
    return {**row, **found, "fixed": dict(reasons.most_common())}


def line(name: str, row: dict[str, Any]) -> str:
    """One network of the table."""
    if "refused" in row:
        return f"{name:38} {row['package']:28} refused: {row['refused']}"
    why = [f"{count} {reason}" for reason, count in row["fixed"].items() if reason not in EVERYWHERE]
    figures = f"{row['parameters']:>9,} {row['groups']:>4} {row['share']:>7.1%} {row.get('difference', 0):.0e}"
    return f"{name:38} {row['package']:28} {figures} {row['seconds']:>5.1f} s  {'; '.join(why)}"


def main() -> None:
    """All networks whose packages are there."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    declare_operators()
    rows: dict[str, Any] = {}
    missing: dict[str, str] = {}
    print("network, package, parameters, groups, share permuted, largest difference, seconds, what else is fixed")
    for one in NETWORKS:
        try:
            rows[one.name] = tried(one)
        except ModuleNotFoundError as error:
            missing[one.name] = f"pip install {one.package} ({error})"
            print(f"{one.name:38} left out: {missing[one.name]}", flush=True)
        else:
            print(line(one.name, rows[one.name]), flush=True)
    command = "python tools/try_foreign_networks.py"
    about = {"command": command, "date": time.strftime("%Y-%m-%d"), "versions": versions()}
    write_json(RESULT, {**about, "left_out": missing, "networks": rows})


if __name__ == "__main__":
    main()
