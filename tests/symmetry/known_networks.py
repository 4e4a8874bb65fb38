"""Networks whose symmetries are known, and some that only look as if they had any."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.networks import MLP, MediumCNN, ResNet, ViT, WideResNet
from enfold.symmetry import Symmetry, symmetries


class Calls(nn.Module):
    """Modules and parameters by name, and a function of them and the input."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(6, 5, 2), nn.GELU(),
        nn.Conv2d(5, 4, 3), nn.PReLU(4), nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 8), nn.LayerNorm(8), nn.Tanh(),
        nn.Linear(8, 3),
    )  # fmt: skip


def residual(projection: bool) -> nn.Module:
    def forward(net: Calls, x: Tensor) -> Tensor:
        x = net.first(x)
        return net.head(net.shortcut(x) + torch.relu(net.second(torch.relu(net.inner(x)))))

    width = 7 if projection else 5
    shortcut = nn.Linear(5, 7) if projection else nn.Identity()
    parts = {"inner": nn.Linear(5, 6), "second": nn.Linear(6, width), "head": nn.Linear(width, 3)}
    return Calls(forward, first=nn.Linear(4, 5), shortcut=shortcut, **parts)


def dense() -> nn.Module:
    def forward(net: Calls, x: Tensor) -> Tensor:
        one = torch.relu(net.one(x))
        both = torch.cat([one, torch.relu(net.two(one))], 1)
        every = torch.cat([both, torch.relu(net.three(net.norm(both)))], 1)
        return net.head(every.flatten(1))

    one, two, three = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 1), nn.Conv2d(7, 5, 1)
    return Calls(forward, one=one, two=two, three=three, norm=nn.BatchNorm2d(7), head=nn.Linear(12 * 9, 3))


def separable() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 1), nn.Conv2d(6, 12, 3, groups=6), nn.ReLU(), nn.Conv2d(12, 8, 1, groups=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def grouped_residual() -> nn.Module:
    """A grouped convolution inside a residual stream, whose groups are thus those of the stream."""

    def forward(net: Calls, x: Tensor) -> Tensor:
        x = torch.relu(net.first(x))
        return net.head((x + net.second(torch.relu(net.grouped(x)))).mean((2, 3)))

    parts = {"grouped": nn.Conv2d(6, 8, 3, padding=1, groups=2), "second": nn.Conv2d(8, 6, 1)}
    return Calls(forward, first=nn.Conv2d(3, 6, 1), **parts, head=nn.Linear(6, 3))


def channel_norm() -> nn.Module:
    def forward(net: Calls, x: Tensor) -> Tensor:
        x = net.norm(net.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return net.head((x * net.gamma[:, None, None]).mean((2, 3)))

    gamma = nn.Parameter(torch.zeros(6))
    return Calls(forward, first=nn.Conv2d(2, 6, 3), norm=nn.LayerNorm(6), gamma=gamma, head=nn.Linear(6, 3))


def squeezed() -> nn.Module:
    def forward(net: Calls, x: Tensor) -> Tensor:
        x = torch.relu(net.first(x))
        gate = torch.sigmoid(net.up(torch.relu(net.down(F.adaptive_avg_pool2d(x, 1)))))
        return net.head((x * gate).amax((2, 3)))

    down, up = nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)
    return Calls(forward, first=nn.Conv2d(2, 6, 3), down=down, up=up, head=nn.Linear(6, 3))


def packed_attention() -> nn.Module:
    """Queries, keys and values as one projection that is reshaped, as vision transformers do it."""

    def forward(net: Calls, x: Tensor) -> Tensor:
        x = net.embed(x)
        packed = net.qkv(net.norm(x)).reshape(len(x), -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        query, key, value = packed.unbind(0)
        weights = (query @ key.transpose(-2, -1) * 0.5).softmax(-1)
        return net.head((x + net.out((weights @ value).transpose(1, 2).reshape(x.shape))).mean(1))

    parts = {"qkv": nn.Linear(8, 24, bias=False), "out": nn.Linear(8, 8), "head": nn.Linear(8, 3)}
    return Calls(forward, embed=nn.Linear(4, 8), norm=nn.LayerNorm(8), **parts)


def relative() -> nn.Module:
    """Two heads over keys of positions, which are repeated for every example."""

    def forward(net: Calls, x: Tensor) -> Tensor:
        query = net.query(x).unflatten(-1, (2, 3)).transpose(1, 2).flatten(0, 1)
        key = net.key(net.places.weight).unflatten(-1, (2, 3)).transpose(0, 1).repeat(len(x), 1, 1)
        scores = (query @ key.mT).softmax(-1).unflatten(0, (len(x), 2))
        return net.head(scores.mean(2).flatten(1))

    parts = {"query": nn.Linear(4, 6), "key": nn.Linear(4, 6), "head": nn.Linear(10, 3)}
    return Calls(forward, places=nn.Linear(4, 5, bias=False), **parts)


def rotary() -> nn.Module:
    """Heads whose entries are rotated in pairs: only complete heads of queries and keys are free."""

    def forward(net: Calls, x: Tensor) -> Tensor:
        query, key, value = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (net.q, net.k, net.v))
        angle = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1]).to(x)
        query, key = (_turned(part, angle) for part in (query, key))
        return net.head(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2).mean(1))

    return Calls(forward, q=nn.Linear(4, 8), k=nn.Linear(4, 8), v=nn.Linear(4, 8), head=nn.Linear(8, 3))


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], -1)


