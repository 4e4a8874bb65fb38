"""Parameters that a member does not use in a batch are unchanged, as in training of a single network."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold import Data, DeepEnsemble, Split, TrainConfig, fit
from enfold.data.batches import Batch
from enfold.ensembles.lora_ensemble import LoRAEnsemble
from enfold.errors import UnusedParameterWarning
from enfold.train.objective import batch_outputs

pytestmark = pytest.mark.filterwarnings("ignore:.*nearly identical")
OPTIMIZERS = {
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "adam": {"optimizer": "adam", "weight_decay": 0.1},
    "sgd": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
}


class Exits(nn.Module):
    """One of two layers is used, as the values decide."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.a(inputs).relu()
        chosen = self.b if float(inputs.mean()) > float(self.a.bias.detach().mean()) else self.c
        return self.head(chosen(hidden).relu())


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """An objective of the user's own, by which all members are run in one pass."""
    logits = batch_outputs(model, batch)
    labels = batch.targets if batch.own else batch.targets.expand(len(logits), -1)
    return torch.stack([F.cross_entropy(own, each) for own, each in zip(logits, labels, strict=True)])


@pytest.fixture
def networks() -> list[nn.Module]:
    torch.manual_seed(1)
    return [Exits().double() for _ in range(3)]


@pytest.fixture
def data() -> Data:
    source = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(60, 6, generator=source).double(), torch.randint(3, (60,), generator=source)
    return Data(Split(inputs, labels), [], [], 3, (6,))


def plan(**changes: object) -> TrainConfig:
    return TrainConfig(**{"epochs": 3, "batch_size": 5, "lr": 1e-2, "schedule": "constant", **changes})


def states(members: DeepEnsemble) -> list[dict[str, Tensor]]:
    return [network.state_dict() for network in members]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-12, atol=1e-14)


@pytest.mark.combinations
@pytest.mark.parametrize("objective", [None, cross_entropy], ids=["member by member", "all at once"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_members_are_trained_like_single_networks(networks, data, name, objective):
    """Beside fit of a single network, and beside a loop by hand, in which torch leaves what has no gradient."""
    settings = plan(order="shared", **OPTIMIZERS[name])
    members = DeepEnsemble(networks)
    fit(members, data, config=settings, objective=objective, quiet=True)
    seen: set[bool] = set()
    for index, found in enumerate(states(members)):
        alone = copy.deepcopy(networks[index])
        fit(alone, data, config=settings, quiet=True)
        same(found, alone.state_dict())
        by_hand = copy.deepcopy(networks[index])
        seen |= trained_by_hand(by_hand, data, settings)
        same(found, by_hand.state_dict())
    assert seen == {True, False}, "some batches use what others do not"


def trained_by_hand(network: nn.Module, data: Data, settings: TrainConfig) -> set[bool]:
    from enfold.data.batches import Order

    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[settings.optimizer]
    more = {"momentum": 0.9, "nesterov": True} if settings.optimizer == "sgd" else {}
    optimizer = kind(network.parameters(), lr=1e-2, weight_decay=0.1, **more)
    seen: set[bool] = set()
    for epoch in range(settings.epochs):
        for batch in Order(settings.batch_size).batches(data, epoch):
            optimizer.zero_grad()
            F.cross_entropy(network(batch.inputs), batch.targets).backward()
            seen.add(network.b.weight.grad is None)
            optimizer.step()
    return seen


@pytest.mark.combinations
@pytest.mark.parametrize("changes", [{}, {"lr": (1e-2, 2e-2, 3e-3)}, {"clip_norm": 0.1}, {"label_smoothing": 0.1}])
def test_a_single_member_equals_member_k(networks, data, changes):
    members, settings = DeepEnsemble(networks), plan(weight_decay=0.1, **changes)
    fit(members, data, config=settings, quiet=True)
    rate = settings.lr
    for index, found in enumerate(states(members)):
        one = DeepEnsemble([networks[index]])
        own = rate[index] if isinstance(rate, tuple) else rate
        fit(one, data, config=settings.replace(first_member=index, lr=own), quiet=True)
        same(found, one.member(0).state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stopped_training_resumes_to_the_same_bits(networks, data, name, tmp_path):
    settings, file = plan(epochs=4, **OPTIMIZERS[name]), tmp_path / "state.safetensors"
    whole = DeepEnsemble(networks)
    fit(whole, data, config=settings, quiet=True)
    for _ in range(2):
        stopping, left = DeepEnsemble(networks), itertools.count()

        def stop(record: object, left: itertools.count[int] = left) -> None:
            if next(left):
                raise KeyboardInterrupt

        try:
            fit(stopping, data, config=settings, checkpoint=file, on_epoch=stop, quiet=True)
        except KeyboardInterrupt:
            continue
    stopping = DeepEnsemble(networks)
    fit(stopping, data, config=settings, checkpoint=file, quiet=True)
    for one, other in zip(states(whole), states(stopping), strict=True):
        assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def by_hand(members: DeepEnsemble, data: Data, steps: int = 12) -> None:
    optimizer = torch.optim.AdamW(members.parameters(), lr=1e-2)
    for inputs, labels in zip(data.train.inputs.split(5), data.train.labels.split(5), strict=True):
        optimizer.zero_grad()
        sum(F.cross_entropy(logits, labels) for logits in members(inputs)).backward()
        optimizer.step()


def test_a_user_loop_gives_one_warning(networks, data):
    members = DeepEnsemble(networks).train()
    with pytest.warns(UnusedParameterWarning, match=r"'[bc]\.weight'") as found:
        by_hand(members, data)
    assert len([each for each in found if each.category is UnusedParameterWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnusedParameterWarning)
        by_hand(members, data)
        fit(DeepEnsemble(networks), data, config=plan(), quiet=True)


def test_no_warning_if_all_parameters_are_used(data):
    members = DeepEnsemble([nn.Linear(6, 3).double() for _ in range(3)], engine="loop").train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnusedParameterWarning)
        by_hand(members, data)
        for _ in range(2):
            for logits in members(data.train.inputs):
                logits.square().mean().backward(retain_graph=True)
    assert all(parameter.grad is not None for parameter in members.parameters())


def test_unused_parameters_of_efficient_ensembles_are_unchanged(networks, data):
    members = LoRAEnsemble(networks[0], 2)
    fit(members, data, config=plan(weight_decay=0.1), quiet=True)
    assert all(bool(tensor.isfinite().all()) for tensor in members.expand().values())
