"""Checkpointed blocks: gradients and statistics are those of the same network without checkpointing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from clouds import three_clouds
from enfold.engines.recompute import entered
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.tree_net import TreeNet
from enfold.errors import EnfoldError
from enfold.merge import perm_avg, soup, straight_through
from enfold.train import TrainConfig, fit


class Block(nn.Module):
    """Layers of one width, so that what is saved for one of them would fit another; inside, a block of its own."""

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
        """What is run twice."""
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


def stacked(reentrant: bool | None, count: int = 3) -> DeepEnsemble:
    return DeepEnsemble([network(seed, reentrant) for seed in range(count)], engine="loop")


MODELS = {
    "loop": stacked,
    "trunk before": lambda kind: TreeNet(network(0, kind), 3, split="block"),
    "trunk inside": lambda kind: TreeNet(network(0, kind), 3, split="block.last"),
    "trunk inside the inner one": lambda kind: TreeNet(network(0, kind), 3, split="block.inner.last"),
    "trunk behind": lambda kind: TreeNet(network(0, kind), 3, split="head"),
    "merged": lambda kind: BatchEnsemble(network(0, kind), 3, init="signs", batch_norm="joint"),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_all_members_at_once(name):
    inputs, weights = torch.randn(8, 4).double(), torch.randn(3, 8, 3)
    found = []
    for reentrant in (None, False):
        model = MODELS[name](reentrant).train().double()
        outputs = model(inputs)
        (outputs * weights).sum().backward()
        found.append((outputs, {key: p.grad for key, p in model.named_parameters()}, dict(model.named_buffers())))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)
    assert any(bool(gradient.any()) for key, gradient in found[0][1].items() if "block" in key)
    assert not entered.contexts
    assert not entered.blocks


@pytest.mark.parametrize("last", [0, 2])
def test_gradients_after_other_members_were_run(last):
    inputs, found = torch.randn(8, 4), []
    for reentrant in (None, False):
        members = stacked(reentrant).train()
        first = members(inputs)
        members(2 * inputs)
        found.append(torch.autograd.grad(first[last].square().sum(), list(members.parameters())))
    torch.testing.assert_close(found[1], found[0])


FOLDS = {
    "perm_avg": partial(perm_avg, config=TrainConfig(epochs=1, batch_size=16, lr=0.1, optimizer="sgd")),
    "straight_through": partial(straight_through, epochs=2, lr=1.0, batch_size=16),
    "soup": partial(soup, kind="learned", epochs=1),
}


@pytest.mark.parametrize("name", FOLDS)
def test_folds_are_those_of_the_network_without_checkpointing(name):
    data = three_clouds(40, 20, 20)
    expected, found = (FOLDS[name](stacked(reentrant, 2), data).state_dict() for reentrant in (None, False))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_training_is_that_of_the_network_without_checkpointing():
    data, trained = three_clouds(40, 20, 20), []
    for reentrant in (None, False):
        members = stacked(reentrant)
        fit(members, data, config=TrainConfig(epochs=2, batch_size=16, lr=0.05, optimizer="sgd"), quiet=True)
        trained.append(members.state_dict())
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_cannot_be_run_again_is_refused():
    inputs = torch.randn(8, 4)
    with pytest.raises(EnfoldError, match=r"'vmap' cannot run this network because .*checkpointed block is run again"):
        stacked(False).set_engine("vmap")(inputs)
    outputs = stacked(True).train()(inputs)
    with pytest.raises(EnfoldError, match="got use_reentrant=True or none: pass use_reentrant=False"):
        outputs.sum().backward()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_networks_of_their_own_are_checkpointed_as_before(reentrant):
    inputs, found = torch.randn(8, 4), []
    for kind in (None, reentrant):
        alone = network(0, kind)
        alone(inputs).square().sum().backward()
        found.append([parameter.grad for parameter in alone.parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_functions_of_others_stay_their_own():
    class Own(CheckpointFunction):
        @staticmethod
        def forward(ctx, run, preserve, *args):
            return 3 * args[0]

    assert torch.equal(Own.apply(nn.Identity(), False, torch.ones(2)), 3 * torch.ones(2))
