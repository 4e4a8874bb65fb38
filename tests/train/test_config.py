"""TrainConfig: learning-rate schedules in closed form, documented fields, and refusal of invalid values by name."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enfold.arguments import arguments_of
from enfold.errors import EnfoldError
from enfold.train import TrainConfig

prop = settings(deadline=None, derandomize=True, max_examples=25)


def factors(plan: TrainConfig, steps: int) -> list[float]:
    return [plan.rate_factor(step, steps) for step in range(plan.epochs * steps)]


def test_constant():
    assert factors(TrainConfig(epochs=3, schedule="constant"), 4) == [1.0] * 12


def test_cosine_in_closed_form():
    found = factors(TrainConfig(epochs=2, schedule="cosine", final_factor=0.1), 5)
    assert found == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)])
    assert found[0] == 1.0


def test_steps_at_fractions_of_the_epochs():
    plan = TrainConfig(epochs=10, schedule="step", milestones=(0.3, 0.6, 0.8), step_factor=0.2)
    found = factors(plan, 2)
    assert found == pytest.approx([1.0] * 6 + [0.2] * 6 + [0.04] * 4 + [0.008] * 4)


def test_warm_up_is_linear_before_the_schedule():
    plan = TrainConfig(epochs=4, schedule="cosine", warmup_epochs=1.0)
    found = factors(plan, 4)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4:] == pytest.approx([(1 + math.cos(math.pi * step / 12)) / 2 for step in range(12)])


def test_fractional_warm_up_does_not_overshoot():
    plan = TrainConfig(epochs=2, schedule="constant", warmup_epochs=0.5)
    assert factors(plan, 5) == pytest.approx([0.4, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])


@prop
@given(
    epochs=st.integers(1, 6),
    steps=st.integers(1, 9),
    warmup=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "step", "cosine"]),
    final=st.floats(0, 1),
)
def test_a_factor_is_never_above_one_and_never_negative(epochs, steps, warmup, schedule, final):
    plan = TrainConfig(epochs=epochs, schedule=schedule, warmup_epochs=warmup * epochs, final_factor=final)
    found = [plan.rate_factor(step, steps) for step in range(epochs * steps + 3)]  # a loader may yield too much
    assert all(0 <= factor <= 1 for factor in found)
    falling = [factor for step, factor in enumerate(found) if step >= plan.warmup_epochs * steps]
    assert falling == sorted(falling, reverse=True)


def test_one_value_per_member():
    plan = TrainConfig(lr=[0.1, 0.2], weight_decay=0.5)
    assert plan.lr == (0.1, 0.2)
    assert plan.per_member("lr", 2) == [0.1, 0.2]
    assert plan.per_member("weight_decay", 2) == [0.5, 0.5]
    assert plan.varies
    assert not TrainConfig(label_smoothing=(0.1, 0.2)).varies  # the loss is told apart by member, not the optimizer
    with pytest.raises(EnfoldError, match=r"^lr must be .* 3 members"):
        plan.per_member("lr", 3)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"epochs": -1}, "epochs"),
        ({"epochs": 2.5}, "epochs"),
        ({"epochs": True}, "epochs"),
        ({"batch_size": 0}, "batch_size"),
        ({"lr": 0.0}, "lr"),
        ({"lr": "high"}, "lr"),
        ({"lr": (0.1, math.nan)}, "lr"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"label_smoothing": (0.1, 1.0)}, "label_smoothing"),
        ({"momentum": 1.0}, "momentum"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"epochs": 2, "warmup_epochs": 3.0}, "warmup_epochs"),
        ({"patience": 0}, "patience"),
        ({"patience": 2, "select": "last"}, "patience"),
        ({"optimizer": "lbfgs"}, "optimizer"),
        ({"schedule": "linear"}, "schedule"),
        ({"order": "mine"}, "order"),
        ({"select": "first"}, "select"),
        ({"precision": "float8"}, "precision"),
        ({"decay": "none"}, "decay"),
        ({"cycles": 0}, "cycles"),
        ({"tail_start": 1.5}, "tail_start"),
        ({"tail_factor": -1.0}, "tail_factor"),
        ({"tail_low": 0.9}, "tail_low"),
        ({"tail_cycle": 0.0}, "tail_cycle"),
        ({"epochs": 10**20}, "epochs"),
        ({"batch_size": 10**20}, "batch_size"),
        ({"cycles": 10**9}, "cycles"),
        ({"lr": math.inf}, "lr"),
        ({"lr": 1e300}, "lr"),
        ({"weight_decay": math.inf}, "weight_decay"),
        ({"clip_norm": math.inf}, "clip_norm"),
        ({"warmup_epochs": math.nan}, "warmup_epochs"),
        ({"tail_cycle": math.inf}, "tail_cycle"),
        ({"step_factor": math.nan}, "step_factor"),
        ({"final_factor": -0.5}, "final_factor"),
        ({"milestones": (30.0, 60.0)}, "milestones"),
        ({"first_member": -1}, "first_member"),
        ({"seed": True}, "seed"),
    ],
)
def test_invalid_values_are_refused_by_name(changes, field):
    with pytest.raises(EnfoldError, match=f"^{field} must be .*: change {field}$"):
        TrainConfig(**changes)


def test_every_field_is_documented():
    arguments = arguments_of(TrainConfig)
    assert list(arguments) == list(TrainConfig.__dataclass_fields__)
    assert all(argument.help for argument in arguments.values())


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_short_names_of_precisions(short, name):
    assert TrainConfig(precision=short) == TrainConfig(precision=name)


def test_replace_gives_a_copy():
    plan = TrainConfig()
    assert plan.replace(epochs=3).epochs == 3
    assert plan == TrainConfig()


def test_cycles_repeat_the_cosine():
    plan = TrainConfig(epochs=6, cycles=3)
    once = TrainConfig(epochs=2)
    steps = 5
    for step in range(6 * steps):
        assert plan.rate_factor(step, steps) == pytest.approx(once.rate_factor(step % (2 * steps), steps))


def test_a_constant_tail_follows_the_cosine():
    plan = TrainConfig(epochs=8, tail="constant", tail_start=0.75, tail_factor=0.2)
    assert plan.rate_factor(0, 10) == 1
    assert plan.rate_factor(59, 10) == pytest.approx(0.2, abs=0.01)
    assert [plan.rate_factor(step, 10) for step in (60, 70, 79)] == [0.2, 0.2, 0.2]


def test_a_triangle_falls_to_its_low_in_the_middle_of_a_cycle():
    plan = TrainConfig(epochs=8, tail="triangular", tail_start=0.5, tail_factor=0.5, tail_low=0.1, tail_cycle=2)
    found = [plan.rate_factor(40 + step, 10) for step in (0, 5, 10, 15, 20, 30)]
    assert found == pytest.approx([0.5, 0.3, 0.1, 0.3, 0.5, 0.1])
    step = TrainConfig(
        epochs=8, schedule="step", milestones=(0.25, 0.5), tail="triangular", tail_start=0.5, tail_factor=0.15
    )
    assert step.rate_factor(9, 10) == 1
    assert step.rate_factor(10, 10) == step.step_factor, "milestones are fractions of the part before the tail"
    assert step.rate_factor(20, 10) == 0.15, "the schedule ends where the tail begins, not below it"
