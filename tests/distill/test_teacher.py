"""Teachers: logits are computed once, stored under a key, memory-mapped and checked."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from enfold.data import Data, Split
from enfold.data.batches import Order
from enfold.distill import distill, make_objective
from enfold.distill.cached import CachedTeacher
from enfold.distill.losses.common.divergence import as_target
from enfold.distill.losses.kd import KD
from enfold.distill.teacher import Teacher
from enfold.ensembles.bagging import Bagging
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.hyper_deep_ensemble import HyperDeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.ensembles.tree_net import TreeNet
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import nll
from enfold.train import TrainConfig
from enfold.train.backward import backward
from enfold.train.selection import Selection
from students import best, fresh

PLAN = TrainConfig(epochs=2, batch_size=16, lr=0.02, select="last")


def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many inputs each question had."""
    sizes: list[int] = []
    answer = Teacher.logits

    def counting(self, inputs):
        sizes.append(len(inputs))
        return answer(self, inputs)

    monkeypatch.setattr(Teacher, "logits", counting)
    return sizes


def test_logits_are_stored_and_loaded(members, data, tmp_path, monkeypatch):
    sizes = asked(monkeypatch)
    first = Teacher(members.eval(), data, is_constant=True, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    computed = sum(sizes)
    again = Teacher(members, data, is_constant=True, folder=tmp_path)
    assert computed >= len(data.train)
    assert sum(sizes) - computed == 2  # the two that tell the number of classes
    torch.testing.assert_close(again.targets, members(data.train.inputs).detach())
    assert torch.equal(first.targets, again.targets)
    assert torch.equal(load_file(file)["logits"], again.targets)  # a safetensors file as any other


def test_other_values_have_other_keys(members, data, tmp_path):
    members.eval()
    for change in (
        lambda: Teacher(members, data, is_constant=True, folder=tmp_path),
        lambda: Teacher(members[:3], data, is_constant=True, folder=tmp_path),
        lambda: Teacher(
            members,
            data.replace(train=Split(data.train.inputs + 1, data.train.labels)),
            is_constant=True,
            folder=tmp_path,
        ),
        lambda: Teacher(members, data.replace(mean=(0.5,) * 4, std=(2.0,) * 4), is_constant=True, folder=tmp_path),
    ):
        before = len(list(tmp_path.iterdir()))
        teacher = change()
        assert len(list(tmp_path.iterdir())) == before + 1
        inputs = teacher.data.prepare(teacher.data.train.inputs)
        torch.testing.assert_close(teacher.targets, teacher.models(inputs).detach())


def test_a_mapped_file_is_not_read_into_memory_nor_written(tmp_path):
    file = CachedTeacher(torch.randn(2, 5000, 3), "key").save(tmp_path / "answers.safetensors")
    found = CachedTeacher.load(file)
    assert found.logits.untyped_storage().nbytes() == 2 * 5000 * 3 * 4
    assert found.key == "key"
    before = file.read_bytes()
    found.logits.zero_()  # a private copy of the page
    assert file.read_bytes() == before
    if sys.platform == "linux":
        assert str(file) in Path("/proc/self/maps").read_text()


def test_large_logits_remain_on_disk(members, data, tmp_path, monkeypatch):
    members.eval()
    batch = next(Order(8, range(2)).batches(data, 0))
    target = KD(temperature=2.0).target
    held = Teacher(members, data, target, is_constant=True, folder=tmp_path)
    monkeypatch.setattr("enfold.distill.teacher.LARGE", 0)
    mapped = Teacher(members, data, target, is_constant=True, folder=tmp_path)
    assert mapped.targets is None
    torch.testing.assert_close(mapped(batch), held(batch))


def test_other_tensors_in_the_file(tmp_path):
    logits = torch.randn(2, 6, 3)
    file = tmp_path / "more.safetensors"
    save_file({"aaa": torch.zeros(9), "logits": logits, "zeta": torch.zeros(5)}, file)
    assert torch.equal(CachedTeacher.load(file).logits, logits)
    file.write_bytes(file.read_bytes()[:-80])
    with pytest.raises(EnfoldError, match="its header does not fit its size"):
        CachedTeacher.load(file)


def test_logits_in_another_order_are_refused(members, data, tmp_path):
    Teacher(members.eval(), data, is_constant=True, folder=tmp_path)
    recorded = CachedTeacher.load(next(tmp_path.iterdir()))
    assert Teacher(recorded, data, is_constant=True).targets is not None
    other = data.replace(train=data.train[torch.arange(39, -1, -1)])
    with pytest.raises(EnfoldError, match="logits of 40 examples and 40 examples with other training inputs"):
        Teacher(recorded, other, is_constant=True)
    with pytest.raises(EnfoldError, match="normalisation"):
        Teacher(recorded, data.replace(mean=(0.5,) * 4, std=(2.0,) * 4), is_constant=True)
    assert Teacher(recorded, data.replace(source="elsewhere"), is_constant=True).targets is not None


def test_the_same_values_in_another_architecture_have_another_key(data):
    first, second = (nn.Sequential(nn.Linear(4, 5), between, nn.Linear(5, 3)) for between in (nn.ReLU(), nn.Tanh()))
    second.load_state_dict(first.state_dict())
    assert Teacher(MixedEnsemble([first]), data).key != Teacher(MixedEnsemble([second]), data).key


def test_classes_are_counted_in_loaders_and_students_too(members, data):
    loader = data.replace(train=[(data.train.inputs, data.train.labels)])
    with pytest.raises(EnfoldError, match=r"teacher must predict the 3 classes .* got 5"):
        distill(MixedEnsemble([nn.Linear(4, 5)]), loader, student=lambda: nn.Linear(4, 3), config=PLAN)
    with pytest.raises(EnfoldError, match=r"student must predict the 3 classes .* got 5"):
        distill(members, data, student=lambda: nn.Linear(4, 5), config=PLAN)


def test_half_precision_logits_are_stored_as_float32(data, tmp_path):
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, inputs):
            return self.inner(inputs).bfloat16()

    assert Teacher(Half(), data, is_constant=True, folder=tmp_path).targets.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (lambda network: Bagging(network, 2), {"loss": KD(fit="ensemble")}, "fit='ensemble' .* order='own'"),
        (lambda network: BatchEnsemble(network, 2), {"loss": KD(fit="ensemble"), "order": "split"}, "order='split'"),
        (lambda network: TreeNet(network, 2, choice="best"), {}, "student .* TreeNet"),
        (lambda network: HyperDeepEnsemble(network, 2, candidates=3), {}, "student .* HyperDeepEnsemble"),
    ],
)
def test_ensembles_that_cannot_be_students(members, data, make, settings, message):
    with pytest.raises(EnfoldError, match=message):
        distill(members, data, student=make(best(members, data)), config=PLAN, **settings)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_logits_of_all_floating_types(tmp_path, dtype):
    logits = torch.randn(3, 7, 2).to(dtype)
    assert torch.equal(CachedTeacher.load(CachedTeacher(logits).save(tmp_path / "a.safetensors")).logits, logits)


