"""Ensembles of other packages, of the same networks, and what is needed to import them beside a torch for CPUs."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import torch
from torch import nn

PACKAGES = (
    "torch-uncertainty", "probly", "tabm", "torchensemble", "rebasin", "torchmetrics", "imagecorruptions",
    "torchvision", "lightning", "kornia",
)  # fmt: skip
_kept: list[object] = []  # an operator is defined as long as its library object lives


def load(name: str) -> Any:
    """Import a package; `torchvision` needs the schemas of two operators where its CUDA libraries are missing."""
    if not _kept:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
        resources: Any = types.ModuleType("pkg_resources")  # removed from setuptools; imagecorruptions looks up files
        resources.resource_filename = lambda package, name: str(files(package) / name)
        sys.modules.setdefault("pkg_resources", resources)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def replace_layers(network: nn.Module, replace: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Replace layers of a network for which the function returns another, at any depth."""
    for name, child in network.named_children():
        other = replace(child)
        if other is None:
            replace_layers(child, replace)
        else:
            setattr(network, name, other)
    return network


def batch_ensemble(network: nn.Module, num_members: int) -> nn.Module:
    """Return the BatchEnsemble of torch-uncertainty; its own conversion fails on nested networks."""
    package = load("torch_uncertainty")
    layers, methods = load("torch_uncertainty.layers"), load("torch_uncertainty.methods")
    assert package

    def replace(layer: nn.Module) -> nn.Module | None:
        if isinstance(layer, nn.Linear):
            return layers.BatchLinear.from_linear(layer, num_estimators=num_members)  # type: ignore[no-any-return]
        if isinstance(layer, nn.Conv2d):
            return layers.BatchConv2d.from_conv2d(layer, num_estimators=num_members)  # type: ignore[no-any-return]
        return None

    return methods.batch_ensemble(  # type: ignore[no-any-return]
        replace_layers(network, replace), num_members, repeat_training_inputs=True
    )


def packed_cnn(num_members: int, alpha: float) -> nn.Module:
    """Return the CNN of `timing.cnn` of packed layers of torch-uncertainty."""
    layers = load("torch_uncertainty.layers")
    options = {"alpha": alpha, "num_estimators": num_members, "minimum_channels_per_group": 1}

    def block(inputs: int, outputs: int, first: bool) -> list[nn.Module]:
        convolution = layers.PackedConv2d(inputs, outputs, 3, padding=1, first=first, **options)
        return [convolution, nn.BatchNorm2d(int(outputs * alpha)), nn.ReLU(), nn.MaxPool2d(2)]

    head = layers.PackedLinear(128, 10, alpha=alpha, num_estimators=num_members, last=True)
    body = [*block(3, 32, True), *block(32, 64, False), *block(64, 128, False)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def tabm_mlp(num_members: int, kind: str) -> nn.Module:
    """Return the MLP of `timing.mlp` of layers of tabm: "packed" (independent members) or "batch" (BatchEnsemble)."""
    tabm = load("tabm")
    make: Callable[[int, int], nn.Module]
    if kind == "packed":
        make = lambda inputs, outputs: tabm.LinearEnsemble(inputs, outputs, k=num_members)  # noqa: E731
    else:
        make = lambda inputs, outputs: tabm.LinearBatchEnsemble(  # noqa: E731
            inputs, outputs, k=num_members, scaling_init="random-signs"
        )
    view = tabm.EnsembleView(k=num_members)
    return nn.Sequential(view, make(784, 256), nn.ReLU(), make(256, 256), nn.ReLU(), make(256, 10))
