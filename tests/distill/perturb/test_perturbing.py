"""Common parts of perturbations: unit steps in pixel space, and single members without weight gradients."""

from __future__ import annotations

import copy
from collections import Counter
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from classroom import Together, make_cnn, make_mlp, make_pictures, make_table, population, seeded
from enfold.data import Data, Split
from enfold.distill.perturb.conf_ods import ConfODS
from enfold.distill.perturb.gaussian import Gaussian
from enfold.distill.perturb.ods import ODS
from enfold.distill.perturb.tdiv_sdiv import TDivSDiv
from enfold.distill.perturbation import MemberLogits, freeze_parameters, input_gradient, normalise_rms
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError

STEEP = [ODS(step=2.0), TDivSDiv(step=2.0), TDivSDiv(step=2.0, pairs="all", divergence="js")]


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def per_example(values: Tensor) -> Tensor:
    return values.flatten(1).square().mean(1).sqrt()


@given(seed=st.integers(0, 10**6), power=st.integers(-37, 30))
def test_a_unit_step_has_a_root_mean_square_of_1_however_small_the_gradient(seed, power):
    g = torch.randn(4, 2, 3, generator=source(seed)) * 10.0**power
    found = normalise_rms(g)
    torch.testing.assert_close(per_example(found), torch.ones(4), rtol=1e-4, atol=0)
    scale = g.flatten(1).abs().amax(1).view(-1, 1, 1)
    torch.testing.assert_close(found / found.flatten(1).abs().amax(1).view(-1, 1, 1), g / scale)


def test_a_unit_step_by_hand():
    found = normalise_rms(torch.tensor([[3.0, 4.0], [0.0, -2.0]]))
    torch.testing.assert_close(found, 2**0.5 * torch.tensor([[0.6, 0.8], [0.0, -1.0]]))


def test_zero_direction_changes_nothing():
    found = normalise_rms(torch.tensor([[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], [1.0, 1.0]]))
    assert torch.equal(found, torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]))


@pytest.mark.parametrize("perturb", STEEP, ids=repr)
@pytest.mark.parametrize("normalised", [True, False])
def test_a_perturbation_has_the_size_of_the_step_in_pixels(perturb, normalised):
    """Away from the ends of the range nothing is clipped."""
    data = make_pictures(normalised, low=60, high=200)
    inputs = data.prepare(data.train.inputs)
    moved = perturb(
        inputs, data, DeepEnsemble(population(make_cnn)).eval(), DeepEnsemble(population(make_cnn, seed=7)), source()
    )
    size = per_example(data.denormalise(moved) - data.denormalise(inputs))
    torch.testing.assert_close(size, torch.full_like(size, 2 / 255), rtol=1e-3, atol=0)


def test_noise_has_the_size_of_the_step_on_average():
    data = make_pictures(count=600, low=60, high=200)
    inputs = data.prepare(data.train.inputs)
    moved = Gaussian(step=3.0)(inputs, data, make_mlp(), make_mlp(), source())
    noise = (data.denormalise(moved) - data.denormalise(inputs)) * 255 / 3
    assert float(noise.square().mean().sqrt()) == pytest.approx(1, abs=0.02)
    assert float(noise.mean()) == pytest.approx(0, abs=0.02)
    assert float((noise.abs() < 1).float().mean()) == pytest.approx(0.6827, abs=0.02)


@pytest.mark.parametrize("perturb", [Gaussian(200.0), ODS(200.0), ConfODS(200.0), TDivSDiv(200.0)], ids=repr)
@pytest.mark.parametrize("normalised", [True, False])
def test_pixels_remain_in_their_range(perturb, normalised):
    data = make_pictures(normalised)
    inputs = data.prepare(data.train.inputs)
    moved = perturb(
        inputs, data, DeepEnsemble(population(make_cnn)).eval(), DeepEnsemble(population(make_cnn, seed=7)), source()
    )
    pixels = data.denormalise(moved)
    torch.testing.assert_close(torch.stack(pixels.aminmax()), torch.tensor([0.0, 1.0]), rtol=0, atol=1e-6)
    assert float(((pixels < 1e-6) | (pixels > 1 - 1e-6)).float().mean()) > 0.1


def test_data_other_than_pixels_are_not_clipped():
    data = make_table()
    teachers = DeepEnsemble(population(lambda: make_mlp(5))).eval()
    moved = ODS(step=500.0)(data.train.inputs, data, teachers, teachers, source())
    size = per_example(moved - data.train.inputs)
    torch.testing.assert_close(size, torch.full_like(size, 500 / 255))
    assert float(moved.abs().max()) > 1