def test_invalid_files_of_logits(tmp_path):
    for name, content in (("none", None), ("text", b"hello"), ("empty", b"")):
        file = tmp_path / f"{name}.safetensors"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(EnfoldError, match="must be a safetensors file with floating-point 'logits'"):
            CachedTeacher.load(file)
    with pytest.raises(EnfoldError, match=r"logits .* got \(2, 3\)"):
        CachedTeacher(torch.zeros(2, 3))


def test_cached_teachers_teach_like_their_members(members, data):
    members.eval()
    recorded = CachedTeacher(members(data.train.inputs).detach())
    one, other = (
        distill(teacher, data, student=lambda: members.member(0), config=PLAN) for teacher in (recorded, members)
    )
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": Split(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))}, "logits of 40 examples and 3 examples"),
        ({"train": [(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))]}, "logits of 40 examples and a loader"),
    ],
)
def test_cached_logits_for_other_data(members, data, change, message):
    recorded = CachedTeacher(members.eval()(data.train.inputs).detach())
    with pytest.raises(EnfoldError, match=message):
        Teacher(recorded, data.replace(**change), is_constant=True)


def test_cached_teachers_cannot_predict_other_inputs(members, data):
    recorded = CachedTeacher(members.eval()(data.train.inputs).detach())
    with pytest.raises(EnfoldError, match="augmented or perturbed"):
        Teacher(recorded, data, is_constant=False)
    with pytest.raises(EnfoldError, match="student=None"):
        distill(recorded, data, config=PLAN)
    with pytest.raises(EnfoldError, match="CachedTeacher"):
        Teacher(recorded, data, is_constant=True).logits(data.test.inputs)


