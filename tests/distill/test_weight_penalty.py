"""The tie to the teachers' weights: worked by hand, nothing at strength 0, no pull where the student is the teacher."""

import copy

import pytest
import torch
from torch import nn

from enfold.data import Data, Split
from enfold.data.batches import Batch
from enfold.distill.weight_penalty import WeightPenalty
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.rank_one import reconstruct
from enfold.errors import EnfoldError
from enfold.networks import MLP
from enfold.train import TrainConfig, fit
from enfold.train.backward import Separable
from enfold.train.objective import cross_entropy


def no_loss(model, batch):
    return torch.zeros(model.num_members)


def constant(value, bias=True):
    layer = nn.Linear(2, 3, bias=bias)
    nn.init.constant_(layer.weight, value)
    return layer


BATCH = Batch(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))


def small_data():
    torch.manual_seed(0)
    inputs, labels = torch.randn(48, 6), torch.randint(3, (48,))
    return Data(Split(inputs, labels), Split(inputs[:0], labels[:0]), Split(inputs, labels), 3, (6,))


def test_a_weight_penalty_by_hand():
    teacher, student = DeepEnsemble([constant(1.0), constant(2.0)]), DeepEnsemble([constant(1.5), constant(0.0)])
    torch.testing.assert_close(WeightPenalty(no_loss, teacher, 1.0)(student, BATCH), torch.tensor([6 * 0.25, 6 * 4.0]))
    torch.testing.assert_close(WeightPenalty(no_loss, teacher, 0.1, "mean")(student, BATCH), torch.tensor([0.025, 0.4]))
    both = DeepEnsemble([nn.Sequential(constant(1.0), nn.Linear(3, 2)), nn.Sequential(constant(2.0), nn.Linear(3, 2))])
    other = copy.deepcopy(both)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)  # biases are not penalised
    torch.testing.assert_close(WeightPenalty(no_loss, both, 1.0)(other, BATCH), torch.tensor([12.0, 12.0]))
    torch.testing.assert_close(WeightPenalty(no_loss, both, 1.0, "mean")(other, BATCH), torch.tensor([2.0, 2.0]))


def test_it_is_added_to_each_members_own_loss():
    teacher, student = DeepEnsemble([constant(1.0), constant(2.0)]), DeepEnsemble([constant(1.5), constant(0.0)])
    plain = cross_entropy()(student, BATCH)
    penalised = WeightPenalty(cross_entropy(), teacher, 0.01)(student, BATCH)
    torch.testing.assert_close(penalised - plain, torch.tensor([0.015, 0.24]))


@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
def test_strength_zero_trains_to_the_same_bits():
    teacher = DeepEnsemble(MLP(6, [8], 3), 2)
    network, data, plan = MLP(6, [8], 3), small_data(), TrainConfig(epochs=2, batch_size=16, select="last")
    trained = []
    for objective in (cross_entropy(), WeightPenalty(cross_entropy(), teacher, 0.0)):
        model = BatchEnsemble(network, 2)
        fit(model, data, config=plan, objective=objective, quiet=True)
        trained.append(model.state_dict())
    torch.testing.assert_close(dict(trained[1]), dict(trained[0]), rtol=0, atol=0)


def test_the_penalty_is_zero_at_a_representable_ensemble():
    torch.manual_seed(0)
    teacher = BatchEnsemble(nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(6, 3)), 3)
    student = copy.deepcopy(teacher)
    WeightPenalty(no_loss, teacher, 1.0)(student, BATCH).sum().backward()
    gradients = [parameter.grad for parameter in student.parameters() if parameter.grad is not None]
    assert len(gradients) == 6  # W, r and s of two layers
    assert all((gradient == 0).all() for gradient in gradients)
    rebuilt = reconstruct(teacher)
    WeightPenalty(no_loss, teacher, 1.0)(rebuilt, BATCH).sum().backward()
    assert all(float(p.grad.abs().max()) < 1e-4 for p in rebuilt.parameters() if p.grad is not None)


