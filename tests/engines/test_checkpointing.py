"""Activation checkpointing: gradients and statistics as without it, and torch is unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clouds import three_clouds
from enfold.analysis.paths import Bezier
from enfold.engines.base import Loop
from enfold.engines.skeleton import Skeleton, read_state
from enfold.engines.verify import find_recomputation
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.tree_net import TreeNet
from enfold.errors import EnfoldError
from enfold.merge import perm_avg, soup, straight_through
from enfold.train import TrainConfig, fit
from fresh import run_python

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


class Block(nn.Module):
    """Layers of one width, so that a wrong saved tensor would fit, with a nested block."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.inner = Block(depth - 1) if depth else None
        self.reentrant: bool | None = None  # None: not checkpointed

    def forward(self, inputs: Tensor) -> Tensor:
        """Checkpointed, or not."""
        if self.reentrant is None:
            return self.run(inputs)
        return checkpoint(self.run, inputs, use_reentrant=self.reentrant)

    def run(self, inputs: Tensor) -> Tensor:
        """The part that is run twice."""
        hidden = torch.tanh(self.last(torch.relu(self.norm(self.first(inputs)))))
        return hidden if self.inner is None else self.inner(hidden)


class Network(nn.Module):
    """A block between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(4, 6), Block(), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, 4) -> (B, 3)."""
        return self.head(self.block(torch.tanh(self.stem(inputs))))


def network(seed: int, reentrant: bool | None) -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Network()
    for part in (made.block, made.block.inner):
        part.reentrant = reentrant
    return made


def deep(reentrant: bool | None, count: int = 3, engine: str = "auto") -> DeepEnsemble:
    return DeepEnsemble([network(seed, reentrant) for seed in range(count)], engine=engine)


MODELS = {
    "auto": deep,
    "loop": lambda kind: deep(kind, engine="loop"),
    "batch ensemble": lambda kind: BatchEnsemble(network(0, kind), 3, init="signs"),
    "trunk before": lambda kind: TreeNet(network(0, kind), 3, split="block"),
    "trunk inside": lambda kind: TreeNet(network(0, kind), 3, split="block.last"),
    "trunk inside the inner one": lambda kind: TreeNet(network(0, kind), 3, split="block.inner.last"),
    "trunk behind": lambda kind: TreeNet(network(0, kind), 3, split="head"),
}


@pytest.mark.parametrize(("name", "reentrant"), [*((name, False) for name in MODELS), ("auto", True), ("loop", True)])
def test_gradients_of_all_members_at_once(name, reentrant):
    inputs, weights = torch.randn(8, 4).double(), torch.randn(3, 8, 3)
    found = []
    for kind in (None, reentrant):
        model = MODELS[name](kind).train().double()
        for _ in range(2):  # the second call finds the values of the first one
            model.zero_grad()
            outputs = model(inputs)
            (outputs * weights).sum().backward()
        found.append((outputs, {key: p.grad for key, p in model.named_parameters()}, dict(model.named_buffers())))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)
    assert any(bool(gradient.any()) for key, gradient in found[0][1].items() if "block" in key)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_those_of_plain_networks(reentrant):
    inputs = torch.randn(8, 4).double()
    members = deep(reentrant).train().double()
    members(inputs).square().sum().backward()
    assert isinstance(members.choose_engine(inputs), Loop)
    for index in range(3):
        plain = network(index, reentrant).double()
        plain(inputs).square().sum().backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(members.tree.state()[name].grad[index], parameter.grad)


@pytest.mark.parametrize("last", [0, 2])
def test_gradients_after_other_members_were_run(last):
    inputs, found = torch.randn(8, 4).double(), []
    for reentrant in (None, False):
        members = deep(reentrant).train().double()
        first = members(inputs)
        members(2 * inputs)
        members.member(0)
        with torch.no_grad():
            members(3 * inputs)
        found.append(torch.autograd.grad(first[last].square().sum(), list(members.parameters())))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_skeleton_runs_copies_for_two_pending_graphs(reentrant):
    inputs, found = torch.randn(8, 4), []
    states = [{k: v.detach().clone() for k, v in read_state(network(seed, None)).items()} for seed in range(2)]
    for kind in (None, reentrant):
        skeleton, leaves, losses = Skeleton(network(0, kind)), [], []
        find_recomputation(skeleton, states[0], inputs)
        assert skeleton.recomputes is (kind is not None)
        for state in states:
            leaves.append({k: v.clone().requires_grad_(k in skeleton.trainable) for k, v in state.items()})
            with skeleton.use_values(leaves[-1]) as module:
                losses.append(module(inputs).square().sum())
        for loss in losses:
            loss.backward()
        found.append([{k: v.grad for k, v in own.items() if v.requires_grad} for own in leaves])
    torch.testing.assert_close(found[1], found[0])


