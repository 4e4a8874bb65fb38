"""Teachers: their answers are computed once, kept under a key, mapped from disk, and checked before anything else."""

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
from enfold.distill.cached import CachedTeacher
from enfold.distill.divergence import as_target
from enfold.distill.losses.kd import KD
from enfold.distill.teacher import Teacher
from enfold.ensemble import MixedEnsemble
from enfold.ensembles.bagging import Bagging
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.tree_net import TreeNet
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import nll
from enfold.train import TrainConfig
from enfold.train.selection import Selection

PLAN = TrainConfig(epochs=2, batch_size=16, lr=0.02, select="last")


def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many inputs each question had."""
    sizes: list[int] = []
    answer = Teacher.answer

    def counting(self, inputs):
        sizes.append(len(inputs))
        return answer(self, inputs)

    monkeypatch.setattr(Teacher, "answer", counting)
    return sizes


def test_answers_are_kept_and_found_again(members, data, tmp_path, monkeypatch):
    sizes = asked(monkeypatch)
    first = Teacher(members.eval(), data, remembers=True, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    computed = sum(sizes)
    again = Teacher(members, data, remembers=True, folder=tmp_path)
    assert computed >= len(data.train)
    assert sum(sizes) - computed == 2  # the two that tell the number of classes
    torch.testing.assert_close(again.targets, members(data.train.inputs).detach())
    assert torch.equal(first.targets, again.targets)
    assert torch.equal(load_file(file)["logits"], again.targets)  # a safetensors file as any other


def test_other_values_have_other_keys(members, data, tmp_path):
    members.eval()
    for change in (
        lambda: Teacher(members, data, remembers=True, folder=tmp_path),
        lambda: Teacher(members[:3], data, remembers=True, folder=tmp_path),
        lambda: Teacher(
            members,
            data.replace(train=Split(data.train.inputs + 1, data.train.labels)),
            remembers=True,
            folder=tmp_path,
        ),
        lambda: Teacher(members, data.replace(mean=(0.5,) * 4, std=(2.0,) * 4), remembers=True, folder=tmp_path),
    ):
        before = len(list(tmp_path.iterdir()))
        teacher = change()
        assert len(list(tmp_path.iterdir())) == before + 1
        inputs = teacher.data.prepare(teacher.data.train.inputs)
        torch.testing.assert_close(teacher.targets, teacher.members(inputs).detach())


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


def test_large_answers_stay_on_disk(members, data, tmp_path, monkeypatch):
    members.eval()
    batch = next(Order(8, range(2)).batches(data, 0))
    fold = KD(temperature=2.0, plan=PLAN)
    held = fold.teacher(members, data, tmp_path)
    monkeypatch.setattr("enfold.distill.teacher.LARGE", 0)
    mapped = fold.teacher(members, data, tmp_path)
    assert mapped.targets is None
    torch.testing.assert_close(mapped(batch), held(batch))


def test_other_tensors_beside_the_answers(tmp_path):
    logits = torch.randn(2, 6, 3)
    file = tmp_path / "more.safetensors"
    save_file({"aaa": torch.zeros(9), "logits": logits, "zeta": torch.zeros(5)}, file)
    assert torch.equal(CachedTeacher.load(file).logits, logits)
    file.write_bytes(file.read_bytes()[:-80])
    with pytest.raises(EnfoldError, match="its header does not fit its size"):
        CachedTeacher.load(file)


def test_answers_in_another_order_are_refused(members, data, tmp_path):
    Teacher(members.eval(), data, remembers=True, folder=tmp_path)
    recorded = CachedTeacher.load(next(tmp_path.iterdir()))
    assert Teacher(recorded, data, remembers=True).targets is not None
    other = data.replace(train=data.train[torch.arange(39, -1, -1)])
    with pytest.raises(EnfoldError, match="got 40 answers, 40 examples with other training inputs: "):
        Teacher(recorded, other, remembers=True)
    with pytest.raises(EnfoldError, match="with other normalisation: "):
        Teacher(recorded, data.replace(mean=(0.5,) * 4, std=(2.0,) * 4), remembers=True)
    assert Teacher(recorded, data.replace(source="elsewhere"), remembers=True).targets is not None


def test_the_same_values_in_another_architecture_have_another_key(data):
    first, second = (nn.Sequential(nn.Linear(4, 5), between, nn.Linear(5, 3)) for between in (nn.ReLU(), nn.Tanh()))
    second.load_state_dict(first.state_dict())
    assert Teacher(MixedEnsemble([first]), data).key != Teacher(MixedEnsemble([second]), data).key


def test_classes_are_counted_in_loaders_and_students_too(members, data):
    loader = data.replace(train=[(data.train.inputs, data.train.labels)])
    with pytest.raises(EnfoldError, match="must know the data's classes, got 5 for the 3"):
        KD(student=lambda: nn.Linear(4, 3), plan=PLAN)(MixedEnsemble([nn.Linear(4, 5)]), loader)
    with pytest.raises(EnfoldError, match="a student must answer for the data's 3 classes, got 5"):
        KD(student=lambda: nn.Linear(4, 5), plan=PLAN)(members, data)


def test_answers_in_sixteen_bits_are_kept_as_floats(data, tmp_path):
    teachers = MixedEnsemble([nn.Linear(4, 3)])

    class Half(nn.Module):
        num_members = 1

        def __init__(self) -> None:
            super().__init__()
            self.inner = teachers

        def forward(self, inputs):
            return self.inner(inputs).bfloat16()

    assert Teacher(Half(), data, remembers=True, folder=tmp_path).targets.dtype == torch.float32


@pytest.mark.parametrize(
    ("share", "settings", "says"),
    [
        (Bagging(2), {"fit": "ensemble"}, "students that see the same examples, got the order 'own'"),
        (BatchEnsemble(2), {"fit": "ensemble", "plan": PLAN.replace(order="split")}, "got the order 'split'"),
        (TreeNet(2, choice="best"), {}, "TreeNet as it is set has a loss or a training of its own"),
    ],
)
def test_students_that_cannot_learn_so(members, data, share, settings, says):
    with pytest.raises(EnfoldError, match=says):
        KD(share=share, **{"plan": PLAN, **settings})(members, data)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_answers_of_all_kinds_of_floats(tmp_path, dtype):
    logits = torch.randn(3, 7, 2).to(dtype)
    assert torch.equal(CachedTeacher.load(CachedTeacher(logits).save(tmp_path / "a.safetensors")).logits, logits)


def test_what_is_no_file_of_answers(tmp_path):
    for name, content in (("none", None), ("text", b"hello"), ("empty", b"")):
        file = tmp_path / f"{name}.safetensors"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(EnfoldError, match="must be a safetensors file with floating-point 'logits'"):
            CachedTeacher.load(file)
    with pytest.raises(EnfoldError, match=r"must be logits of shape \(members, examples, classes\), got \(2, 3\)"):
        CachedTeacher(torch.zeros(2, 3))


def test_recorded_answers_teach_as_their_members_do(members, data):
    members.eval()
    recorded = CachedTeacher(members(data.train.inputs).detach())
    fold = KD(plan=PLAN, student=lambda: members.member(0))
    one, other = fold(recorded, data), fold(members, data)
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": Split(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))}, "got 40 answers, 3 examples"),
        ({"train": [(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))]}, "got 40 answers, a loader"),
    ],
)
def test_recorded_answers_for_other_data(members, data, change, message):
    recorded = CachedTeacher(members.eval()(data.train.inputs).detach())
    with pytest.raises(EnfoldError, match=message):
        Teacher(recorded, data.replace(**change), remembers=True)


def test_recorded_answers_know_no_other_inputs(members, data):
    recorded = CachedTeacher(members.eval()(data.train.inputs).detach())
    with pytest.raises(EnfoldError, match="augmented or perturbed"):
        Teacher(recorded, data, remembers=False)
    with pytest.raises(EnfoldError, match="a student of the members' own class needs members of one architecture"):
        KD(plan=PLAN)(recorded, data)
    with pytest.raises(EnfoldError, match="cannot be asked about other inputs"):
        Teacher(recorded, data, remembers=True).answer(data.test.inputs)


def test_teachers_of_other_classes(members, data):
    with pytest.raises(EnfoldError, match="must know the data's classes, got 3 for the 4 of the data"):
        KD(plan=PLAN)(members, data.replace(num_classes=4))
    with pytest.raises(EnfoldError, match="must know the data's classes, got 2 for the 3"):
        Teacher(CachedTeacher(torch.zeros(1, 40, 2)), data, remembers=True)


def test_recorded_answers_must_be_finite(data):
    with pytest.raises(EnfoldError, match="must be finite"):
        Teacher(CachedTeacher(torch.full((1, 40, 3), math.nan)), data, remembers=True)


def test_a_run_keeps_answers_beside_its_folds(members, data, tmp_path):
    plain = KD(plan=PLAN)(members, data)
    kept = KD(plan=PLAN)(members, data, answers=tmp_path / "answers")
    again = KD(plan=PLAN)(members, data, answers=tmp_path / "answers")
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, kept.state_dict()[name])
        assert torch.equal(tensor, again.state_dict()[name])
    assert len(list((tmp_path / "answers").iterdir())) == 1


@pytest.mark.parametrize("own", [True, False])
def test_targets_with_a_teacher_axis(members, data, own):
    """(T, B, C), or (T, S, B, C): looked up as computed."""
    members.eval()
    looked_up, computed = (Teacher(members, data, remembers=remembers) for remembers in (True, False))
    batch = next(Order(8, range(2) if own else None).batches(data, 0))
    assert looked_up(batch).shape == ((4, 2, 8, 3) if own else (4, 8, 3))
    torch.testing.assert_close(looked_up(batch), computed(batch))


def test_a_share_as_student_sees_one_order_and_one_by_one_is_all_at_once(members, data):
    from enfold.distill.lesson import Lessons
    from enfold.train.backward import backward

    fold = KD(plan=PLAN, share=BatchEnsemble(3, engine="loop"), temperature=2.0, alpha=0.7)
    teacher = fold.teacher(members.eval(), data)
    batch = next(Order(8).batches(data, 0))
    students = [BatchEnsemble(3, engine="loop")(members.member(0)).eval() for _ in range(2)]
    at_once = Lessons(fold, teacher)(students[1], batch)
    at_once.sum().backward()
    torch.testing.assert_close(backward(students[0], batch, Lessons(fold, teacher)), at_once.detach())
    for one, other in zip(students[0].parameters(), students[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert fold.adapted(students[0]).order == "shared"
    trained = fold(members, data)
    assert predict(trained, data.test).num_members == 3


def test_the_mean_of_students_learns_as_a_whole(members, data):
    """With fit="ensemble" the loss is that of their mean, and equal students have the loss of one."""
    fold = KD(share=BatchEnsemble(2), fit="ensemble", plan=PLAN)
    target = torch.randn(5, 3).log_softmax(-1)
    logits = torch.randn(2, 5, 3)
    mean = logits.softmax(-1).mean(0).log()
    expected = (target.exp() * (target - mean)).sum(-1).mean()
    told = as_target(target)
    torch.testing.assert_close(fold.loss(logits, told, 0.0), expected.expand(2))
    equal = logits[:1].expand(2, 5, 3)
    torch.testing.assert_close(fold.loss(equal, told, 0.0), KD().loss(equal, told, 0.0))
    assert not fold.separable
    assert predict(fold(members, data), data.test).num_members == 2


def test_what_is_fitted_is_what_an_epoch_is_chosen_by(members, data, monkeypatch):
    """With fit="ensemble" the validation NLL of the students' mean, not the mean of theirs."""
    seen: list[tuple[list[float], float]] = []
    update = Selection.update

    def remembering(self: Selection, epoch: int, values: list[float]) -> None:
        seen.append((values, nll(predict(self.model, data.val))))
        update(self, epoch, values)

    monkeypatch.setattr(Selection, "update", remembering)
    fold = KD(share=BatchEnsemble(3, init="signs"), fit="ensemble", start="fresh", plan=PLAN.replace(select="best"))
    student = fold(members, data)
    assert len(seen) == PLAN.epochs + 1
    for values, whole in seen:
        assert values == pytest.approx([whole], abs=1e-6)
    assert nll(predict(student, data.val)) == pytest.approx(min(whole for _, whole in seen), abs=1e-6)


def test_the_key_is_that_of_a_later_process(members, data):
    one, other = Teacher(members.eval(), data), Teacher(DeepEnsemble(members.networks()).eval(), Data(**vars(data)))
    assert repr(one) == repr(other)
    assert repr(one) != repr(Teacher(members[:2].eval(), data))
