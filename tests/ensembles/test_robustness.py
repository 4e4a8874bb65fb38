"""All methods: training by hand, frozen networks, scalar parameters, configurations that are configured twice."""

import pytest
import torch
from torch import Tensor, nn

from clouds import three_clouds
from enfold.engines.skeleton import copy_network
from enfold.ensembles.film_ensemble import FiLMEnsemble
from enfold.ensembles.lora_ensemble import LoRAEnsemble
from enfold.ensembles.mc_dropout import MCDropout
from enfold.ensembles.mimo import MIMO
from enfold.ensembles.multi_head import MultiHead
from enfold.ensembles.snapshot_ensemble import SnapshotEnsemble
from enfold.ensembles.subspace_sampling import SubspaceSampling
from enfold.ensembles.swag import SWAG
from enfold.errors import EnfoldError
from enfold.networks import MLP
from enfold.registry import methods
from enfold.train import TrainConfig, fit
from fitting import any_network, fitted

DATA = three_clouds(64, 32, 32)
PLAN = TrainConfig(epochs=6, batch_size=16, lr=0.02)

pytestmark = pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")


class Gated(nn.Module):
    """A network with a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = MLP(4, [8], 3), nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.gate * self.body(inputs)


class Viewing(nn.Module):
    """Flattens by a view, which needs its input to lie in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.view(images.size(0), -1))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("name", sorted(methods("ensemble")))
def test_configure_is_idempotent(name):
    method = methods("ensemble")[name].target
    plan = method(any_network()).configure(TrainConfig(epochs=20, label_smoothing=0.0))
    assert method(any_network()).configure(plan) == plan


def test_fit_uses_the_configuration_of_the_method():
    snapshots = SnapshotEnsemble(MLP(4, [8], 3), 3)
    fit(snapshots, DATA, config=PLAN, quiet=True)
    kept = snapshots.expand()["head.weight"]
    assert not torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[1], kept[2])
    seen = []
    slots = MIMO(MLP(4, [8], 3), 2, batch_repetition=1)
    slots.register_forward_pre_hook(lambda *_: seen.append("equal slots") if slots.training else None)
    fit(slots, DATA, config=PLAN, quiet=True)
    assert not seen, "training gives each slot its own inputs"


def test_a_second_training_starts_again():
    model = SubspaceSampling(MLP(4, [8], 3), 3, kind="gaussian", checkpoints=4)
    fit(model, DATA, config=PLAN, quiet=True)
    fit(model, DATA, config=PLAN.replace(epochs=2), quiet=True)
    assert int(model.count) == 2
    with pytest.raises(EnfoldError, match=r"epochs .*got 1"):
        fit(model, DATA, config=PLAN.replace(epochs=1), quiet=True)


def test_one_number_may_be_a_parameter():
    members = fitted(SWAG(Gated(), 3, rank=2), DATA, PLAN)
    assert members.expand()["gate"].shape == (3,)


def test_there_is_one_network_until_the_end_of_training():
    members = SWAG(MLP(4, [8], 3), 3).train()
    assert members.forward_each(torch.zeros(1, 5, 4)).shape == (1, 5, 3)
    with pytest.raises(EnfoldError, match=r"inputs .*got 3"):
        members.forward_each(torch.zeros(3, 5, 4))


def test_mimo_gives_a_network_inputs_that_it_can_view():
    model = MIMO(Viewing(), 3)
    assert model(torch.randn(5, 1, 4, 4)).shape == (3, 5, 3)


def test_new_parameters_are_trained_in_a_frozen_network():
    frozen = normed().requires_grad_(False)
    assert isinstance(copy_network(frozen)[0].weight, nn.Parameter)
    assert FiLMEnsemble(frozen, 2).own.state()["1.weight"].requires_grad
    assert MIMO(frozen, 2).module[0].weight.requires_grad
    heads = LoRAEnsemble(frozen, 2, head="drawn").own.state()
    assert heads["3.weight"].requires_grad
    assert not torch.equal(heads["3.weight"][0], heads["3.weight"][1])


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_one_batch_updates_a_trunk_once_with_any_engine(engine):
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    members = MultiHead(network, 4, engine=engine).train()
    members(torch.randn(6, 4))
    assert int(members.shared.state()["1.num_batches_tracked"]) == 1


def test_dropout_that_is_never_called_or_used_in_place():
    idle = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    idle.dropout = nn.Identity()
    idle[1].unused = nn.Dropout(0.5)
    with pytest.raises(EnfoldError, match="needs a network with dropout"):
        MCDropout(idle, 3).eval()(torch.randn(5, 4))

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 32), nn.Linear(32, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs).relu()
            nn.functional.dropout(hidden, 0.5, self.training, inplace=True)
            return self.second(hidden)

    with torch.no_grad():
        assert (MCDropout(InPlace(), 3).eval()(torch.randn(5, 4)).std(0) > 0).all()