MERGES = {
    "perm_avg": lambda members, data: perm_avg(
        members, data, config=TrainConfig(epochs=1, batch_size=16, lr=0.1, optimizer="sgd"), quiet=True
    ),
    "straight_through": lambda members, data: straight_through(members, data, epochs=2, lr=1.0, batch_size=16),
    "soup": lambda members, data: soup(members, data, kind="learned", epochs=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MERGES)
def test_merges_are_those_of_the_network_without_checkpointing(name):
    data = three_clouds(40, 20, 20)
    expected, found = (MERGES[name](deep(kind, 2, "loop"), data).state_dict() for kind in (None, False))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_curves_are_those_of_the_network_without_checkpointing():
    inputs, found = torch.randn(8, 4), []
    states = [{k: v.detach().clone() for k, v in read_state(network(seed, None)).items()} for seed in range(2)]
    for kind in (None, False):
        curve = Bezier(network(0, kind), *states).train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            curve(inputs).square().sum().backward()
        found.append({name: parameter.grad for name, parameter in curve.named_parameters()})
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.filterwarnings("ignore:the 3 members are nearly identical")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["auto", "batch ensemble"])
def test_training_is_that_of_the_network_without_checkpointing(name, reentrant):
    data, trained = three_clouds(40, 20, 20), []
    for kind in (None, reentrant):
        members = MODELS[name](kind)
        members.set_engine("loop")
        fit(members, data, config=TrainConfig(epochs=2, batch_size=16, lr=0.05, optimizer="sgd"), quiet=True)
        trained.append(members.state_dict())
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_engines_that_cannot_run_it_are_refused_by_name(reentrant):
    for engine in ("vmap", "stacked"):
        with pytest.raises(EnfoldError, match=f"'{engine}'.*checkpointing"):
            deep(reentrant, engine=engine).train()(torch.randn(8, 4))
    with pytest.raises(EnfoldError, match=r"joint.*checkpointing"):
        BatchEnsemble(network(0, reentrant), 3, init="signs", batch_norm="joint").train()(torch.randn(8, 4))


def test_computed_parameters_need_blocks_that_are_not_reentrant():
    with pytest.raises(EnfoldError, match="use_reentrant=False"):
        BatchEnsemble(network(0, True), 3, init="signs").train()(torch.randn(8, 4))


@pytest.mark.parametrize("reentrant", [False, True])
def test_separate_networks_are_checkpointed_as_before(reentrant):
    inputs, found = torch.randn(8, 4), []
    for kind in (None, reentrant):
        alone = network(0, kind)
        alone(inputs).square().sum().backward()
        found.append([parameter.grad for parameter in alone.parameters()])
    torch.testing.assert_close(found[1], found[0])


UNCHANGED = """
import torch, torch.utils.checkpoint
from torch import nn
kinds = (torch.utils.checkpoint, torch.utils.checkpoint.CheckpointFunction, nn.Module, torch.Tensor, torch.autograd,
         torch.autograd.Function, torch.nn.functional, torch.nn.modules.module, torch.fx.Tracer)
def read():
    return {(kind.__name__, name): value for kind in kinds for name, value in vars(kind).items() if callable(value)
            or isinstance(value, (classmethod, staticmethod))}
before = read()
apply = torch.utils.checkpoint.CheckpointFunction.apply.__func__
import enfold
class Net(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(4, 6), nn.Linear(6, 3), reentrant
    def forward(self, x):
        x = self.first(x)
        if self.reentrant is None:
            return self.last(x.relu())
        return torch.utils.checkpoint.checkpoint(lambda x: self.last(x.relu()), x, use_reentrant=self.reentrant)
for reentrant in (None, False, True):
    members = enfold.DeepEnsemble([Net(reentrant) for _ in range(2)])
    members.train()(torch.randn(8, 4)).sum().backward()
    members.eval()(torch.randn(8, 4))
after = read()
changed = [name for name in before if before[name] is not after[name]]
assert not changed, changed
assert torch.utils.checkpoint.CheckpointFunction.apply.__func__ is apply
"""


def test_torch_is_not_changed():
    done = run_python(UNCHANGED)
    assert done.returncode == 0, done.stderr