def shared_keys(form: str, keys: int = 2, share: int = 2, units: int = 3, width: int = 8) -> nn.Module:
    """Grouped queries: several heads of queries have common keys and values."""

    def forward(net: Calls, x: Tensor) -> Tensor:
        x = net.embed(x)
        query, key, value = (layer(x).unflatten(-1, (-1, units)).transpose(1, 2) for layer in (net.q, net.k, net.v))
        if form == "interleave":
            key, value = (part.repeat_interleave(share, 1) for part in (key, value))
        if form == "expand":
            key, value = (part[:, :, None].expand(-1, -1, share, -1, -1).flatten(1, 2) for part in (key, value))
        y = F.scaled_dot_product_attention(query, key, value, enable_gqa=form == "flag")
        return net.head((x + net.out(y.transpose(1, 2).flatten(2))).mean(1))

    queries, keys = keys * share * units, keys * units
    parts = {"q": nn.Linear(width, queries), "k": nn.Linear(width, keys), "v": nn.Linear(width, keys)}
    return Calls(forward, embed=nn.Linear(4, width), **parts, out=nn.Linear(queries, width), head=nn.Linear(width, 3))


def experts(form: str) -> nn.Module:
    """Experts as one tensor, (experts, in, out) or (in, out, experts), all run and weighed by a gate."""

    def forward(net: Calls, x: Tensor) -> Tensor:
        x = net.embed(x)
        weights = net.gate(x).softmax(-1)
        if form == "einsum":
            hidden = torch.relu(torch.einsum("td,edf->tef", x, net.up) + net.bias)
            return net.head(x + torch.einsum("te,tef,efd->td", weights, hidden, net.down))
        if form == "last":
            hidden = torch.relu(torch.einsum("td,dfe->tfe", x, net.up) + net.bias)
            return net.head(x + torch.einsum("te,tfe,fde->td", weights, hidden, net.down))
        hidden = torch.relu(torch.baddbmm(net.bias[:, None], x.expand(3, *x.shape), net.up))
        if form == "blocks":
            hidden = F.layer_norm(hidden.unflatten(-1, (2, 4)), [4]).flatten(-2)
        return net.head(x + (weights.T[..., None] * torch.bmm(hidden, net.down)).sum(0))

    width = 8 if form == "blocks" else 5
    shapes = {"up": (3, 6, width), "bias": (3, width), "down": (3, width, 6)}
    if form == "last":
        shapes = {name: (*shape[1:], 3) for name, shape in shapes.items()}
    parts = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    return Calls(forward, embed=nn.Linear(4, 6), gate=nn.Linear(6, 3), head=nn.Linear(6, 2), **parts)


def text() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 6), nn.Flatten(), nn.Linear(24, 5), nn.ReLU(), nn.Linear(5, 3))


def filled_in_place() -> nn.Module:
    def forward(net: Calls, x: Tensor) -> Tensor:
        held = torch.zeros(len(x), 7, dtype=x.dtype)
        held[:, :3] = net.one(x)
        held[:, 3:] += net.two(x).relu_()
        return net.head(held)

    return Calls(forward, one=nn.Linear(4, 3), two=nn.Linear(4, 4), head=nn.Linear(7, 3))


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    cell, head = kind(4, 5, batch_first=True), nn.Linear(5, 3)
    return Calls(lambda net, x: net.head(net.cell(x)[0][:, -1]), cell=cell, head=head)


def attention() -> nn.Module:
    return Calls(lambda net, x: net.attend(x, x, x)[0], attend=nn.MultiheadAttention(8, 2))


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Linear(5, 3))


def nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.ELU())), MLP(5, [6], 3))


def group_norm() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 6, 3), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(24, 3))


def vit(pooling: str) -> nn.Module:
    return ViT((3, 8, 8), 3, width=8, depth=2, heads=2, expansion=2, pooling=pooling)


def low_rank() -> nn.Module:
    left, right = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 4))
    return Calls(lambda net, x: net.head(x @ (net.left @ net.right).mT), left=left, right=right, head=nn.Linear(6, 3))


def tied_readout() -> nn.Module:
    return Calls(lambda net, x: torch.tanh(net.embed(x).mean(1)) @ net.embed.weight.mT, embed=nn.Embedding(7, 4))


