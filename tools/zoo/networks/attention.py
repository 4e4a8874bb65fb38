"""Attention, its substitutes and state-space networks: x-transformers, vit-pytorch and small packages."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from tools.zoo.entry import CLASSES, TOKENS, Entry, images, library, tokens, vectors

IMAGE = {"image_size": 16, "patch_size": 4}
VIT = {**IMAGE, "num_classes": CLASSES, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 24}


def _x_transformer(layers: str, wrapper: dict[str, Any], **settings: Any) -> nn.Module:
    library = import_module("x_transformers")
    body = getattr(library, layers)(dim=16, depth=2, heads=2, attn_dim_head=8, **settings)
    network: nn.Module = library.TransformerWrapper(num_tokens=TOKENS, max_seq_len=16, attn_layers=body, **wrapper)
    return network


def _vit_wrapper(_: int) -> nn.Module:
    library = import_module("x_transformers")
    body = library.Encoder(dim=16, depth=2, heads=2, attn_dim_head=8)
    network: nn.Module = library.ViTransformerWrapper(**IMAGE, num_classes=CLASSES, attn_layers=body)
    return network


def _mamba(_: int) -> nn.Module:
    module = import_module("mambapy.mamba")
    network: nn.Module = module.Mamba(module.MambaConfig(d_model=8, n_layers=2, d_state=4))
    return network


def _vit(module: str, name: str, **settings: Any) -> Entry:
    return library(
        "vit-pytorch", f"vit_pytorch.{module}", name, images(16), label=f"vit-pytorch {name}", **{**VIT, **settings}
    )


NETWORKS = (
    Entry("x-transformers encoder, rotary, GLU", "x-transformers",
            lambda _: _x_transformer("Encoder", {"use_abs_pos_emb": False}, rotary_pos_emb=True, ff_glu=True),
            tokens(8), TOKENS),
    Entry("x-transformers decoder, tied", "x-transformers",
            lambda _: _x_transformer("Decoder", {"tie_embedding": True}), tokens(8), TOKENS),
    Entry("x-transformers encoder, classes", "x-transformers",
            lambda _: _x_transformer("Encoder", {"logits_dim": CLASSES, "average_pool_embed": True},
                                     use_rmsnorm=True), tokens(8)),
    Entry("x-transformers ViT", "x-transformers", _vit_wrapper, images(16)),
    _vit("vit", "ViT", dim_head=8, dropout=0.1),
    Entry("vit-pytorch ViT, other heads per member", "vit-pytorch",
            lambda k: import_module("vit_pytorch").ViT(**{**VIT, "heads": (2, 4, 8, 2)[k % 4],
                                                          "dim_head": 16 // (2, 4, 8, 2)[k % 4]}), images(16)),
    _vit("simple_vit", "SimpleViT", dim_head=8),
    _vit("cait", "CaiT", dim_head=8, cls_depth=1),
    _vit("pit", "PiT", dim_head=8, depth=(1, 1)),
    _vit("deepvit", "DeepViT", dim_head=8),
    library("vit-pytorch", "vit_pytorch.cct", "CCT", images(16), img_size=16, embedding_dim=16, n_conv_layers=1,
            kernel_size=3, stride=2, padding=1, pooling_kernel_size=3, pooling_stride=2, pooling_padding=1,
            num_layers=2, num_heads=2, mlp_ratio=2.0, num_classes=CLASSES, positional_embedding="learnable",
            label="vit-pytorch CCT"),
    library("perceiver-pytorch", "perceiver_pytorch", "Perceiver", vectors(6, 6, 3), num_freq_bands=2, depth=2,
            max_freq=4.0, input_channels=3, num_latents=6, latent_dim=16, cross_heads=1, latent_heads=2,
            cross_dim_head=8, latent_dim_head=8, num_classes=CLASSES),
    library("mlp-mixer-pytorch", "mlp_mixer_pytorch", "MLPMixer", images(16), channels=3, dim=16, depth=2,
            num_classes=CLASSES, **IMAGE),
    library("g-mlp-pytorch", "g_mlp_pytorch", "gMLPVision", images(16), num_classes=CLASSES, dim=16, depth=2,
            **IMAGE),
    library("linformer", "linformer", "LinformerLM", tokens(8), num_tokens=TOKENS, dim=16, seq_len=8, depth=2, heads=2,
            dim_head=8, k=4),
    library("performer-pytorch", "performer_pytorch", "PerformerLM", tokens(8), num_tokens=TOKENS, max_seq_len=8,
            dim=16, depth=2, heads=2, dim_head=8, nb_features=8),
    library("reformer-pytorch", "reformer_pytorch", "ReformerLM", tokens(16), num_tokens=TOKENS, dim=16, depth=2,
            max_seq_len=16, heads=2, bucket_size=4),
    library("conformer", "conformer", "Conformer", vectors(10, 16), dim=16, depth=1, dim_head=8, heads=2, ff_mult=2,
            conv_kernel_size=3),
    Entry("mambapy Mamba", "mambapy", _mamba, vectors(8, 8)),
)  # fmt: skip
