"""ema: the average of the weights is evaluated, returned and resumed, and training itself is unchanged."""

import pytest
import torch
from torch import nn

import enfold
from enfold import EnfoldError

pytestmark = pytest.mark.filterwarnings("ignore")
SETTINGS = {"epochs": 3, "batch_size": 8, "lr": 1e-2, "quiet": True}


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


def examples(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(30, 5, generator=source), torch.randint(3, (30,), generator=source)


TRAIN, VAL = examples(0), examples(1)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def trained(model: nn.Module, **settings) -> nn.Module:
    enfold.fit(model, TRAIN, **{**SETTINGS, **settings})
    return model


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return make()


def test_the_average_is_that_of_its_equation():
    network, states = fresh(), []
    start = {name: value.clone() for name, value in network.state_dict().items()}

    def collect(module, args):
        if module.training:
            states.append({name: value.clone() for name, value in network.state_dict().items()})

    handle = network.register_forward_pre_hook(collect)
    trained(network, ema=None, select="last")
    handle.remove()
    steps = [*states[1:], {name: value.clone() for name, value in network.state_dict().items()}]
    assert len(steps) == 12
    for step, state in enumerate(steps, 1):
        decay = min(0.9, (1 + step) / (10 + step))
        for name, value in state.items():
            mixed = decay * start[name] + (1 - decay) * value
            start[name] = mixed if value.is_floating_point() else value
    found = trained(fresh(), ema=0.9, select="last").state_dict()
    for name, value in found.items():
        torch.testing.assert_close(value, start[name])


def test_no_decay_gives_the_weights_themselves():
    assert same(trained(fresh(), ema=0.0), trained(fresh()))


def test_the_average_is_evaluated_and_selected():
    network = fresh()
    history = enfold.fit(network, TRAIN, VAL, ema=0.8, **SETTINGS)
    losses = [history.start.validation_loss[0], *(epoch.validation_loss[0] for epoch in history.epochs)]
    assert enfold.evaluate(network, VAL).scores["nll"] == pytest.approx(min(losses), rel=1e-5)
    last = fresh()
    history = enfold.fit(last, TRAIN, VAL, ema=0.8, select="last", **SETTINGS)
    assert enfold.evaluate(last, VAL).scores["nll"] == pytest.approx(history.epochs[-1].validation_loss[0], rel=1e-5)


def test_members_of_an_ensemble_have_their_own_average():
    ensemble = enfold.DeepEnsemble(make, 2, seed=0)
    members = ensemble.networks()
    trained(ensemble, ema=0.9)
    for index, member in enumerate(members):
        alone = trained(member, ema=0.9, first_member=index)
        for one, other in zip(ensemble.member(index).state_dict().values(), alone.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("select", ["best", "last"])
@pytest.mark.parametrize("kind", ["network", "ensemble", "student"])
def test_resume_gives_the_same_bits(kind, select, tmp_path):
    members = enfold.DeepEnsemble(make, 2, seed=0)
    settings = {**SETTINGS, "ema": 0.9, "select": select}

    def run(**options):
        if kind == "student":
            student = enfold.BatchEnsemble(fresh(), 2, seed=0)
            return enfold.distill(members, TRAIN, VAL, student=student, loss=enfold.OneToOne(), **options, **settings)
        model = fresh() if kind == "network" else enfold.DeepEnsemble(make, 2, seed=3)
        enfold.fit(model, TRAIN, VAL, **options, **settings)
        return model

    def stop(record):
        if record.epoch == 1:
            raise KeyboardInterrupt

    file = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint=file, on_epoch=stop)
    assert same(run(checkpoint=file), run())


def test_ensembles_that_collect_weights_and_wrong_decays_are_refused():
    with pytest.raises(EnfoldError, match="ema"):
        trained(enfold.SWA(make()), ema=0.9, epochs=4)
    for wrong in (1.0, -0.1, "much"):
        with pytest.raises(EnfoldError, match="ema"):
            trained(make(), ema=wrong)
