"""Networks written here, each with something that ensembles stumble over; `Entry.make` gets the member's number."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.zoo.entry import CLASSES, TOKENS, Called, Entry, images, tokens, vectors

FEATURES = 12


class Net(nn.Module):
    """Two layers; what is between them is up to the subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def between(self, hidden: Tensor) -> Tensor:
        """Return the hidden units."""
        return hidden.relu()

    def forward(self, inputs: Tensor) -> Any:
        """Return the logits."""
        return self.last(self.between(self.first(inputs)))


class Activation(Net):
    """Another activation function for each member, in an attribute."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.function = (torch.relu, torch.tanh, F.gelu, torch.sigmoid)[index % 4]

    def between(self, hidden: Tensor) -> Tensor:
        """Return the hidden units."""
        return self.function(hidden)


class Slope(Net):
    """Another number for each member."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.slope = (0.01, 0.9, 0.4)[index % 3]

    def between(self, hidden: Tensor) -> Tensor:
        """Return the hidden units."""
        return F.leaky_relu(hidden, self.slope)


class Partial(Net):
    """The same in a functools.partial."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.act = partial(F.leaky_relu, negative_slope=(0.01, 0.9, 0.4)[index % 3])

    def between(self, hidden: Tensor) -> Tensor:
        """Return the hidden units."""
        return self.act(hidden)


class Settings(Net):
    """The same in a dictionary inside of a list."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.settings = [{"scale": 1.0 + index, "flip": bool(index % 2)}]

    def between(self, hidden: Tensor) -> Tensor:
        """Return the hidden units."""
        hidden = hidden * self.settings[0]["scale"]
        return (-hidden if self.settings[0]["flip"] else hidden).relu()


class Columns(nn.Module):
    """Random subspaces: each member uses its own columns, stored in a list."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.columns = torch.randperm(FEATURES)[:6].tolist()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        return self.body(inputs[:, self.columns])


class Masks(Net):
    """Tensors in a list."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.masks = [torch.rand(16) + 0.5]

    def between(self, hidden: Tensor) -> Tensor:
        """Return the hidden units."""
        return hidden.relu() * self.masks[0].to(hidden)


class PlainList(Net):
    """A layer in a plain list."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.middle = [nn.Linear(16, 16)]

    def between(self, hidden: Tensor) -> Tensor:
        """Return the hidden units."""
        return self.middle[0].to(hidden.dtype)(hidden.relu()).relu()


def same_name(index: int) -> nn.Module:
    """Return networks with classes of the same name from different modules."""
    module = types.ModuleType(f"net_{index}")
    function = ("relu", "tanh", "sigmoid")[index % 3]
    code = (
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
        f"        super().__init__(); self.a = nn.Linear({FEATURES}, 16); self.h = nn.Linear(16, {CLASSES})\n"
        f"    def forward(self, x): return self.h(torch.{function}(self.a(x)))"
    )
    exec(code, module.__dict__)  # noqa: S102 (two files of a user's, made here)
    made: nn.Module = module.Net()
    return made


class Lambda(Net):
    """A function over `self`."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.middle = nn.Linear(16, 16)
        self.block = lambda z: z + self.middle(z).relu()

    def between(self, hidden: Tensor) -> Tensor:
        """Return the hidden units."""
        return self.block(hidden.relu())


class BoundMethod(Net):
    """A bound method in an attribute."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(16))
        self.steps = [self._scaled, torch.relu]

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden * self.gain

    def between(self, hidden: Tensor) -> Tensor:
        """Return the hidden units."""
        for step in self.steps:
            hidden = step(hidden)
        return hidden


class Hook(Net):
    """A hook over `self`."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(16))
        self.first.register_forward_hook(lambda module, inputs, output: output * self.gain)


class KeepingHook(Net):
    """A hook that keeps features, which forward reads."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.first.register_forward_hook(lambda module, inputs, output: self.kept.__setitem__("a", output))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        self.first(inputs)
        return self.last(self.kept["a"].relu())


class Cosine(nn.Module):
    """A cache of normalised weights in eval mode."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.first, self.weight, self.cached = nn.Linear(FEATURES, 16), nn.Parameter(torch.randn(CLASSES, 16)), None

    def train(self, mode: bool = True) -> Any:
        """Reset the state."""
        self.cached = None
        return super().train(mode)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the cosines."""
        weight = F.normalize(self.weight, dim=1)
        if not self.training:
            if self.cached is None:
                self.cached = weight.detach()
            weight = self.cached
        return 10 * F.normalize(self.first(inputs).relu(), dim=1) @ weight.t()


class InPlace(nn.Module):
    """Normalises its inputs in place."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(72, CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        inputs -= 0.5
        inputs /= 0.25
        return self.body(inputs)


