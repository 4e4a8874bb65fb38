"""Networks of transformers, created from configurations."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from tools.zoo.entry import CLASSES, TOKENS, Entry, images, tokens, vectors

TEXT: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
IMAGE = {"image_size": 16, "patch_size": 4}


def hugging(name: str, inputs: Callable[[int], Tensor], classes: int = CLASSES, **settings: Any) -> Entry:
    """Return the class of this name; the settings are those of its configuration."""

    def make(_: int) -> nn.Module:
        kind = getattr(import_module("transformers"), name.split()[0])
        if classes == CLASSES:
            settings["num_labels"] = CLASSES
        network: nn.Module = kind(kind.config_class(**settings))
        return network

    return Entry(name, "transformers", make, inputs, classes)


NETWORKS = (
    hugging("BertForSequenceClassification", tokens(), **TEXT),
    hugging("DistilBertForSequenceClassification", tokens(), vocab_size=TOKENS, dim=16, n_layers=2, n_heads=2,
            hidden_dim=24),
    hugging("AlbertForSequenceClassification", tokens(), embedding_size=8, **TEXT),
    hugging("DebertaV2ForSequenceClassification", tokens(), relative_attention=True, pos_att_type=["p2c", "c2p"],
            **TEXT),
    hugging("GPT2LMHeadModel", tokens(), TOKENS, vocab_size=TOKENS, n_embd=16, n_layer=2, n_head=2, use_cache=False),
    hugging("GPT2ForSequenceClassification", tokens(), vocab_size=TOKENS, n_embd=16, n_layer=2, n_head=2,
            pad_token_id=0, use_cache=False),
    hugging("LlamaForCausalLM", tokens(), TOKENS, num_key_value_heads=1, use_cache=False, **TEXT),
    hugging("MixtralForCausalLM (eager experts)", tokens(), TOKENS, num_key_value_heads=1, num_local_experts=4,
            use_cache=False, experts_implementation="eager", **TEXT),
    hugging("MambaForCausalLM", tokens(), TOKENS, vocab_size=TOKENS, hidden_size=16, state_size=4,
            num_hidden_layers=2, use_cache=False),
    hugging("T5ForTokenClassification", tokens(), vocab_size=TOKENS, d_model=16, d_kv=8, d_ff=24, num_layers=2,
            num_heads=2),
    hugging("FNetForSequenceClassification", tokens(), **{k: v for k, v in TEXT.items() if k != "num_attention_heads"}),
    hugging("ViTForImageClassification", images(16), **{**TEXT, **IMAGE}),
    hugging("SwinForImageClassification", images(32), image_size=32, embed_dim=8, depths=[1, 2], num_heads=[2, 2],
            window_size=4),
    hugging("ResNetForImageClassification", images(32), embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2]),
    hugging("Wav2Vec2ForSequenceClassification", vectors(200), conv_dim=(8, 8), conv_stride=(5, 2),
            conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
            classifier_proj_size=8, **{k: v for k, v in TEXT.items() if k != "max_position_embeddings"}),
)  # fmt: skip
