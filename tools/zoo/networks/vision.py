"""Networks for images: timm, torchvision, efficientnet-pytorch, pytorchcv, segmentation-models, MONAI, kornia."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from tools.zoo.entry import CLASSES, Entry, images, library

TORCHVISION = "torchvision.models"
MONAI = "monai.networks.nets"


def _timm(name: str, size: int, **settings: Any) -> Entry:
    def make(_: int) -> nn.Module:
        network: nn.Module = import_module("timm").create_model(name, num_classes=CLASSES, **settings)
        return network

    return Entry(f"timm {name}", "timm", make, images(size))


def _torchvision(name: str, size: int, **settings: Any) -> Entry:
    return library("torchvision", TORCHVISION, name, images(size), num_classes=CLASSES, **settings)


def _convnext(_: int) -> nn.Module:
    module = import_module("torchvision.models.convnext")
    blocks = [module.CNBlockConfig(8, 12, 1), module.CNBlockConfig(12, None, 1)]
    network: nn.Module = module.ConvNeXt(blocks, num_classes=CLASSES)
    return network


def _efficientnet(_: int) -> nn.Module:
    kind = import_module("efficientnet_pytorch").EfficientNet
    settings = {"image_size": 32, "width_coefficient": 0.2, "depth_coefficient": 0.2}
    network: nn.Module = kind.from_name("efficientnet-b0", num_classes=CLASSES, **settings)
    return network


def _pytorchcv(name: str, size: int, **settings: Any) -> Entry:
    def make(_: int) -> nn.Module:
        network: nn.Module = import_module("pytorchcv.model_provider").get_model(name, **settings)
        return network

    return Entry(f"pytorchcv {name}", "pytorchcv", make, images(size), 10)


def _monai(name: str, size: int, **settings: Any) -> Entry:
    return library("monai", MONAI, name, images(size, 1), label=f"MONAI {name}", **settings)


NETWORKS = (
    _timm("resnet10t", 32, channels=(8, 8, 16, 16)),
    _timm("convnext_atto", 32, depths=(1, 1, 1, 1), dims=(8, 8, 12, 16), drop_path_rate=0.2),
    _timm("vit_tiny_patch16_224", 32, img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2),
    _timm("mobilenetv3_small_050", 32),
    _torchvision("DenseNet", 32, growth_rate=4, block_config=(1, 2), num_init_features=8),
    _torchvision("MobileNetV2", 32, width_mult=0.1),
    _torchvision("shufflenet_v2_x0_5", 32),
    Entry("torchvision ConvNeXt", "torchvision", _convnext, images(32)),
    _torchvision("MaxVit", 32, input_size=(32, 32), stem_channels=8, head_dim=4, block_channels=[8], block_layers=[1],
                 stochastic_depth_prob=0.1, partition_size=4),
    Entry("EfficientNet-B0, narrow", "efficientnet-pytorch", _efficientnet, images(32)),
    _pytorchcv("resnet20_cifar10", 32),
    _pytorchcv("sepreresnet20_cifar10", 32),
    library("segmentation-models-pytorch", "segmentation_models_pytorch", "Unet", images(32),
            "timm-mobilenetv3_small_minimal_100", label="smp Unet", encoder_weights=None, encoder_depth=3,
            classes=CLASSES, decoder_channels=(8, 8, 8)),
    _monai("UNet", 16, spatial_dims=2, in_channels=1, out_channels=CLASSES, channels=(4, 8), strides=(2,)),
    _monai("DenseNet121", 32, spatial_dims=2, in_channels=1, out_channels=CLASSES, init_features=8, growth_rate=4,
           block_config=(1, 1)),
    _monai("ViT", 16, in_channels=1, img_size=(16, 16), patch_size=(8, 8), hidden_size=16, mlp_dim=24, num_layers=2,
           num_heads=2, classification=True, num_classes=CLASSES, spatial_dims=2, post_activation=None),
    library("kornia", "kornia.contrib", "TinyViT", images(32), img_size=32, num_classes=CLASSES,
            embed_dims=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_sizes=[2, 2, 2, 1],
            label="kornia TinyViT"),
)  # fmt: skip
