"""What every perturbation keeps to, over the registry: a new file in distill/perturb/ is tested here with no edit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from classroom import make_pictures
from enfold.data import Data
from enfold.distill.perturbation import Perturbation, PixelStep
from enfold.errors import EnfoldError
from enfold.registry import methods

PERTURBATIONS = methods("perturb")
STEPS = {name: one for name, one in PERTURBATIONS.items() if issubclass(one.target, PixelStep)}
every = pytest.mark.parametrize("perturbation", PERTURBATIONS.values(), ids=PERTURBATIONS)
every_step = pytest.mark.parametrize("perturbation", STEPS.values(), ids=STEPS)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_known_perturbations_are_found():
    assert set(PERTURBATIONS) >= {"gaussian", "ods", "conf_ods", "tdiv_sdiv", "mixup", "cutmix"}
    replacing = {name for name, one in PERTURBATIONS.items() if one.target.replaces_batch}
    assert replacing >= {"tdiv_sdiv", "mixup", "cutmix"}
    assert not replacing & {"gaussian", "ods", "conf_ods"}


@every
def test_a_perturbation_is_a_documented_frozen_dataclass(perturbation):
    assert issubclass(perturbation.target, Perturbation)
    assert perturbation.target.__dataclass_params__.frozen
    assert all(field.default is not dataclasses.MISSING for field in dataclasses.fields(perturbation.target))
    assert all(argument.help for argument in perturbation.arguments.values())
    assert perturbation.idea.endswith(".")


@every_step
@pytest.mark.parametrize("step", [-1.0, float("nan"), float("inf")])
def test_a_step_is_a_length(perturbation, step):
    with pytest.raises(EnfoldError, match=f"step .* got {step}"):
        perturbation.target(step=step)


@pytest.mark.combinations
@every
@pytest.mark.parametrize("normalised", [True, False])
def test_what_is_returned(perturbation, teachers, student, normalised):
    pictures = make_pictures(normalised)
    inputs = pictures.prepare(pictures.train.inputs)
    kept = inputs.clone()
    moved = perturbation.target()(inputs, pictures, teachers, student, source())
    assert (moved.shape, moved.dtype) == (inputs.shape, inputs.dtype)
    assert not moved.requires_grad
    assert bool(torch.isfinite(moved).all())
    others = [perturbation.target()(inputs, pictures, teachers, student, source(seed)) for seed in range(5)]
    assert any(not torch.equal(other, inputs) for other in others)
    assert torch.equal(inputs, kept)
    assert not inputs.requires_grad
    pixels = pictures.denormalise(moved)
    assert float(pixels.min()) > -1e-6
    assert float(pixels.max()) < 1 + 1e-6
    if isinstance(perturbation.target(), PixelStep):
        assert float((pixels - pictures.denormalise(inputs)).abs().max()) < 10 / 255


@pytest.mark.combinations
@every
def test_models_are_not_modified(perturbation, teachers, student, pictures, snapshot):
    inputs = pictures.prepare(pictures.train.inputs)
    unchanged = [snapshot(model) for model in (teachers, student)]
    state = torch.random.get_rng_state()
    perturbation.target()(inputs, pictures, teachers, student, source())
    assert all(one() for one in unchanged)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.combinations
@every
def test_teachers_run_in_eval_mode(perturbation, teachers, student, pictures, snapshot):
    inputs = pictures.prepare(pictures.train.inputs)
    expected = perturbation.target()(inputs, pictures, teachers, student, source())
    unchanged = snapshot(teachers.train())
    assert torch.equal(perturbation.target()(inputs, pictures, teachers, student, source()), expected)
    assert unchanged()


@pytest.mark.combinations
@every
def test_the_same_generator_gives_the_same_perturbation(perturbation, teachers, student, pictures):
    inputs = pictures.prepare(pictures.train.inputs)
    torch.manual_seed(1)
    first = perturbation.target()(inputs, pictures, teachers, student, source(3))
    torch.manual_seed(2)
    with torch.no_grad():  # the caller's wish for no graph changes nothing
        assert torch.equal(perturbation.target()(inputs, pictures, teachers, student, source(3)), first)
    others = [perturbation.target()(inputs, pictures, teachers, student, source(seed)) for seed in range(4, 12)]
    assert any(not torch.equal(first, other) for other in others)


@every_step
def test_step_zero_changes_nothing(perturbation, teachers, student, pictures):
    inputs = pictures.prepare(pictures.train.inputs)
    assert torch.equal(perturbation.target(step=0.0)(inputs, pictures, teachers, student, source()), inputs)


@every
def test_tokens_are_not_perturbed(perturbation, teachers, student, pictures):
    with pytest.raises(EnfoldError, match=r"perturb .* got torch.int64"):
        perturbation.target()(torch.ones(2, 3, dtype=torch.long), pictures, teachers, student, source())


@every
def test_an_empty_batch_stays_empty(perturbation, student, pictures):
    inputs = pictures.prepare(pictures.train.inputs[:0])
    assert perturbation.target()(inputs, pictures, student, student, source()).shape == (0, 2, 4, 4)


@pytest.mark.combinations
@every
def test_half_precision_is_supported(perturbation, teachers, student, pictures: Data):
    inputs = pictures.prepare(pictures.train.inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moved = perturbation.target()(inputs, pictures, teachers, student, source())
    assert moved.dtype == torch.float32
    assert bool(torch.isfinite(moved).all())