def used_twice() -> nn.Module:
    def forward(net: Calls, x: Tensor) -> Tensor:
        x = net.first(x)
        return net.head(torch.tanh(net.layer(torch.tanh(net.layer(x)))))

    return Calls(forward, first=nn.Linear(4, 5), layer=nn.Linear(5, 5), head=nn.Linear(5, 3))


def summed() -> nn.Module:
    return Calls(lambda net, x: torch.relu(net.first(x)).sum(1, keepdim=True), first=nn.Linear(4, 5))


# name: (how to make it, the shape of one input, the sizes of its groups)
KNOWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[int]]] = {
    "bare linear": (lambda: nn.Linear(4, 3), (4,), []),
    "mlp": (lambda: MLP(12, [9, 8], 4), (12,), [8, 9]),
    "nested": (nested, (4,), [5, 6]),
    "cnn": (cnn, (3, 8, 8), [4, 5, 6, 8]),
    "medium cnn": (lambda: MediumCNN((3, 8, 8), 4, channels=(4, 6)), (3, 8, 8), [4, 6]),
    "group norm": (group_norm, (2, 6), [2, 3, 3]),
    "channel norm": (channel_norm, (2, 5, 5), [6]),
    "separable": (separable, (2, 5, 5), [*[2] * 7, 3, 3, 4, 4]),
    "grouped residual": (grouped_residual, (3, 5, 5), [2, 3, 3, 4, 4]),
    "residual": (lambda: residual(False), (4,), [5, 6]),
    "projected residual": (lambda: residual(True), (4,), [5, 6, 7]),
    "dense": (dense, (2, 5, 5), [3, 4, 5]),
    "squeezed": (squeezed, (2, 5, 5), [2, 6]),
    "resnet": (lambda: ResNet(depth=14, width=4), (3, 8, 8), [4, 4, 4, 8, 8, 8, 16, 16, 16]),
    "padded resnet": (lambda: ResNet(depth=8, width=4, shortcut="pad"), (3, 8, 8), [4, 4, 4, 8, 8, 16]),
    "wide resnet": (lambda: WideResNet(depth=10, widen_factor=1), (3, 8, 8), [16, 16, 32, 32, 64, 64]),
    "vit": (lambda: vit("mean"), (3, 8, 8), [2, 2, *[4] * 8, 8, 16, 16]),
    "vit with a class token": (lambda: vit("class"), (3, 8, 8), [2, 2, *[4] * 8, 8, 16, 16]),
    "attention": (attention, (3, 8), [2, 4, 4, 4, 4]),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (3, 8), [2, 4, 4, 4, 4, 16]),
    "packed attention": (packed_attention, (3, 4), [2, 4, 4, 4, 4, 8]),
    "relative": (relative, (3, 4), [2, 3, 3, 4, 5]),
    "rotary": (rotary, (3, 4), [2, 4, 4]),
    "grouped queries": (lambda: shared_keys("flag"), (3, 4), [2, 2, 2, *[3] * 4, 8]),
    "interleaved keys": (lambda: shared_keys("interleave"), (3, 4), [2, 2, 2, *[3] * 4, 8]),
    "expanded keys": (lambda: shared_keys("expand", 3, 4), (3, 4), [*[3] * 7, 4, 4, 4, 8]),
    "one head of keys": (lambda: shared_keys("flag", 1, 4), (3, 4), [3, 3, 4, 8]),
    "experts": (lambda: experts("bmm"), (4,), [3, 5, 5, 5, 6]),
    "experts by einsum": (lambda: experts("einsum"), (4,), [3, 5, 5, 5, 6]),
    "experts last": (lambda: experts("last"), (4,), [3, 5, 5, 5, 6]),
    "experts of blocks": (lambda: experts("blocks"), (4,), [2, 2, 2, 3, *[4] * 6, 6]),
    "text": (text, (4,), [5, 6]),
    "filled in place": (filled_in_place, (4,), [3, 4]),
    "lstm": (lambda: recurrent(nn.LSTM), (3, 4), [5]),
    "gru": (lambda: recurrent(nn.GRU), (3, 4), [5]),
    "low rank": (low_rank, (4,), [2, 6]),
    "tied readout": (tied_readout, (3,), [4]),
    "used twice": (used_twice, (4,), [5]),
    "summed": (summed, (4,), [5]),
    "weight norm": (weight_norm, (4,), [5]),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    """The network as if trained, and a batch for it."""
    make, shape, _ = KNOWN[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = make().eval()
        with torch.no_grad():
            for tensor in (*network.parameters(), *network.buffers()):
                if tensor.is_floating_point():
                    tensor.add_(0.1 * torch.rand_like(tensor))
        whole = name in ("text", "tied readout")
        return network, torch.randint(0, 7, (3, *shape)) if whole else torch.randn(3, *shape)


@cache
def symmetry_of(name: str) -> Symmetry:
    """The symmetry of a known network, found once for all tests."""
    return symmetries(*made(name))
