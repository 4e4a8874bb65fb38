"""Networks around single operations of torch, and the sizes of their groups."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from known_networks import Calls
from torch import Tensor, nn

Function = Callable[[Tensor], Tensor]


def units(function: Function, width: int = 6) -> tuple[nn.Module, Tensor]:
    """A function of hidden units."""
    return _between(function, nn.Linear(4, width), torch.randn(2, 4))


def tokens(function: Function) -> tuple[nn.Module, Tensor]:
    """A function of five tokens of eight units each."""
    return _between(function, nn.Linear(4, 8), torch.randn(2, 5, 4))


def images(function: Function, places: int = 2, channels: int = 8) -> tuple[nn.Module, Tensor]:
    """A function of channels."""
    first = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[places - 1](2, channels, 1)
    return _between(lambda x: function(x).flatten(1), first, torch.randn(2, 2, *[4] * places))


def _between(function: Function, first: nn.Module, inputs: Tensor) -> tuple[nn.Module, Tensor]:
    width = function(first(inputs)).shape[-1]
    return Calls(lambda net, x: net.head(function(net.first(x))), first=first, head=nn.Linear(width, 3)), inputs


def made_of(forward: Callable[..., Tensor], inputs: Tensor, **parts: nn.Module | nn.Parameter):
    return Calls(forward, **parts), inputs


def random(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(sizes))


def unpooled(places: int) -> Function:
    def function(x: Tensor) -> Tensor:
        pooled, found = getattr(F, f"max_pool{places}d")(x, 2, return_indices=True)
        return getattr(F, f"max_unpool{places}d")(pooled, found, 2)

    return function


def gram(x: Tensor) -> Tensor:
    return x.mT @ x / 8 + torch.eye(8, dtype=x.dtype)


def two_of_three(net: Calls, x: Tensor) -> Tensor:
    """The two experts with the largest gates."""
    gates, found = net.gate(x).topk(2, 1)
    y = torch.einsum("bi,bkio->bko", x, net.experts[found])
    return net.head((y * gates.softmax(1).unsqueeze(-1)).sum(1))


def nearest(net: Calls, x: Tensor) -> Tensor:
    return net.head(net.code(torch.cdist(net.first(x), net.code.weight).argmin(1)))


def nearest_by_one_hot(net: Calls, x: Tensor) -> Tensor:
    chosen = F.one_hot(torch.cdist(net.first(x), net.code.weight).argmin(1), 5).to(x.dtype)
    return net.head(chosen @ net.code.weight)


def bilinear() -> tuple[nn.Module, Tensor]:
    parts = {"one": nn.Linear(4, 5), "two": nn.Linear(4, 6), "both": nn.Bilinear(5, 6, 7), "head": nn.Linear(7, 3)}
    return made_of(lambda net, x: net.head(net.both(net.one(x), net.two(x))), torch.randn(2, 4), **parts)


def distances(batch: int = 2, rows: int = 7, **options: float) -> tuple[nn.Module, Tensor]:
    return made_of(
        lambda net, x: net.head(torch.cdist(net.first(x), net.centres, **options)),
        torch.randn(batch, 4), first=nn.Linear(4, 5), centres=random(rows, 5), head=nn.Linear(rows, 3),
    )  # fmt: skip


def coded(forward: Callable[..., Tensor]) -> tuple[nn.Module, Tensor]:
    parts = {"first": nn.Linear(4, 6), "code": nn.Embedding(5, 6), "head": nn.Linear(6, 3)}
    return made_of(forward, torch.randn(2, 4), **parts)


def fourier() -> tuple[nn.Module, Tensor]:
    """A layer of weights on frequencies, as neural operators have it."""

    def forward(net: Calls, x: Tensor) -> Tensor:
        waves = torch.einsum("bik,iok->bok", torch.fft.rfft(net.first(x)), torch.view_as_complex(net.weights))
        return net.head(torch.relu(torch.fft.irfft(waves, n=6)).flatten(1))

    parts = {"first": nn.Conv1d(2, 5, 1), "weights": random(5, 7, 4, 2), "head": nn.Linear(42, 3)}
    return made_of(forward, torch.randn(2, 2, 6), **parts)


def lower_heads() -> tuple[nn.Module, Tensor]:
    def forward(net: Calls, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 3)).transpose(1, 2) for layer in (net.q, net.k, net.v))
        return net.head(((q @ k.mT).tril() @ v).transpose(1, 2).flatten(2))

    return made_of(forward, torch.randn(2, 5, 4), **{name: nn.Linear(4, 6) for name in "qkv"}, head=nn.Linear(6, 3))


def vectors(forward: Callable[..., Tensor], width: int = 1) -> tuple[nn.Module, Tensor]:
    parts = {"first": nn.Linear(4, 6), "vector": random(6), "matrix": random(7, 6), "bias": random(7)}
    return made_of(forward, torch.randn(2, 4), **parts, head=nn.Linear(width, 3))


def products_of_rows(product: Callable[[Tensor, Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    return vectors(lambda net, x: net.head(torch.stack([product(row, net.vector) for row in net.first(x)])[:, None]))


AT = torch.tensor([0, 1, 2, 0, 1])
GRID = torch.linspace(-1, 1, 48).view(2, 2, 2, 2, 3)
NETWORKS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], list[int]]] = {
    "bilinear": (bilinear, [5, 6, 7]),
    "cdist": (distances, [5, 7]),
    "cdist by products": (lambda: distances(30, 31), [5, 31]),
    "cdist of absolute values": (lambda: distances(p=1), [5, 7]),
    "cdist of tokens to one table": (
        lambda: made_of(
            lambda net, x: net.head(torch.cdist(net.first(x), net.centres)),
            torch.randn(2, 5, 4),
            first=nn.Linear(4, 6),
            centres=random(7, 6),
            head=nn.Linear(7, 3),
        ),
        [6, 7],
    ),
    "pdist": (lambda: units(lambda x: F.pdist(x)[:, None]), [6]),
    "dist": (lambda: units(lambda x: x * torch.dist(x, x * x)), [6]),
    "vdot": (lambda: products_of_rows(torch.vdot), [6]),
    "dot": (lambda: products_of_rows(torch.dot), [6]),
    "mv": (lambda: vectors(lambda net, x: net.head((net.first(x) @ net.vector)[:, None])), [6]),
    "addmv": (
        lambda: vectors(lambda net, x: net.head(torch.addmv(net.bias, net.matrix, net.first(x).sum(0))), 7),
        [6, 7],
    ),
    "addr": (lambda: vectors(lambda net, x: net.head(torch.addr(net.first(x), x[:, 0], net.vector)), 6), [6]),
    "addbmm": (
        lambda: made_of(
            lambda net, x: net.head(torch.addbmm(net.bias, net.first(x), net.weights)),
            torch.randn(2, 5, 4),
            first=nn.Linear(4, 6),
            weights=random(2, 6, 7),
            bias=random(5, 7),
            head=nn.Linear(7, 3),
        ),
        [6, 7],
    ),
    "sparse product": (
        lambda: units(lambda x: torch.sparse.mm(torch.tensor([[1, 2], [0, 1]]).to(x).to_sparse(), x)),
        [6],
    ),
    "pixel shuffle": (lambda: images(lambda x: F.max_pool2d(F.pixel_shuffle(x, 2), 3)), [2]),
    "pixel shuffle of free places": (lambda: images(lambda x: F.pixel_shuffle(x, 2)), [2] * 7),
    "pixel unshuffle": (lambda: images(lambda x: F.pixel_unshuffle(x, 2)), [8]),
    "channel shuffle": (lambda: images(lambda x: F.channel_shuffle(x, 2)), [2, 4]),
    "unfold": (lambda: images(lambda x: F.unfold(x, (2, 3))), [8]),
    "fold": (lambda: images(lambda x: F.fold(x, (4, 4), 2, stride=2), 1), [2]),
    "windows": (lambda: tokens(lambda x: x.unfold(1, 3, 1).prod(-1)), [8]),
    "complex": (lambda: units(lambda x: torch.complex(x, x * x).abs()), [6]),
    "polar": (lambda: units(lambda x: torch.polar(x, x * x).real), [6]),
    "conjugate": (lambda: units(lambda x: torch.complex(x, x * x).conj().imag), [6]),
    "view as real": (lambda: units(lambda x: torch.view_as_real(torch.complex(x, x * x)).flatten(1)), [6]),
    "view as complex": (lambda: units(lambda x: torch.view_as_complex(x.unflatten(1, (3, 2))).abs()), [3]),
    "every second": (lambda: units(lambda x: x[:, ::2] * x[:, 1::2].tanh()), [3]),
    "fourier": (fourier, [5, 7]),
    "fft over tokens": (lambda: tokens(lambda x: torch.fft.fft(x, dim=1).abs()), [8]),
    "max unpool 1d": (lambda: images(unpooled(1), 1), [8]),
    "max unpool 2d": (lambda: images(unpooled(2), 2), [8]),
    "max unpool 3d": (lambda: images(unpooled(3), 3), [8]),
    "replication pad 1d": (lambda: images(nn.ReplicationPad1d(1), 1), [8]),
    "replication pad 3d": (lambda: images(nn.ReplicationPad3d(1), 3), [8]),
    "reflection pad 3d": (lambda: images(nn.ReflectionPad3d(1), 3), [8]),
    "exact upsampling 1d": (lambda: images(nn.Upsample(scale_factor=2, mode="nearest-exact"), 1), [8]),
    "exact upsampling 3d": (lambda: images(nn.Upsample(scale_factor=2, mode="nearest-exact"), 3), [8]),
    "trilinear upsampling": (lambda: images(nn.Upsample(scale_factor=2, mode="trilinear"), 3), [8]),
    "bicubic with antialiasing": (lambda: images(lambda x: F.interpolate(x, 3, mode="bicubic", antialias=True)), [8]),
    "grid sample 3d": (lambda: images(lambda x: F.grid_sample(x, GRID.to(x), align_corners=False), 3), [8]),
    "rrelu": (lambda: units(lambda x: F.rrelu(x)), [6]),
    "median": (lambda: units(lambda x: x * x.median(1, keepdim=True)[0]), [6]),
    "median of all": (lambda: units(lambda x: x * x.median()), [6]),
    "median over tokens": (lambda: tokens(lambda x: x.nanmedian(1)[0]), [8]),
    "kth value": (lambda: units(lambda x: x * (x >= x.kthvalue(3)[0][:, None])), [6]),
    "kth value over tokens": (lambda: tokens(lambda x: x.kthvalue(2, 1)[0]), [8]),
    "mode": (lambda: tokens(lambda x: x.round().mode(1)[0]), [8]),
    "sum without nan": (lambda: tokens(lambda x: x.nanmean(1)), [8]),
    "count": (lambda: units(lambda x: x * torch.relu(x).count_nonzero(1)[:, None]), [6]),
    "largest so far": (lambda: tokens(lambda x: x.cummax(1)[0]), [8]),
    "filled tokens": (lambda: tokens(lambda x: x.index_fill(1, torch.tensor([1]), 0.5)), [8]),
    "buckets": (lambda: units(lambda x: x * torch.bucketize(x, torch.linspace(-1, 1, 5).to(x))), [6]),
    "renorm": (lambda: tokens(lambda x: x.renorm(2, 2, 0.5)), [8]),
    "cross product": (
        lambda: made_of(
            lambda net, x: net.head(torch.linalg.cross(net.one(x.mT).mT, net.two(x.mT).mT).flatten(1)),
            torch.randn(2, 4, 3),
            one=nn.Linear(4, 5),
            two=nn.Linear(4, 5),
            head=nn.Linear(15, 3),
        ),
        [5],
    ),
    "squared differences": (lambda: units(lambda x: F.mse_loss(x, x.tanh(), reduction="none")), [6]),
    "a mean of differences": (lambda: units(lambda x: x * F.huber_loss(x, x.tanh())), [6]),
    "identity": (lambda: tokens(lambda x: x @ gram(x)), [8]),
    "diagonal": (lambda: tokens(lambda x: gram(x).diagonal(dim1=1, dim2=2)), [8]),
    "diagonal matrix": (
        lambda: made_of(
            lambda net, x: net.head(net.first(x) @ torch.diag(net.scale)),
            torch.randn(2, 4),
            first=nn.Linear(4, 6),
            scale=random(6),
            head=nn.Linear(6, 3),
        ),
        [6],
    ),
    "trace": (lambda: tokens(lambda x: x * gram(x[0]).trace()), [8]),
    "determinant": (lambda: tokens(lambda x: x.mean(1) * gram(x).det()[:, None]), [8]),
    "log determinant": (lambda: tokens(lambda x: x.mean(1) * gram(x).slogdet()[1][:, None]), [8]),
    "inverse": (lambda: tokens(lambda x: x @ gram(x).inverse()), [8]),
    "solve": (lambda: tokens(lambda x: torch.linalg.solve(gram(x), x.mT).mT), [8]),
    "matrix exponential": (lambda: tokens(lambda x: x @ torch.matrix_exp(gram(x) / 8)), [8]),
    "lower triangles of heads": (lower_heads, [2, 3, 3, 3, 3]),
    "norms of rows": (
        lambda: (nn.Sequential(nn.Embedding(9, 6, max_norm=1.0), nn.Linear(6, 3)), torch.arange(9)[None]),
        [6],
    ),
    "gather tokens": (lambda: tokens(lambda x: x.gather(1, x[..., :0].new_zeros(2, 3, 8).long())), [8]),
    "scattered sums": (
        lambda: tokens(lambda x: x.new_zeros(2, 3, 8).scatter_add(1, AT[None, :, None].expand(2, 5, 8), x)),
        [8],
    ),
    "index reduce": (lambda: tokens(lambda x: x.new_zeros(2, 3, 8).index_reduce(1, AT, x, "amax")), [8]),
    "largest units": (lambda: units(lambda x: torch.zeros_like(x).scatter(1, x.topk(3)[1], x.topk(3)[0])), [6]),
    "value of the largest unit": (lambda: units(lambda x: x.gather(1, x.abs().argmax(1, keepdim=True))), [6]),
    "row of the largest unit": (
        lambda: made_of(
            lambda net, x: net.head(net.table.index_select(0, net.first(x).argmax(1))),
            torch.randn(9, 4),
            first=nn.Linear(4, 6),
            table=random(6, 5),
            head=nn.Linear(5, 3),
        ),
        [5, 6],
    ),
    "two of three experts": (
        lambda: made_of(
            two_of_three, torch.randn(9, 4), gate=nn.Linear(4, 3), experts=random(3, 4, 6), head=nn.Linear(6, 2)
        ),
        [3, 6],
    ),
    "nearest code": (lambda: coded(nearest), [5, 6]),
    "nearest code by one-hot": (lambda: coded(nearest_by_one_hot), [5, 6]),
    "one-hot inputs": (
        lambda: made_of(
            lambda net, x: net.head(torch.relu(net.first(F.one_hot(x, 9).to(net.head.weight.dtype)))),
            torch.tensor([0, 3, 8]),
            first=nn.Linear(9, 6),
            head=nn.Linear(6, 3),
        ),
        [6],
    ),
    "no units": (
        lambda: made_of(
            lambda net, x: net.head(net.first(x)) + net.first(x) @ net.into @ net.out,
            torch.randn(2, 4),
            first=nn.Linear(4, 6),
            into=random(6, 0),
            out=random(0, 3),
            head=nn.Linear(6, 3),
        ),
        [6],
    ),
}