def test_teachers_of_other_classes(members, data):
    with pytest.raises(EnfoldError, match=r"teacher must predict the 4 classes .* got 3"):
        distill(members, data.replace(num_classes=4), config=PLAN)
    with pytest.raises(EnfoldError, match=r"teacher must predict the 3 classes .* got 2"):
        Teacher(CachedTeacher(torch.zeros(1, 40, 2)), data, is_constant=True)


def test_cached_logits_must_be_finite(data):
    with pytest.raises(EnfoldError, match="finite"):
        Teacher(CachedTeacher(torch.full((1, 40, 3), math.nan)), data, is_constant=True)


def test_a_run_stores_teacher_logits(members, data, tmp_path):
    plain = distill(members, data, config=PLAN)
    kept = distill(members, data, config=PLAN, cache=tmp_path / "answers")
    again = distill(members, data, config=PLAN, cache=tmp_path / "answers")
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, kept.state_dict()[name])
        assert torch.equal(tensor, again.state_dict()[name])
    assert len(list((tmp_path / "answers").iterdir())) == 1


@pytest.mark.parametrize("own", [True, False])
def test_targets_with_a_teacher_axis(members, data, own):
    """(T, B, C), or (T, S, B, C): cached logits equal computed ones."""
    members.eval()
    looked_up, computed = (Teacher(members, data, is_constant=remembers) for remembers in (True, False))
    batch = next(Order(8, range(2) if own else None).batches(data, 0))
    assert looked_up(batch).shape == ((4, 2, 8, 3) if own else (4, 8, 3))
    torch.testing.assert_close(looked_up(batch), computed(batch))


def test_an_ensemble_student_has_one_data_order(members, data, monkeypatch):
    call = Teacher.__call__
    loss = KD(temperature=2.0, alpha=0.7)
    objective = make_objective(loss, members.eval(), data, PLAN)
    batch = next(Order(8).batches(data, 0))
    students = [BatchEnsemble(members.member(0), 3, engine="loop").eval() for _ in range(2)]
    at_once = objective(students[1], batch)
    at_once.sum().backward()
    torch.testing.assert_close(backward(students[0], batch, objective), at_once.detach())
    for one, other in zip(students[0].parameters(), students[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    seen: list[bool] = []
    monkeypatch.setattr(Teacher, "__call__", lambda self, batch: seen.append(batch.own) or call(self, batch))
    trained = distill(members, data, student=students[0], loss=loss, config=PLAN)
    assert not any(seen)
    assert predict(trained, data.test).num_members == 3


def test_the_mean_of_students_is_trained_jointly(members, data):
    """With fit="ensemble" the loss is that of their mean, and equal students have the loss of one."""
    loss = KD(fit="ensemble")
    target = torch.randn(5, 3).log_softmax(-1)
    logits = torch.randn(2, 5, 3)
    mean = logits.softmax(-1).mean(0).log()
    expected = (target.exp() * (target - mean)).sum(-1).mean()
    told = as_target(target)
    torch.testing.assert_close(loss.loss(logits, told, 0.0), expected.expand(2))
    equal = logits[:1].expand(2, 5, 3)
    torch.testing.assert_close(loss.loss(equal, told, 0.0), KD().loss(equal, told, 0.0))
    assert not loss.is_separable
    student = distill(members, data, student=BatchEnsemble(best(members, data), 2), loss=loss, config=PLAN)
    assert predict(student, data.test).num_members == 2


def test_the_fitted_loss_selects_the_epoch(members, data, monkeypatch):
    """With fit="ensemble" the validation NLL of the students' mean, not the mean of theirs."""
    seen: list[tuple[list[float], float]] = []
    update = Selection.update

    def remembering(self: Selection, epoch: int, values: list[float]) -> None:
        seen.append((values, nll(predict(self.model, data.val))))
        update(self, epoch, values)

    monkeypatch.setattr(Selection, "update", remembering)
    start = BatchEnsemble(fresh(members), 3, init="signs")
    student = distill(members, data, student=start, loss=KD(fit="ensemble"), config=PLAN, select="best")
    assert len(seen) == PLAN.epochs + 1
    for values, whole in seen:
        assert values == pytest.approx([whole], abs=1e-6)
    assert nll(predict(student, data.val)) == pytest.approx(min(whole for _, whole in seen), abs=1e-6)


def test_the_key_is_the_same_in_another_process(members, data):
    one, other = Teacher(members.eval(), data), Teacher(DeepEnsemble(members.networks()).eval(), Data(**vars(data)))
    assert repr(one) == repr(other)
    assert repr(one) != repr(Teacher(members[:2].eval(), data))