class EarlyExit(Net):
    """Uses one of two layers, by what it sees: the other one has no gradient."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def between(self, hidden: Tensor) -> Tensor:
        """Return the hidden units."""
        hidden = hidden.relu()
        far = hidden.mean() > self.first.bias.mean() + 0.34
        return (self.one(hidden) if far else self.two(hidden)).relu()


class Unused(Net):
    """A layer that is never used."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.spare = nn.Linear(16, 16)


class TiedText(nn.Module):
    """Output weights tied to the embedding."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(TOKENS, 16), nn.Linear(16, TOKENS)
        self.out.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        return self.out(self.embedding(inputs).mean(1))


class MaxNorm(nn.Module):
    """An embedding with max_norm, which renormalises rows in place."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(TOKENS, 16, max_norm=1.0), nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        return self.out(self.embedding(inputs).mean(1))


class ExtraState(Net):
    """Extra state in its state dict."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.version = 3

    def get_extra_state(self) -> Any:
        """Return the extra state."""
        return {"version": self.version}

    def set_extra_state(self, state: Any) -> None:
        """Set the extra state."""
        self.version = state["version"]


class NamedShare(nn.Module):
    """Submodules under names that an ensemble might use itself."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.share, self.network = nn.Linear(FEATURES, 16), nn.Linear(16, 16)
        self.members, self.state = nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        return self.state(self.members(self.network(self.share(inputs).relu()).relu()).relu())


class Complex(nn.Module):
    """Complex weights."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.mix = nn.Parameter(torch.randn(9, 9, dtype=torch.cfloat) / 3)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        spectrum = torch.fft.rfft(self.first(inputs).relu())
        return self.last(torch.fft.irfft(spectrum @ self.mix.to(spectrum.dtype), 16))


class Locked(Net):
    """Holds a lock."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def between(self, hidden: Tensor) -> Tensor:
        """Return the hidden units."""
        with self.lock:
            return hidden.relu()


class Recurrent(nn.Module):
    """A recurrent layer of torch's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cells = getattr(nn, kind)(8, 12, batch_first=True, num_layers=2, bidirectional=kind == "LSTM")
        self.head = nn.Linear(24 if kind == "LSTM" else 12, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.cells(inputs)[0][:, -1])


class Auxiliary(Net):
    """A second output in a dictionary."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.second = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Any:
        """Return the logits."""
        hidden = self.first(inputs).relu()
        return {"logits": self.last(hidden), "auxiliary": self.second(hidden)}


class OwnDraws(Net):
    """Noise from a generator of its own, in train mode."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.rate = 0.1

    def between(self, hidden: Tensor) -> Tensor:
        """Return the hidden units."""
        return hidden.relu() + (self.rate * torch.randn_like(hidden) if self.training else 0.0)


class DropPath(Net):
    """Drops a complete branch, with a rate that differs between members."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.middle, self.drop_prob = nn.Linear(16, 16), (0.1, 0.5, 0.8)[index % 3]

    def between(self, hidden: Tensor) -> Tensor:
        """Return the hidden units."""
        keep = 1.0
        if self.training and self.drop_prob > 0:
            keep = hidden.new_empty(len(hidden), 1).bernoulli_(1 - self.drop_prob) / (1 - self.drop_prob)
        return hidden.relu() + keep * self.middle(hidden).relu()


