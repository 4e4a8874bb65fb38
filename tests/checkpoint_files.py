"""Networks for tests of checkpoint files, and their comparison after loading."""

import torch
from torch import nn

from enfold import DeepEnsemble


def make():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def draw(count=3):
    networks = [make() for _ in range(count)]
    for network in networks:
        network(torch.randn(16, 4))
    return [network.eval() for network in networks]


def assert_loaded(members, networks):
    assert members.num_members == len(networks)
    for member, network in zip(members.networks(), networks, strict=True):
        assert not member.training
        for name, tensor in network.state_dict().items():
            assert torch.equal(member.state_dict()[name], tensor), name


def read(files, network=make, **options):
    return DeepEnsemble.from_checkpoints(files, network, **options)
