"""Networks for tables and features: rtdl, TabM, TabNet, DeepCTR, KAN."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tools.zoo.entry import CLASSES, Called, Entry, library, vectors


def _ft_transformer(_: int) -> nn.Module:
    kind = import_module("rtdl_revisiting_models").FTTransformer
    settings = {**kind.get_default_kwargs(n_blocks=2), "d_block": 16, "attention_n_heads": 2}
    body = kind(n_cont_features=6, cat_cardinalities=[], d_out=CLASSES, **settings)
    return Called(body, _with_none)


def _with_none(body: nn.Module, inputs: Tensor) -> Any:
    return body(inputs, None)


def _tabm(_: int) -> nn.Module:
    network: nn.Module = import_module("tabm").TabM.make(n_num_features=6, d_out=CLASSES, n_blocks=2, d_block=16, k=4)
    return network


def _tabnet(_: int) -> nn.Module:
    module = import_module("pytorch_tabnet.tab_network")
    groups = torch.eye(6)
    network: nn.Module = module.TabNet(6, CLASSES, n_d=8, n_a=8, n_steps=2, n_independent=1, n_shared=1,
                                       virtual_batch_size=4, group_attention_matrix=groups)  # fmt: skip
    return Called(network, _first)


def _tabnet_itself(_: int) -> nn.Module:
    module = import_module("pytorch_tabnet.tab_network")
    groups = torch.eye(6)
    network: nn.Module = module.TabNet(6, CLASSES, n_d=8, n_a=8, n_steps=2, n_independent=1, n_shared=1,
                                       virtual_batch_size=4, group_attention_matrix=groups)  # fmt: skip
    return network


def _first(body: nn.Module, inputs: Tensor) -> Any:
    return body(inputs)[0]


def _deepctr(name: str) -> Entry:
    def make(_: int) -> nn.Module:
        features = import_module("deepctr_torch.inputs")
        columns = [features.DenseFeat(f"d{k}", 1) for k in range(4)]
        columns += [features.SparseFeat(f"s{k}", 5, embedding_dim=4) for k in range(2)]
        kind = getattr(import_module("deepctr_torch.models"), name)
        network: nn.Module = kind(columns, columns, dnn_hidden_units=(16, 8), task="binary")
        return network

    def inputs(count: int) -> Tensor:
        return torch.cat([torch.randn(count, 4), torch.randint(0, 5, (count, 2)).float()], 1)

    return Entry(f"deepctr {name}", "deepctr-torch", make, inputs, 2)


def _kan(_: int) -> nn.Module:
    kind = import_module("kan").MultKAN
    network: nn.Module = kind(width=[6, 4, CLASSES], grid=3, k=2, seed=0, auto_save=False, save_act=False)
    return network


NETWORKS = (
    library("rtdl_revisiting_models", "rtdl_revisiting_models", "MLP", vectors(6), d_in=6, d_out=CLASSES, n_blocks=2,
            d_block=16, dropout=0.1, label="rtdl MLP"),
    library("rtdl_revisiting_models", "rtdl_revisiting_models", "ResNet", vectors(6), d_in=6, d_out=CLASSES,
            n_blocks=2, d_block=16, d_hidden=24, d_hidden_multiplier=None, dropout1=0.1, dropout2=0.0,
            label="rtdl ResNet"),
    Entry("rtdl FTTransformer", "rtdl_revisiting_models", _ft_transformer, vectors(6)),
    Entry("TabM", "tabm", _tabm, vectors(6)),
    Entry("TabNet, its first output", "pytorch-tabnet", _tabnet, vectors(6)),
    Entry("TabNet", "pytorch-tabnet", _tabnet_itself, vectors(6)),
    _deepctr("DeepFM"),
    _deepctr("DCN"),
    Entry("KAN", "pykan", _kan, vectors(6)),
)  # fmt: skip