def cnn(*layers: nn.Module) -> nn.Module:
    """Return convolutions of 8 channels, with these layers between them."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), *layers, nn.ReLU(), nn.Flatten(), nn.Linear(72, CLASSES))


def spectral(legacy: bool) -> nn.Module:
    """Return a network with spectral norm on both layers."""
    wrap = nn.utils.spectral_norm if legacy else nn.utils.parametrizations.spectral_norm
    return nn.Sequential(wrap(nn.Linear(FEATURES, 16)), nn.ReLU(), wrap(nn.Linear(16, CLASSES)))


def weight_normed(legacy: bool) -> nn.Module:
    """Return a network with weight norm on both layers."""
    wrap = nn.utils.weight_norm if legacy else nn.utils.parametrizations.weight_norm
    return nn.Sequential(wrap(nn.Linear(FEATURES, 16)), nn.ReLU(), wrap(nn.Linear(16, CLASSES)))


def quantised(_: int) -> nn.Module:
    """Return a network prepared for quantisation-aware training."""
    import torch.ao.quantization as q

    layers = (q.QuantStub(), nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 16), nn.ReLU())
    network = nn.Sequential(*layers, nn.Linear(16, CLASSES), q.DeQuantStub()).train()
    network.qconfig = q.get_default_qat_qconfig("x86")
    q.prepare_qat(network, inplace=True)
    network(torch.randn(4, 3, 8, 8))
    return network.apply(q.disable_observer)  # else each call changes the next, also in eval mode


def pruned(_: int) -> nn.Module:
    """Return a network pruned with a mask of its own."""
    from torch.nn.utils import prune

    network = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    prune.random_unstructured(network[0], "weight", 0.4)
    return network


def scripted(_: int) -> nn.Module:
    """Return a plain network with a scripted module."""
    body = torch.jit.script(nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU()))
    return nn.Sequential(body, nn.Linear(16, CLASSES))


def frozen(_: int) -> nn.Module:
    """Return a network with a frozen first layer."""
    network = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
    network[0].requires_grad_(False)
    return network


def compiled(_: int) -> nn.Module:
    """Return a functional network behind a bound call."""
    return Called(nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, CLASSES)), _doubled)


def _doubled(body: nn.Module, inputs: Tensor) -> Tensor:
    return 2 * body(inputs)


def lazy(_: int) -> nn.Module:
    """Return a network of lazy layers that have run once."""
    network = nn.Sequential(
        nn.LazyConv2d(8, 3, 2), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(CLASSES)
    )
    network(torch.randn(2, 3, 8, 8))
    return network


def by_hand(name: str, make: Callable[[int], nn.Module], inputs: Callable[[int], Tensor] | None = None,
            classes: int = CLASSES) -> Entry:  # fmt: skip
    """Return an entry for a network of this file."""
    return Entry(f"hazard: {name}", "by hand", make, inputs or vectors(FEATURES), classes)


NETWORKS = (
    by_hand("activation function", Activation),
    by_hand("number in an attribute", Slope),
    by_hand("functools.partial", Partial),
    by_hand("dictionary in a list", Settings),
    by_hand("columns in a list", Columns),
    by_hand("tensors in a list", Masks),
    by_hand("layers in a plain list", PlainList),
    by_hand("classes of one name", same_name),
    by_hand("lambda over self", Lambda),
    by_hand("bound method in a list", BoundMethod),
    by_hand("hook over self", Hook),
    by_hand("hook that keeps features", KeepingHook),
    by_hand("cache in eval mode", Cosine),
    by_hand("in-place on inputs", InPlace, images(8)),
    by_hand("early exit", EarlyExit),
    by_hand("unused layer", Unused),
    by_hand("tied embedding", TiedText, tokens(), TOKENS),
    by_hand("embedding with max_norm", MaxNorm, tokens()),
    by_hand("extra state", ExtraState),
    by_hand("submodules named share and network", NamedShare),
    by_hand("complex weights", Complex),
    by_hand("lock", Locked),
    by_hand("GRU", lambda _: Recurrent("GRU"), vectors(5, 8)),
    by_hand("LSTM, both directions", lambda _: Recurrent("LSTM"), vectors(5, 8)),
    by_hand("auxiliary output", Auxiliary),
    by_hand("noise in train mode", OwnDraws),
    by_hand("drop path, other rates", DropPath),
    by_hand("instance norm with statistics", lambda _: cnn(nn.InstanceNorm2d(8, track_running_stats=True)), images(8)),
    by_hand("group norm", lambda _: cnn(nn.GroupNorm(2, 8)), images(8)),
    by_hand("spectral norm", lambda _: spectral(False)),
    by_hand("spectral norm, old", lambda _: spectral(True)),
    by_hand("weight norm", lambda _: weight_normed(False)),
    by_hand("weight norm, old", lambda _: weight_normed(True)),
    by_hand("quantisation-aware", quantised, images(8)),
    by_hand("pruned", pruned),
    by_hand("scripted module", scripted),
    by_hand("frozen layer", frozen),
    by_hand("function in an attribute", compiled),
    by_hand("lazy layers", lazy, images(8)),
    by_hand("one logit", lambda _: nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 1)), None, 2),
    by_hand("no class axis", lambda _: nn.Sequential(nn.Linear(FEATURES, 1), nn.Flatten(0)), None, 2),
)
