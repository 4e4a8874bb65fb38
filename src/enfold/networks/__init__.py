"""Reference networks as plain PyTorch modules, and a catalogue to create them by name."""

from enfold.networks.bottleneck_resnet import BottleneckResNet
from enfold.networks.catalogue import NETWORKS, Spec, factory, make
from enfold.networks.fast_resnet import FastResNet
from enfold.networks.medium_cnn import MediumCNN, SmallCNN
from enfold.networks.mlp import MLP
from enfold.networks.resnet import ResNet, ResNet20
from enfold.networks.vit import ViT
from enfold.networks.wide_resnet import WideResNet

__all__ = [
    "MLP",
    "NETWORKS",
    "BottleneckResNet",
    "FastResNet",
    "MediumCNN",
    "ResNet",
    "ResNet20",
    "SmallCNN",
    "Spec",
    "ViT",
    "WideResNet",
    "factory",
    "make",
]
