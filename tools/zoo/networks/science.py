"""Networks for signals, graphs, fields, molecules and spikes."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor, nn

from tools.zoo.entry import CLASSES, Entry, images, library, vectors

EDGES = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 0]])


def _graph(name: str) -> Entry:
    """Return the examples as the nodes of one graph; there are five for every batch size."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = getattr(import_module("torch_geometric.nn"), name)(4, 16, 2, 16)
            self.head = nn.Linear(16, CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            count = len(inputs)
            shifts = 5 * torch.arange(count).repeat_interleave(EDGES.shape[1])
            nodes = self.body(inputs.flatten(0, 1), EDGES.repeat(1, count) + shifts)
            return self.head(nodes.view(count, 5, -1).mean(1))

    return Entry(f"PyG {name}, pooled", "torch_geometric", lambda _: Pooled(), vectors(5, 4))


def _spiking(_: int) -> nn.Module:
    snntorch = import_module("snntorch")

    class Spikes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.spike = nn.Linear(6, 16), snntorch.Leaky(beta=0.9)
            self.last, self.out = nn.Linear(16, CLASSES), snntorch.Leaky(beta=0.9)

        def forward(self, inputs: Tensor) -> Tensor:
            one, two, total = self.spike.init_leaky(), self.out.init_leaky(), 0
            for _ in range(3):
                spikes, one = self.spike(self.first(inputs), one)
                _, two = self.out(self.last(spikes), two)
                total = total + two
            return total

    return Spikes()


def _tensor_product(_: int) -> nn.Module:
    e3nn = import_module("e3nn")
    o3 = import_module("e3nn.o3")

    class Equivariant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e + 1x1o", "8x0e + 2x1o")
            self.last = o3.Linear("8x0e + 2x1o", f"{CLASSES}x0e")

        def forward(self, inputs: Tensor) -> Tensor:
            return self.last(self.first(inputs[:, :10], inputs[:, 10:]))

    del e3nn
    return Equivariant()


def _ode(_: int) -> nn.Module:
    solver = import_module("torchdiffeq")

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.speed = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))
            self.head = nn.Linear(6, CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            times = torch.linspace(0, 1, 3, dtype=inputs.dtype)
            return self.head(solver.odeint(lambda _, z: self.speed(z), inputs, times, method="rk4")[-1])

    return Flow()


def _chemprop(_: int) -> nn.Module:
    network: nn.Module = import_module("chemprop.nn").predictors.MulticlassClassificationFFN(
        n_classes=CLASSES, n_tasks=1, input_dim=6, hidden_dim=16
    )
    return network


NETWORKS = (
    _graph("GCN"),
    _graph("GAT"),
    _graph("GIN"),
    Entry("snnTorch leaky spikes", "snntorch", _spiking, vectors(6)),
    library("neuraloperator", "neuralop.models", "FNO", images(16, 1), n_modes=(4, 4), hidden_channels=8, n_layers=2,
            in_channels=1, out_channels=1, label="neuralop FNO"),
    Entry("e3nn tensor product", "e3nn", _tensor_product, vectors(14)),
    Entry("torchdiffeq flow", "torchdiffeq", _ode, vectors(6)),
    Entry("chemprop multiclass head", "chemprop", _chemprop, vectors(6)),
)  # fmt: skip
