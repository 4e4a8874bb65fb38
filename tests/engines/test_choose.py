"""The choice of an engine: nothing is changed by it, and no engine is used that gives other numbers."""

import itertools
import random

import pytest
import torch
from torch import nn

from enfold import DeepEnsemble, EnfoldError
from enfold.engines.base import Loop
from enfold.engines.choose import choose_engine
from enfold.engines.stacked import StackedProgram
from enfold.engines.vmap import Vmap
from enfold.errors import SeparateModulesWarning
from enfold.networks import MLP
from zoo import ZOO, Apply, population, vectors


def test_an_unknown_engine_is_refused_in_the_constructor():
    message = "engine must be .*'turbo'"
    with pytest.raises(EnfoldError, match=message):
        DeepEnsemble(population("mlp"), engine="turbo")
    members = DeepEnsemble(population("mlp"), engine="loop")
    with pytest.raises(EnfoldError, match=message):
        members.set_engine("turbo")
    assert members.engine == "loop"


@pytest.mark.parametrize("name", ["mlp", "batch_norm_1d", "dropout", "embedding", "attention_by_hand"])
def test_auto_chooses_stacked_where_it_is_correct(name):
    assert isinstance(DeepEnsemble(population(name)).choose_engine(ZOO[name].inputs(4)), StackedProgram)


def test_the_reference_mlp_is_stacked():
    members = DeepEnsemble(lambda: MLP(6, (8, 8), 3, dropout=0.1), 2)
    assert isinstance(members.choose_engine(vectors(1)), StackedProgram)


@pytest.mark.parametrize("name", ["mlp", "dropout", "batch_norm_1d", "reassigned_buffer", "functional_dropout"])
@pytest.mark.parametrize("engine", ["auto", "measure"])
@pytest.mark.parametrize("training", [False, True])
def test_choosing_changes_nothing(name, engine, training):
    members = DeepEnsemble(population(name), engine=engine).train(training)
    members.skeleton.network.train(training)
    before = {key: tensor.detach().clone() for key, tensor in members.expand().items()}
    modes = [part.training for part in members.skeleton.network.modules()]
    draws = torch.get_rng_state(), random.getstate()
    members.choose_engine(ZOO[name].inputs(4))
    assert all(torch.equal(tensor, before[key]) for key, tensor in members.expand().items())
    assert [part.training for part in members.skeleton.network.modules()] == modes
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert random.getstate() == draws[1]
    assert all(parameter.grad is None for parameter in members.parameters())


def test_the_engine_is_chosen_once_and_again_on_request():
    members, inputs = DeepEnsemble(population("mlp")), vectors(4)
    members(inputs)
    first = members.choose_engine(inputs)
    assert members.choose_engine(vectors(2)) is first
    assert isinstance(members.set_engine("vmap").choose_engine(inputs), Vmap)
    assert isinstance(members.set_engine("loop").choose_engine(inputs), Loop)


def test_measure_chooses_an_engine_that_supports_the_network():
    for name in ("control_flow", "lstm"):
        assert isinstance(DeepEnsemble(population(name), engine="measure").choose_engine(ZOO[name].inputs(4)), Loop)
    networks, inputs = population("mlp"), vectors(4)
    torch.testing.assert_close(
        DeepEnsemble(networks, engine="measure")(inputs), torch.stack([net(inputs) for net in networks])
    )


def test_failing_inputs_do_not_fix_the_engine():
    members = DeepEnsemble(population("mlp"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        members(torch.zeros(4, 7))
    assert isinstance(members.choose_engine(vectors(4)), StackedProgram)


def test_lower_precision_is_not_treated_as_a_difference():
    members = DeepEnsemble(population("layer_norm"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert members(vectors(4)).dtype == torch.bfloat16
        assert isinstance(members.choose_engine(vectors(4)), StackedProgram)
    half = DeepEnsemble(population("layer_norm")).bfloat16()
    assert isinstance(half.choose_engine(vectors(4).bfloat16()), StackedProgram)


def remembering(**parts):
    """Its outputs depend on what it was called with before."""

    def forward(net, x):
        outputs = net.layer(x)
        if net.last is not None:
            outputs = outputs + net.last.mean()
        net.last = outputs.detach()
        return outputs

    network = Apply(forward, layer=nn.Linear(6, 3), **parts)
    network.last = None
    return network


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_networks_with_state_run_as_separate_modules(engine):
    networks = [remembering(), remembering()]
    with pytest.warns(SeparateModulesWarning, match="member 1"):
        members = DeepEnsemble(networks, engine=engine)(vectors(4))
    torch.testing.assert_close(members, torch.stack([network(vectors(4)) for network in networks]))


def test_joint_engines_are_refused_for_networks_with_state():
    with pytest.raises(EnfoldError, match="vmap"):
        DeepEnsemble([remembering(), remembering()], engine="vmap")(vectors(4))


def test_a_single_network_may_have_state():
    members = DeepEnsemble([remembering()], engine="loop")
    assert members(vectors(4)).shape == (1, 4, 3)


def test_networks_with_their_own_generators_run_as_separate_modules():
    source = itertools.count()
    with pytest.warns(SeparateModulesWarning):
        members = DeepEnsemble([Apply(lambda net, x: net.layer(x) + next(source), layer=nn.Linear(6, 3))] * 2)(
            vectors(4)
        )
    assert members.shape == (2, 4, 3)


def test_vmap_precedes_the_loop_on_other_devices():
    """There is no other device here; the choice only looks at the inputs' device."""

    class Elsewhere(torch.Tensor):
        device = torch.device("xpu")

    inputs = vectors(4).as_subclass(Elsewhere)
    for name, kind in {"mlp": StackedProgram, "raw_parameters": Vmap, "control_flow": Loop}.items():
        members = DeepEnsemble(population(name))
        assert isinstance(choose_engine("auto", members.skeleton, members.expand(), inputs), kind)


@pytest.mark.parametrize("name", ["mlp", "dropout", "batch_norm_1d"])
def test_an_engine_that_is_chosen_in_inference_mode_is_the_same(name):
    """A training with validation examples chooses it there; a resumed training chooses it in its first step."""
    members = DeepEnsemble(population(name))
    with torch.inference_mode():
        assert isinstance(members.choose_engine(ZOO[name].inputs(4)), StackedProgram)