@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
def test_training_moves_a_student_towards_its_teacher():
    data, teacher = small_data(), DeepEnsemble(MLP(6, [8], 3), 2)
    plan = TrainConfig(epochs=5, batch_size=16, lr=0.01, select="last")
    left = {}
    for strength in (0.0, 1.0):
        penalised = WeightPenalty(cross_entropy(), teacher, strength)
        model = BatchEnsemble(MLP(6, [8], 3), 2, init="ones")
        fit(model, data, config=plan, objective=penalised, quiet=True)
        left[strength] = float(penalised.distances(model).detach().sum())
    assert left[1.0] < 0.9 * left[0.0]


def test_the_penalty_covers_the_model_when_members_are_looped():
    teacher = DeepEnsemble(MLP(6, [8], 3), 2)
    penalised = WeightPenalty(cross_entropy(), teacher, 0.1)
    assert not isinstance(penalised, Separable)
    model = DeepEnsemble(MLP(6, [8], 3), 2, seed=1, engine="loop")
    before = penalised.distances(model).detach()
    fit(
        model, small_data(), config=TrainConfig(epochs=1, batch_size=16, select="last"), objective=penalised, quiet=True
    )
    assert (penalised.distances(model).detach() != before).all()


def test_training_resumes_with_the_same_teacher_only(tmp_path):
    data, network = small_data(), MLP(6, [8], 3)
    one, other = (DeepEnsemble(network, 2, seed=seed) for seed in (0, 1))
    first, again, another = (WeightPenalty(cross_entropy(), each, 0.1) for each in (one, copy.deepcopy(one), other))
    assert repr(first) == repr(again)
    assert repr(first) != repr(another)
    plan = TrainConfig(epochs=1, batch_size=16, select="last")
    fit(
        BatchEnsemble(network, 2),
        data,
        config=plan,
        objective=WeightPenalty(cross_entropy(), one, 0.1),
        checkpoint=tmp_path / "c",
        quiet=True,
    )
    with pytest.raises(EnfoldError):
        fit(
            BatchEnsemble(network, 2),
            data,
            config=plan,
            objective=WeightPenalty(cross_entropy(), other, 0.1),
            checkpoint=tmp_path / "c",
            quiet=True,
        )


def test_the_teacher_may_change_afterwards():
    teacher, student = DeepEnsemble([constant(1.0)]), DeepEnsemble([constant(2.0)])
    penalised = WeightPenalty(no_loss, teacher, 1.0)
    with torch.no_grad():
        teacher.expand()["weight"].zero_()
    torch.testing.assert_close(penalised(student, BATCH), torch.tensor([6.0]))


def test_invalid_inputs_are_refused():
    teacher = DeepEnsemble([constant(1.0), constant(2.0)])
    with pytest.raises(EnfoldError, match=r"strength .* got -1"):
        WeightPenalty(no_loss, teacher, -1)
    with pytest.raises(EnfoldError, match=r"reduction .* got 'max'"):
        WeightPenalty(no_loss, teacher, 1.0, "max")
    with pytest.raises(EnfoldError, match="got Linear"):
        WeightPenalty(no_loss, nn.Linear(2, 3), 1.0)
    with pytest.raises(EnfoldError, match="got a Linear as the student"):
        WeightPenalty(no_loss, teacher, 1.0)(nn.Linear(2, 3), BATCH)
    with pytest.raises(EnfoldError, match=r"'weight' is \(3, 3, 2\) instead of \(2, 3, 2\)"):
        WeightPenalty(no_loss, teacher, 1.0)(DeepEnsemble([constant(1.0)] * 3), BATCH)
    with pytest.raises(EnfoldError, match="'weight' is None"):
        WeightPenalty(no_loss, teacher, 1.0)(DeepEnsemble([MLP(2, [], 3)] * 2), BATCH)
