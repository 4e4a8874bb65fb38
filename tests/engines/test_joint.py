"""The joint engine: one batch norm over several batches, against the merged batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.engines import joint
from enfold.engines.joint import Merged, Several, SideBySide, joint_batch_norm
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.networks import ResNet, WideResNet
from enfold.train import TrainConfig, fit
from zoo import Apply


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 6), (4, 3, 5, 2), (2, 3, 2, 3, 2)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("members", [1, 3])
def test_a_joint_batch_norm_is_that_of_the_batches_put_together(shape, affine, members):
    torch.manual_seed(0)
    parts = [torch.randn(shape, dtype=torch.float64) * (m + 1) + m for m in range(members)]
    if len(shape) == 4:
        parts = [part.contiguous(memory_format=torch.channels_last) for part in parts]
    values = [torch.rand(3, dtype=torch.float64) + 0.5, torch.randn(3, dtype=torch.float64)] if affine else [None, None]
    slopes = torch.randn(members * shape[0], *shape[1:], dtype=torch.float64)
    results = []
    for together in (True, False):
        seen = [part.clone().requires_grad_() for part in parts]
        own = [None if value is None else value.clone().requires_grad_() for value in values]
        statistics = [torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
        if together:
            rows = F.batch_norm(torch.cat(seen), *statistics, *own, True, 0.2, 1e-4)
        else:
            rows = torch.cat(joint_batch_norm(seen, *statistics, *own, 0.2, 1e-4))
        (rows * slopes).sum().backward()
        gradients = [leaf.grad for leaf in (*seen, *own) if leaf is not None]
        results.append([rows.detach(), *statistics, *gradients])
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-10)


def test_a_joint_batch_norm_without_statistics_and_in_low_precision():
    parts = [torch.randn(6, 3), torch.randn(6, 3)]
    expected = F.batch_norm(torch.cat(parts), None, None, training=True)
    torch.testing.assert_close(torch.cat(joint_batch_norm(parts, None, None, None, None, 0.1, 1e-5)), expected)
    low = joint_batch_norm([part.bfloat16() for part in parts], None, None, None, None, 0.1, 1e-5)
    assert low[1].dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat(low).float(), expected, rtol=0.05, atol=0.05)


class Branched(nn.Module):
    """Slices, in-place sums, sizes, reflected operators, a tuple of chunks and a frozen batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.frozen = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4).eval()
        self.last = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.norm(self.first(2 * inputs - 1))
        one, other = x.chunk(2, dim=1)
        y = self.frozen(self.second(one))
        y += other[:, :, :, :]
        x = torch.cat([y, 1 - other.abs()], dim=1).relu_()
        x = F.adaptive_avg_pool2d(x, 1).view(x.size(0), -1)
        return self.last(x[:, :4] / (1 + x[:, 4:] ** 2))

    def train(self, mode: bool = True) -> Branched:
        super().train(mode)
        self.frozen.eval()
        return self


NETWORKS = {
    "branched": Branched,
    "resnet": lambda: ResNet(width=4, depth=8),
    "wide": lambda: WideResNet(depth=10, widen_factor=1),
    "flat": lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192), nn.Linear(192, 5), nn.BatchNorm1d(5), nn.GELU()),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("each", [True, False])