def test_detection_of_pixels():
    bytes_only, normalised, table = make_pictures(False), make_pictures(True), make_table()
    floats = bytes_only.replace(train=Split(bytes_only.train.inputs / 255, bytes_only.train.labels))
    loader = normalised.replace(train=[(torch.zeros(1, 2, 4, 4), torch.zeros(1))])
    assert [data.has_pixels for data in (bytes_only, normalised, table, floats, loader)] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_values_outside_of_the_range_are_not_clipped():
    """As pixels do that were normalised by the mean of other data."""
    data = make_pictures()
    inputs = 40 * torch.randn(6, 2, 4, 4, generator=source())
    moved = ODS()(inputs, data, DeepEnsemble(population(make_mlp)).eval(), make_mlp(), source())
    assert float((data.denormalise(moved) - data.denormalise(inputs)).abs().max()) < 10 / 255
    assert not torch.equal(moved, inputs)


@given(seed=st.integers(0, 10**6))
def test_normalising_is_undone(seed):
    data = make_pictures()
    inputs = torch.randn(3, 2, 4, 4, dtype=torch.float64, generator=source(seed))
    torch.testing.assert_close(data.normalise(data.denormalise(inputs)), inputs)
    assert make_table().denormalise(inputs) is inputs


def test_a_step_is_taken_in_pixel_space():
    """A literal ODS, example by example and channel by channel, in float64."""
    data = make_pictures(low=60, high=200)
    inputs = data.prepare(data.train.inputs).double()
    networks = [network.double().eval() for network in population(make_cnn)]
    moved = ODS(step=3.0, temperature=2.0)(inputs, data, DeepEnsemble(networks), make_mlp(), source(5))
    again = source(5)
    network = networks[int(torch.randint(3, (), generator=again))]
    w = 2 * torch.rand(len(inputs), 3, generator=again) - 1
    for index, own in enumerate(w.double()):
        pixel = torch.stack([inputs[index, c] * data.std[c] + data.mean[c] for c in range(2)]).requires_grad_()
        seen = torch.stack([(pixel[c] - data.mean[c]) / data.std[c] for c in range(2)])
        probs = torch.exp(network(seen[None])[0] / 2)
        sum((own[k] * probs[k] / probs.sum() for k in range(3)), torch.zeros(())).backward()
        size = sum(value**2 for value in pixel.grad.flatten().tolist()) ** 0.5
        for c in range(2):
            stepped = pixel[c] + 3 / 255 * pixel.grad[c] / size * 32**0.5
            torch.testing.assert_close(moved[index, c], (stepped - data.mean[c]) / data.std[c])


def verified(data, *models):
    """Members are compared with their networks before they are first run; that is not counted."""
    for model in models:
        if isinstance(model, Ensemble) and model.is_expandable:
            model.verify(data.prepare(data.train.inputs))


class Counted(nn.Module):
    """Counts how often it runs, by its name; copies of it count together."""

    runs: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        kind = ("train" if self.training else "eval") + (" graph" if torch.is_grad_enabled() else "")
        Counted.runs[kind] += 1
        return self.layer(inputs.flatten(1))


@pytest.mark.parametrize("kind", ["stacked", "mixed", "one network"])
@pytest.mark.parametrize(
    ("perturb", "teachers_runs"),
    [(Gaussian(), {}), (ODS(), {"eval graph": 1}), (ConfODS(), {"eval graph": 1})],
    ids=repr,
)
def test_only_the_member_that_was_drawn_is_run(kind, perturb, teachers_runs, pictures):
    networks = population(Counted)
    teachers = {"stacked": DeepEnsemble, "mixed": MixedEnsemble, "one network": lambda networks: networks[0]}[kind](
        networks
    ).eval()
    verified(pictures, teachers)
    Counted.runs.clear()
    perturb(pictures.prepare(pictures.train.inputs), pictures, teachers, make_mlp(), source())
    assert teachers_runs == Counted.runs


@pytest.mark.parametrize(
    ("perturb", "runs"),
    [(TDivSDiv(), {"eval graph": 2, "eval": 2}), (TDivSDiv(pairs="all"), {"eval graph": 6})],
    ids=repr,
)
def test_only_the_pair_that_was_drawn_is_run(perturb, runs, pictures):
    """Of the teachers and of the students: one with a graph, one without."""
    teachers, student = MixedEnsemble(population(Counted)).eval(), BatchEnsemble(Counted(), 3).train()
    verified(pictures, teachers, student)
    Counted.runs.clear()
    perturb(pictures.prepare(pictures.train.inputs), pictures, teachers, student, source())
    assert runs == Counted.runs


