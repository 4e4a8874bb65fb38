"""What every perturbation keeps to, over the registry: a new file in distill/perturb/ is tested here with no edit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from classroom import make_pictures
from enfold.data import Data
from enfold.distill.perturbation import Perturbation
from enfold.errors import EnfoldError
from enfold.registry import method, methods

PERTURBATIONS = methods("perturb")
every = pytest.mark.parametrize("perturbation", PERTURBATIONS.values(), ids=PERTURBATIONS)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_known_perturbations_are_found():
    assert set(PERTURBATIONS) == {"gaussian", "ods", "conf_ods", "tdiv_sdiv"}
    assert method("perturb", "tdiv-sdiv").kind.__name__ == "TDivSDiv"
    assert [name for name, one in PERTURBATIONS.items() if one.kind.replaces] == ["tdiv_sdiv"]


@every
def test_a_perturbation_is_a_frozen_dataclass_that_tells_its_idea(perturbation):
    assert issubclass(perturbation.kind, Perturbation)
    assert perturbation.kind.__dataclass_params__.frozen
    assert next(iter(perturbation.fields)) == "step"
    assert all(field.default is not dataclasses.MISSING for field in perturbation.fields.values())
    assert perturbation.idea.endswith(".")
    with pytest.raises(EnfoldError, match="has no setting 'nonsense'"):
        perturbation.make(nonsense=1)


@every
@pytest.mark.parametrize("step", [-1.0, float("nan"), float("inf")])
def test_a_step_is_a_length(perturbation, step):
    with pytest.raises(EnfoldError, match=f"a step must be 0 or more, got {step}: 1 is"):
        perturbation.make(step=step)


@every
@pytest.mark.parametrize("normalised", [True, False])
def test_what_is_returned(perturbation, teachers, student, normalised):
    pictures = make_pictures(normalised)
    inputs = pictures.prepare(pictures.train.inputs)
    kept = inputs.clone()
    moved = perturbation.make()(inputs, pictures, teachers, student, source())
    assert (moved.shape, moved.dtype) == (inputs.shape, inputs.dtype)
    assert not moved.requires_grad
    assert bool(torch.isfinite(moved).all())
    assert not torch.equal(moved, inputs)
    assert torch.equal(inputs, kept)
    assert not inputs.requires_grad
    pixels = pictures.denormalise(moved)
    assert float(pixels.min()) > -1e-6
    assert float(pixels.max()) < 1 + 1e-6
    assert float((pixels - pictures.denormalise(inputs)).abs().max()) < 10 / 255


@every
def test_models_are_left_as_they_were(perturbation, teachers, student, pictures, snapshot):
    inputs = pictures.prepare(pictures.train.inputs)
    unchanged = [snapshot(model) for model in (teachers, student)]
    state = torch.random.get_rng_state()
    perturbation.make()(inputs, pictures, teachers, student, source())
    assert all(one() for one in unchanged)
    assert torch.equal(state, torch.random.get_rng_state())


@every
def test_teachers_in_train_mode_are_asked_in_eval_mode(perturbation, teachers, student, pictures, snapshot):
    inputs = pictures.prepare(pictures.train.inputs)
    expected = perturbation.make()(inputs, pictures, teachers, student, source())
    unchanged = snapshot(teachers.train())
    assert torch.equal(perturbation.make()(inputs, pictures, teachers, student, source()), expected)
    assert unchanged()


@every
def test_the_same_source_gives_the_same_moves(perturbation, teachers, student, pictures):
    inputs = pictures.prepare(pictures.train.inputs)
    torch.manual_seed(1)
    first = perturbation.make()(inputs, pictures, teachers, student, source(3))
    torch.manual_seed(2)
    with torch.no_grad():  # the caller's wish for no graph changes nothing
        assert torch.equal(perturbation.make()(inputs, pictures, teachers, student, source(3)), first)
    others = [perturbation.make()(inputs, pictures, teachers, student, source(seed)) for seed in range(4, 12)]
    assert any(not torch.equal(first, other) for other in others)


@every
def test_no_step_is_no_move(perturbation, teachers, student, pictures):
    inputs = pictures.prepare(pictures.train.inputs)
    assert torch.equal(perturbation.make(step=0.0)(inputs, pictures, teachers, student, source()), inputs)


@every
def test_tokens_are_not_moved(perturbation, teachers, student, pictures):
    with pytest.raises(EnfoldError, match=r"must be real numbers to be moved, got torch.int64: leave the perturb"):
        perturbation.make()(torch.ones(2, 3, dtype=torch.long), pictures, teachers, student, source())


@every
def test_an_empty_batch_stays_empty(perturbation, student, pictures):
    inputs = pictures.prepare(pictures.train.inputs[:0])
    assert perturbation.make()(inputs, pictures, student, student, source()).shape == (0, 2, 4, 4)


@every
def test_half_precision_is_no_hindrance(perturbation, teachers, student, pictures: Data):
    inputs = pictures.prepare(pictures.train.inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moved = perturbation.make()(inputs, pictures, teachers, student, source())
    assert moved.dtype == torch.float32
    assert bool(torch.isfinite(moved).all())