def test_joint_batch_norm_equals_the_merged_batch(name, each):
    """Outputs, gradients of all parameters, and statistics, in float64."""
    torch.manual_seed(0)
    network = NETWORKS[name]().double()
    inputs = torch.randn(*((3,) if each else ()), 6, 3, 8, 8, dtype=torch.float64)
    results = []
    for engine in (Merged, SideBySide):
        members = BatchEnsemble(network, 3, bias="shared_pre", batch_norm="joint").train()
        members._merged = engine(members.skeleton, members.differing)
        outputs = members.forward_each(inputs) if each else members(inputs)
        (outputs * torch.linspace(-1, 1, outputs.numel(), dtype=torch.float64).view_as(outputs)).sum().backward()
        gradients = [parameter.grad for parameter in members.parameters()]
        results.append([outputs.detach(), *gradients, *members.buffers()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-7, atol=1e-9)


class Picky(nn.Module):
    """Its forward wants one tensor, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.norm, self.last = way, nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.norm(self.first(inputs))
        if self.way == "class" and not isinstance(x, Tensor):
            raise ValueError("a tensor is wanted")
        if self.way == "decides" and x.mean() > 100:
            return self.last(-x)
        if self.way == "number":
            x = x / x.detach().abs().max().item()
        if self.way == "own norm" and self.training:
            x = x - x.mean(0)  # over all rows it sees
        return self.last(torch.relu(x))


@pytest.mark.parametrize("way", ["class", "decides", "number", "own norm", "none"])
def test_joint_batch_norm_supports_large_values(way, monkeypatch):
    inputs = torch.randn(8, 4)
    for large, engine in ((1 << 23, Merged), (0, SideBySide if way == "none" else Merged)):
        monkeypatch.setattr(joint, "LARGE", large)
        members = BatchEnsemble(Picky(way), 3, init="ones", batch_norm="joint").train()
        before = {name: tensor.clone() for name, tensor in members.state_dict().items()}
        state = torch.random.get_rng_state()
        members(inputs)
        assert type(members._merged) is engine
        assert torch.equal(state, torch.random.get_rng_state())
        assert int(members.shared.state()["norm.num_batches_tracked"]) == 1  # the call's own
        assert all(torch.equal(before[name], members.state_dict()[name]) for name in before if "norm" not in name)


@pytest.mark.filterwarnings("ignore:the 3 members are nearly identical")
def test_a_training_is_the_same_by_both(monkeypatch):
    torch.manual_seed(0)
    inputs, labels = torch.randn(24, 3, 8, 8), torch.arange(24) % 3
    data = Data(Split(inputs, labels), [], Split(inputs, labels), 3, (3, 8, 8))
    network, plan = Branched(), TrainConfig(epochs=2, batch_size=10, lr=0.01)
    results = []
    for large in (0, 1 << 23):
        monkeypatch.setattr(joint, "LARGE", large)
        members = BatchEnsemble(network, 3, batch_norm="joint")
        fit(members, data, config=plan, quiet=True)
        assert type(members._merged) is (Merged if large else SideBySide)
        results.append(dict(members.state_dict()))
        assert members.member(0)(inputs).shape == (24, 3)
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)


def test_stored_activations_do_not_prevent_copies(monkeypatch):
    class Keeping(Picky):
        def forward(self, inputs: Tensor) -> Tensor:
            self.kept = self.first(inputs)
            return super().forward(inputs)

    monkeypatch.setattr(joint, "LARGE", 0)
    members = BatchEnsemble(Keeping("none"), 2, batch_norm="joint").train()
    members(torch.randn(8, 4)).sum().backward()
    assert type(members._merged) is SideBySide
    assert members.member(1).eval()(torch.randn(8, 4)).shape == (8, 3)


def test_repeated_batches_are_invalid():
    several = Several([torch.ones(2), torch.zeros(2)])
    assert several.shape == (2,)
    assert len(several) == 2
    assert [part.tolist() for part in (several + 1).parts] == [[2.0, 2.0], [1.0, 1.0]]
    assert [part.tolist() for part in (torch.ones(2) - several).parts] == [[0.0, 0.0], [1.0, 1.0]]
    with pytest.raises(TypeError, match="control flow"):
        bool(several.sum() > 1)
    with pytest.raises(TypeError, match="not a tensor"):
        several.sum().item()
    with pytest.raises(AttributeError):
        several.nonsense  # noqa: B018


class Reversed(torch.autograd.Function):
    """The identity with a negative gradient."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


@pytest.mark.parametrize("sign", [1, -1])
def test_functions_with_a_gradient_of_their_own_keep_it(sign, monkeypatch):
    calls = []
    original = SideBySide.__call__
    monkeypatch.setattr(SideBySide, "__call__", lambda *args: calls.append(1) or original(*args))
    between = Apply(lambda net, x: x if sign == 1 else Reversed.apply(x))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), between, nn.Conv2d(32, 4, 3))
        network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        members = BatchEnsemble(network, num_members=4, seed=0, batch_norm="joint").train()
        inputs, weights = torch.randn(32, 3, 32, 32), torch.randn(4, 32, 4)
    # A first gradient chooses the engine; the second one is compared with that of rows one after the other.
    gradients = []
    for _ in range(2):
        members.zero_grad()
        (members(inputs) * weights).sum().backward()
        gradients.append(dict(members.named_parameters())["shared.0.weight"].grad.clone())
    members._merged = Merged(members.skeleton, members.differing)
    members.zero_grad()
    (members(inputs) * weights).sum().backward()
    expected = dict(members.named_parameters())["shared.0.weight"].grad
    for found in gradients:
        assert float((found - expected).abs().max()) <= 0.02 * float(expected.abs().max())
    assert (len(calls) > 2) == (sign == 1)  # two of the comparison
