"""TDiv-SDiv: its gradients against autograd, what a step does, and whom it can be used with."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from classroom import Together, make_cnn, make_mlp, make_pictures, population, seeded
from enfold.distill import distill
from enfold.distill.perturb.tdiv_sdiv import TDivSDiv
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError

MIDDLE = make_pictures(low=60, high=200)  # no move is clipped
INPUTS = MIDDLE.prepare(MIDDLE.train.inputs).double()
every_divergence = pytest.mark.parametrize("divergence", ["ce", "kl", "js"])
every_pairs = pytest.mark.parametrize("pairs", ["one", "all"])


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def divergence_of(name: str, one: Tensor, other: Tensor) -> Tensor:
    """D(p_a, p_b) of logits, written out: (B, K), (B, K) -> (B,)."""
    p, q = one.softmax(-1), other.softmax(-1)
    if name == "ce":
        return -(q * p.log()).sum(-1)
    if name == "kl":
        return (p * (p / q).log()).sum(-1)
    middle = (p + q) / 2
    return ((p * (p / middle).log()).sum(-1) + (q * (q / middle).log()).sum(-1)) / 2


def doubles(seed: int = 0) -> list[nn.Module]:
    return [network.double().eval() for network in population(make_cnn, seed=seed)]


def objective(name: str, pairs: list[tuple[int, int]], teachers: list[nn.Module], students: list[nn.Module]):
    """TDiv - SDiv of each example; the second member of a pair is held as it is at the clean inputs."""
    with torch.no_grad():
        fixed = [[network(INPUTS) for network in networks] for networks in (teachers, students)]

    def of(inputs: Tensor) -> Tensor:
        value = torch.zeros(len(inputs), dtype=inputs.dtype)
        for a, b in pairs:
            value = value + divergence_of(name, teachers[a](inputs), fixed[0][b])
            value = value - divergence_of(name, students[a](inputs), fixed[1][b])
        return value

    return of


@every_divergence
@given(seed=st.integers(0, 10**6), size=st.floats(0.1, 5))
def test_the_direction_is_the_gradient_of_the_divergence(divergence, seed, size):
    one, other = size * torch.randn(2, 4, 5, dtype=torch.float64, generator=source(seed))
    one.requires_grad_()
    (expected,) = torch.autograd.grad(divergence_of(divergence, one, other).sum(), one)
    found = TDivSDiv(divergence=divergence).slope(one.detach().log_softmax(-1), other.log_softmax(-1))
    torch.testing.assert_close(found, expected)


@every_divergence
@given(seed=st.integers(0, 10**6), size=st.floats(0.1, 500))
def test_equal_predictions_give_zero_and_certain_ones_finite_directions(divergence, seed, size):
    """In float32, where rounding would leave a direction of its own."""
    one, other = (size * torch.randn(2, 4, 5, generator=source(seed))).log_softmax(-1)
    assert not TDivSDiv(divergence=divergence).slope(one, one.clone()).any()
    assert bool(torch.isfinite(TDivSDiv(divergence=divergence).slope(one, other)).all())


@every_divergence
@every_pairs
def test_a_step_agrees_with_the_published_code(divergence, pairs):
    teachers, students = doubles(), doubles(7)
    perturb = TDivSDiv(step=2.0, pairs=pairs, divergence=divergence)
    moved = perturb(INPUTS, MIDDLE, DeepEnsemble(teachers), DeepEnsemble(students).train(), source(4))
    used = list(itertools.permutations(range(3), 2))
    if pairs == "one":
        again = source(4)
        a = int(torch.randint(3, (), generator=again))
        used = [(a, (a + int(torch.randint(1, 3, (), generator=again))) % 3)]
    pixels = MIDDLE.denormalise(INPUTS).requires_grad_()
    value = objective(divergence, used, teachers, students)(MIDDLE.normalise(pixels))
    (g,) = torch.autograd.grad(value.sum(), pixels)
    for index, own in enumerate(g):
        expected = pixels[index].detach() + 2 / 255 * own / own.norm() * own.numel() ** 0.5
        torch.testing.assert_close(MIDDLE.denormalise(moved)[index], expected)


@pytest.mark.combinations
@every_divergence
@every_pairs
@pytest.mark.parametrize("seed", range(3))
def test_a_small_step_increases_teacher_diversity_more_than_student_diversity(divergence, pairs, seed):
    """Example by example; at least one of the pairs explains the step, and all do together."""
    teachers, students = doubles(), doubles(7)
    perturb = TDivSDiv(step=0.05, pairs=pairs, divergence=divergence)
    moved = perturb(INPUTS, MIDDLE, DeepEnsemble(teachers), DeepEnsemble(students).train(), source(seed))
    drawn = perturb.draw_pairs(3, source(seed))
    value = objective(divergence, [(a, b) for a, others in drawn.items() for b in others], teachers, students)
    with torch.no_grad():
        assert bool((value(moved) > value(INPUTS)).all())


@given(num_members=st.integers(2, 6), seed=st.integers(0, 10**6))
def test_a_pair_is_of_two_members(num_members, seed):
    ((a, (b,)),) = TDivSDiv().draw_pairs(num_members, source(seed)).items()
    assert a != b
    assert {a, b} <= set(range(num_members))
    everybody = TDivSDiv(pairs="all").draw_pairs(num_members, source(seed))
    found = [(a, b) for a, others in everybody.items() for b in others]
    assert found == list(itertools.permutations(range(num_members), 2))


def test_every_ordered_pair_is_drawn_equally_often():
    shared = source(0)
    drawn = [next(iter(TDivSDiv().draw_pairs(3, shared).items())) for _ in range(1200)]
    counts = [drawn.count((a, [b])) for a, b in itertools.permutations(range(3), 2)]
    assert sum(counts) == 1200
    assert min(counts) > 150  # of 200, with a deviation of 13


@pytest.mark.combinations
@every_divergence
@every_pairs
@pytest.mark.parametrize("make", [make_cnn, make_mlp])
def test_equal_teachers_and_students_give_no_perturbation(divergence, pairs, make):
    one, other = seeded(make, 0), seeded(make, 1)
    inputs = INPUTS.float()
    perturb = TDivSDiv(pairs=pairs, divergence=divergence)
    for student in (DeepEnsemble([other] * 3), BatchEnsemble(other, 3, init="ones")):
        moved = perturb(inputs, MIDDLE, DeepEnsemble([one] * 3).eval(), student.train(), source())
        assert torch.equal(moved, inputs)


@every_divergence
def test_equal_students_leave_the_teachers_gradient(divergence):
    teachers, student = DeepEnsemble(doubles()), DeepEnsemble([doubles(7)[0]] * 3)
    moved = TDivSDiv(step=0.05, divergence=divergence)(INPUTS, MIDDLE, teachers, student.train(), source(1))
    ((a, (b,)),) = TDivSDiv().draw_pairs(3, source(1)).items()
    with torch.no_grad():
        target = teachers(INPUTS)[b]
        gain = divergence_of(divergence, teachers(moved)[a], target)
        assert bool((gain > divergence_of(divergence, teachers(INPUTS)[a], target)).all())


def test_students_run_with_their_running_statistics():
    """Joint batch norm too, which in training has no statistics of one member."""
    student = BatchEnsemble(seeded(make_cnn, 7), 3, batch_norm="joint").double()
    teachers = DeepEnsemble(doubles())
    expected = TDivSDiv()(INPUTS, MIDDLE, teachers, student.eval(), source())
    assert torch.equal(TDivSDiv()(INPUTS, MIDDLE, teachers, student.train(), source()), expected)
    with torch.no_grad():
        student.shared.state()["1.running_var"].mul_(3)
    assert not torch.equal(TDivSDiv()(INPUTS, MIDDLE, teachers, student, source()), expected)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "one network": (
        lambda: DeepEnsemble(population(make_cnn)),
        make_cnn,
        "got 1 students and 3 teachers",
    ),
    "fewer students": (
        lambda: MixedEnsemble(population(make_cnn)),
        lambda: DeepEnsemble(population(make_cnn, 2)),
        "got 2 students and 3 teachers",
    ),
    "one teacher": (
        lambda: DeepEnsemble(population(make_cnn, 1)),
        lambda: DeepEnsemble(population(make_cnn, 1)),
        "got 1 students and 1 teachers",
    ),
    "one network, several students": (
        make_cnn,
        lambda: seeded(Together, 0),
        "got 3 students and 1 teachers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_there_must_be_as_many_students_as_teachers(case):
    teachers, student, message = REFUSED[case]
    with pytest.raises(EnfoldError, match=message):
        TDivSDiv()(INPUTS.float(), MIDDLE, teachers().eval(), student(), source())


@pytest.mark.parametrize("size", [None, 2])
def test_a_distillation_refuses_before_it_trains(size, tmp_path):
    file = tmp_path / "student.safetensors"
    student = None if size is None else BatchEnsemble(make_cnn(), size)
    with pytest.raises(EnfoldError, match="TDivSDiv"):
        distill(
            DeepEnsemble(population(make_cnn)), MIDDLE, student=student, perturb=TDivSDiv(), epochs=0, checkpoint=file
        )
    assert not file.exists()


@pytest.mark.parametrize("setting", ["pairs", "divergence"])
def test_an_unknown_choice_is_refused(setting):
    with pytest.raises(EnfoldError, match=f"{setting} .* got 'some'"):
        TDivSDiv(**{setting: "some"})