class Products(TorchDispatchMode):
    """Record the gradients that convolutions compute, and count matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[list[bool]] = []
        self.products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution_backward.default:
            self.masks.append(args[-1])
        self.products += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("model", ["stacked", "share", "mixed", "network"])
def test_no_gradient_of_a_weight_is_computed(model, pictures):
    """One convolution and one linear layer: two backward operations, both with respect to inputs only."""
    cnn = population(make_cnn)
    teachers = {
        "stacked": lambda: DeepEnsemble(cnn),
        "share": lambda: BatchEnsemble(cnn[0], 3),
        "mixed": lambda: MixedEnsemble(cnn),
        "network": lambda: cnn[0],
    }[model]().eval()
    inputs = pictures.prepare(pictures.train.inputs)
    verified(pictures, teachers)
    with Products() as seen:
        ODS()(inputs, pictures, teachers, make_mlp(), source())
    assert seen.masks == [[True, False, False]]
    assert seen.products == 2  # the layer, and the gradient of what goes into it


@pytest.mark.parametrize("kind", ["stacked", "mixed", "network", "together"])
def test_parameters_need_no_gradient_during_perturbation(kind, pictures):
    """No activation is stored for weight gradients."""
    wanted = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            wanted.append(self.layer.weight.requires_grad)
            return self.layer(inputs.flatten(1))

    class All(Ensemble):
        def __init__(self) -> None:
            super().__init__([], 2)
            self.inner = Watched()

        def expand(self) -> State:
            raise EnfoldError("members do not exist as networks")

        def member(self, index: int) -> nn.Module:
            raise EnfoldError("members do not exist as networks")

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.stack([self.inner(inputs)] * 2)

    kinds = {"stacked": lambda: DeepEnsemble(population(Watched)), "mixed": lambda: MixedEnsemble(population(Watched))}
    model = {**kinds, "network": Watched, "together": All}[kind]()
    verified(pictures, model)
    wanted.clear()
    ODS()(pictures.prepare(pictures.train.inputs), pictures, model, make_mlp(), source())
    assert wanted == [False]
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("how", ["in place", "past the version", "by loading"])
@pytest.mark.parametrize("perturb", STEEP, ids=repr)
def test_students_run_with_their_current_parameters(perturb, how, pictures):
    inputs = pictures.prepare(pictures.train.inputs)
    teachers, student = DeepEnsemble(population(make_cnn)).eval(), BatchEnsemble(seeded(make_cnn, 7), 3).train()
    student.eval()
    with torch.no_grad():
        student(inputs)  # in eval mode it keeps what its members are made from
    student.train()
    first = perturb(inputs, pictures, teachers, student, source())
    if how == "by loading":
        student.load_state_dict({name: 1 + 2 * tensor for name, tensor in student.state_dict().items()})
    for parameter in student.parameters():
        if how == "in place":
            with torch.no_grad():
                parameter.mul_(2).add_(1)
        elif how == "past the version":
            parameter.data = 2 * parameter.data + 1
    second = perturb(inputs, pictures, teachers, student, source())
    fresh = copy.deepcopy(student)
    assert torch.equal(second, perturb(inputs, pictures, teachers, fresh, source()))
    assert torch.equal(first, second) == isinstance(perturb, ODS)  # which asks no student


def test_perturbations_use_members_in_eval_mode(teachers, pictures):
    inputs = pictures.prepare(pictures.train.inputs)
    with torch.no_grad():
        expected = teachers(inputs)
    asked = MemberLogits(teachers.train(), inputs.requires_grad_())
    for index in (2, 0, 1):
        fixed = asked.constant_logits(index)
        found = asked.logits(index)
        torch.testing.assert_close(found.detach(), expected[index])
        torch.testing.assert_close(fixed, expected[index])
        assert found.requires_grad
        assert not fixed.requires_grad
        assert torch.equal(asked.constant_logits(index), found)


def test_a_predictor_of_all_members_runs_once(pictures):
    model = seeded(Together, 0).eval()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    asked = MemberLogits(model, pictures.prepare(pictures.train.inputs))
    assert asked.num_members == 3
    asked.constant_logits(2), asked.logits(0), asked.logits(1)
    assert len(calls) == 1


def test_requires_grad_is_restored_after_a_failure():
    network = make_mlp()
    network[1].bias.requires_grad_(False)

    def fail() -> None:
        with freeze_parameters(network):
            assert not any(parameter.requires_grad for parameter in network.parameters())
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert [name for name, one in network.named_parameters() if one.requires_grad] == ["1.weight", "3.weight", "3.bias"]


def test_outputs_independent_of_the_inputs_give_no_perturbation(pictures: Data):
    class Deaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.answer = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.answer.expand(len(inputs), 3)

    inputs = pictures.prepare(pictures.train.inputs)
    for perturb in (ODS(), ConfODS(), TDivSDiv()):
        teachers = DeepEnsemble(population(Deaf)).eval()
        assert torch.equal(perturb(inputs, pictures, teachers, DeepEnsemble(population(Deaf)), source()), inputs)
    x = torch.ones(2, requires_grad=True)
    torch.testing.assert_close(input_gradient(x, [2 * x.sum(), torch.ones(())], [None, None]), 2 * torch.ones(2))


def test_a_diverged_student_is_reported_as_such(pictures):
    """Its loss will tell; inputs that are no numbers would make it seem that teachers are at fault."""
    student = BatchEnsemble(make_cnn(), 3).train()
    with torch.no_grad():
        next(student.parameters()).fill_(float("nan"))
    inputs = pictures.prepare(pictures.train.inputs)
    moved = TDivSDiv()(inputs, pictures, DeepEnsemble(population(make_cnn)).eval(), student, source())
    assert torch.equal(moved, inputs)
