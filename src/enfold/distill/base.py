"""What every distillation keeps to: members teach in eval mode, a student learns by a plan."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.distill.cached import CachedTeacher
from enfold.distill.lesson import Lessons
from enfold.distill.perturbation import Perturbation
from enfold.distill.start import Start, begin
from enfold.distill.teacher import Teacher
from enfold.engines.copying import copied
from enfold.engines.modes import evaluating
from enfold.ensemble import share_of, trained_members
from enfold.ensembles.common.sharing import Share
from enfold.ensembles.mimo import MIMO
from enfold.ensembles.rank_one import Tied
from enfold.errors import EnfoldError
from enfold.evaluate import best_member, member_logits
from enfold.merge.common.inputs import require_members
from enfold.options import require_types
from enfold.registry import method, method_name
from enfold.train import History, Objective, TrainConfig, fit
from enfold.train.history import warn_if_unchanged


@dataclass(frozen=True)
class Distillation(ABC):
    """A fold by training: subclasses say what is learned from the teachers, and how far a student is from it."""

    alpha: float = 1.0  # the teachers' part of the loss; the labels' is 1 - alpha
    temperature: float = 1.0  # teachers' and students' logits are divided by it
    start: Start | None = None  # member, fresh, average, matched or als; None: member, or fresh if there is a student
    student: Callable[[], nn.Module] | None = None  # makes another network than the members', which starts fresh
    share: Share | None = None  # the student is this share of its network, instead of one network
    perturb: Perturbation | str | Mapping[str, Any] | None = None  # moves inputs to where teachers have more to tell
    tie: float = 0.0  # strength of a pull of a share's weights to the teachers', member by member
    tie_over: Literal["sum", "mean"] = "mean"  # over the weights of a layer; a sum pulls far harder
    plan: TrainConfig = field(default_factory=TrainConfig)  # how the student is trained

    expected: ClassVar[tuple[type[Warning], ...]] = ()  # warnings of training that are no fault of this method
    one_network: ClassVar[bool] = True  # whether the result is one network unless a share is asked for

    def __post_init__(self) -> None:
        self._require_kinds()
        require_types(self)
        if not 0 <= self.alpha <= 1:
            raise EnfoldError(f"alpha must be in [0, 1], got {self.alpha}: 1 is the teachers alone, 0 the labels alone")
        if not 0 < self.temperature < math.inf:
            raise EnfoldError(f"the temperature must be above 0, got {self.temperature}: 1 softens nothing")
        if not 0 <= self.tie < math.inf:
            raise EnfoldError(f"the tie must be 0 or more, got {self.tie}: 0.01, 0.1 and 1 are usual, 0 is none")
        if self.tie and self.student_share(1) is None:
            raise EnfoldError(
                f"a tie holds each member of a share to its teacher, got tie={self.tie} and one network: give a share"
            )
        if self.student is not None and self.start not in (None, "fresh"):
            raise EnfoldError(
                f"a student of its own has no member's weights to start from, got start: {self.start}: use start: "
                "fresh, or leave student out"
            )
        object.__setattr__(self, "perturb", made_perturbation(self.perturb))

    def _require_kinds(self) -> None:
        """What is no network maker, share or plan is said at once, not where it is used."""
        if self.student is not None and (isinstance(self.student, nn.Module) or not callable(self.student)):
            raise EnfoldError(
                f"student must be a function or class that makes a network, which is trained from scratch, got "
                f"{type(self.student).__name__}: pass lambda: YourNetwork(...)"
            )
        for name, kind in (("share", Share), ("plan", TrainConfig)):
            value = getattr(self, name)
            if not isinstance(value, kind) and not (name == "share" and value is None):
                raise EnfoldError(
                    f"{name} must be a {kind.__name__}, got {value!r}: pass "
                    f"{'BatchEnsemble(4)' if name == 'share' else 'TrainConfig(epochs=...)'}"
                )

    @abstractmethod
    def target(self, logits: Tensor) -> Tensor:
        """What is learned from the teachers' logits, example by example: (T, N, C) -> (..., N, K)."""

    @abstractmethod
    def loss(self, logits: Tensor, target: Tensor, progress: float) -> Tensor:
        """The loss of each student, (S,), from their logits (S, B, C).

        The target is (..., B, K), or (..., S, B, K) where each student has its own batch; `progress` is the part of the
        training that is done.
        """

    @property
    def begins(self) -> Start:
        """The start, said or not: members' networks start from the best member, others fresh."""
        return self.start or ("member" if self.student is None else "fresh")

    @property
    def separable(self) -> bool:
        """Whether a student's loss depends on that student alone."""
        return True

    @property
    def weights(self) -> tuple[float, float]:
        """What the labels' and the teachers' loss are multiplied by."""
        return 1 - self.alpha, self.alpha

    def part(self, target: Tensor, index: int, own: bool) -> Tensor:
        """The part of a target that one student's loss needs, shaped as for one student."""
        return target[..., index : index + 1, :, :] if own else target

    def student_share(self, num_teachers: int) -> Share | None:
        """Of what the student is a share; None: it is one network."""
        return self.share

    def check(self, teacher: Teacher, student: nn.Module) -> None:
        """What must hold between teachers and student before anything is trained."""
        if self.tie and teacher.num_members != trained_members(student):
            raise EnfoldError(
                f"a tie is between a member and its teacher, got {teacher.num_members} teachers and "
                f"{trained_members(student)} students: give a share of as many members"
            )

    def judged(self, student: nn.Module) -> nn.Module:
        """What is looked at on validation data when an epoch is chosen."""
        return student

    def finish(self, student: nn.Module, data: Data) -> nn.Module:
        """What is handed over after training."""
        return student

    def answering(self, network: nn.Module) -> nn.Module:
        """The network as a predictor, where its logits are not those of its probabilities."""
        return network

    def __call__(
        self,
        members: nn.Module | CachedTeacher,
        data: Data,
        *,
        checkpoint: Path | None = None,
        answers: Path | None = None,
    ) -> nn.Module:
        """The student after training; the members are left as they were.

        Answers about data that stay the same are computed once, and kept in the folder `answers` if it is given.
        """
        if not isinstance(data, Data):
            raise EnfoldError(f"a distillation needs enfold.Data, got {type(data).__name__}: pass Data(train, ...)")
        return self.finish(self.learned(members, data, checkpoint=checkpoint, answers=answers), data)

    def learned(
        self,
        members: nn.Module | CachedTeacher,
        data: Data,
        *,
        checkpoint: Path | None = None,
        answers: Path | None = None,
    ) -> nn.Module:
        """The student as its training left it, before anything is made of it."""
        student = self.begin(members, data, checkpoint, answers)
        return self.taught(student, members, data, checkpoint, answers, self.begins)

    def after(
        self,
        network: nn.Module,
        members: nn.Module | CachedTeacher,
        data: Data,
        *,
        checkpoint: Path | None = None,
        answers: Path | None = None,
    ) -> nn.Module:
        """As a step of a route: the student starts from the network that the steps before it made, whatever `start`."""
        if self.student is not None:
            raise EnfoldError(
                f"a distillation in a route starts from the network before it, but {type(self).__name__} has a student "
                "of its own: leave student out, or distil without a route"
            )
        student = self.started(copied(network), int(getattr(members, "num_members", 1)))
        return self.finish(self.taught(student, members, data, checkpoint, answers, "route"), data)

    def started(self, network: nn.Module, num_teachers: int) -> nn.Module:
        """The student that starts from this network."""
        share = self.student_share(num_teachers)
        return network if share is None else share(network)

    def taught(
        self,
        student: nn.Module,
        members: nn.Module | CachedTeacher,
        data: Data,
        checkpoint: Path | None,
        answers: Path | None,
        start: str,
    ) -> nn.Module:
        """The student, trained in place."""
        with evaluating(*([members] if isinstance(members, nn.Module) else [])), warnings.catch_warnings():
            for kind in self.expected:
                warnings.simplefilter("ignore", kind)
            objective = self.agreed(student, members, data, answers)
            title = f"{method_name(type(self))} ({start})"
            plan = self.adapted(student)
            history = fit(
                student, data, config=plan, objective=objective, checkpoint=checkpoint, title=title, judged=self.judged
            )
        self._report(history, members, data, start)
        self.looked_at(student, members, data)
        return student

    def _report(self, history: History, members: nn.Module | CachedTeacher, data: Data, start: str) -> None:
        """Say so where training returned its start."""
        begun = {"route": "the network of the step before", "fresh": "a network never trained"}.get(
            start, f"start: {start}"
        )
        if start == "member" and history.unchanged and isinstance(members, nn.Module):
            begun = f"member {best_member(members, data)}"
        remedy = (
            "lower the learning rate, train for more epochs, or keep the last epoch with TrainConfig(select='last')"
        )
        warn_if_unchanged(history, type(self).__name__, begun, remedy)

    def looked_at(self, student: nn.Module, members: nn.Module | CachedTeacher, data: Data) -> None:  # noqa: B027
        """What a method warns of once its student is trained; nothing unless it has something to say."""

    def agreed(
        self, student: nn.Module, members: nn.Module | CachedTeacher, data: Data, answers: Path | None = None
    ) -> Objective:
        """What is minimised, after all that must hold between teachers and student was looked at."""
        self.plan.per_member("label_smoothing", trained_members(student))
        teacher = self.teacher(members, data, answers)
        self.check(teacher, student)
        self._require_plain(student)
        self._require_classes(student, data)
        if isinstance(self.perturb, Perturbation) and teacher.members is not None:
            self.perturb.require(teacher.members, student)
        return self.objective(teacher, members)

    def trained_by(self, student: nn.Module) -> TrainConfig:
        """The plan as the student's share has it."""
        share, plan = share_of(student), self.adapted(student)
        return plan if share is None else share.adapted(plan)

    def _require_plain(self, student: nn.Module) -> None:
        """A share that learns by a loss of its own, or trains in its own way, would not be what it is."""
        share = share_of(student)
        if share is None:
            return
        own = share.objective(self.trained_by(student)) is not None and not isinstance(share, MIMO)
        if own or type(share).train is not Share.train:
            raise EnfoldError(
                f"a student learns by the teachers' loss alone, but {type(share).__name__} as it is set has a loss or "
                "a training of its own: use a share without, such as BatchEnsemble"
            )

    def _require_classes(self, student: nn.Module, data: Data) -> None:
        if not isinstance(data.train, Split) or not len(data.train):
            return
        with torch.no_grad(), evaluating(student), torch.random.fork_rng(devices=[]):
            place = next((tensor.device for tensor in student.parameters()), torch.device("cpu"))
            classes = member_logits(student, data.prepare(data.train.inputs[:2]).to(place)).shape[-1]
        if data.num_classes not in (None, classes):
            raise EnfoldError(
                f"a student must answer for the data's {data.num_classes} classes, got {classes}: change its last layer"
            )

    def begin(
        self, members: nn.Module | CachedTeacher, data: Data, checkpoint: Path | None, answers: Path | None
    ) -> nn.Module:
        """The student before its training; one that is trained before that keeps its state beside `checkpoint`."""
        share = self.student_share(int(getattr(members, "num_members", 1)))
        return begin(members, data, self.begins, self.plan.seed, self.student, share)

    def teacher(self, members: nn.Module | CachedTeacher, data: Data, answers: Path | None = None) -> Teacher:
        """The members as those who answer."""
        remembers = not self.plan.augment and self.perturb is None
        return Teacher(members, data, self.target, remembers=remembers, folder=answers)

    def objective(self, teacher: Teacher, members: nn.Module | CachedTeacher) -> Objective:
        """What is minimised."""
        lessons = self.lessons(teacher)
        return Tied(lessons, require_members(members, "a tie"), self.tie, self.tie_over) if self.tie else lessons

    def lessons(self, teacher: Teacher) -> Lessons:
        """What is learned from each batch."""
        perturb = self.perturb if isinstance(self.perturb, Perturbation) else None
        return Lessons(self, teacher, perturb, self.plan.label_smoothing)

    def adapted(self, student: nn.Module) -> TrainConfig:
        """The plan; members of a share see the same batches, about which the teachers are then asked once."""
        several = trained_members(student) > 1
        return self.plan.replace(order="shared") if several and self.plan.order == "own" else self.plan


def made_perturbation(given: Perturbation | str | Mapping[str, Any] | None) -> Perturbation | None:
    """A perturbation by name, as a mapping with `method` and its settings, or as it is."""
    if given is None or isinstance(given, Perturbation):
        return given
    settings = {"method": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {}
    name = settings.pop("method", None)
    if not isinstance(name, str):
        raise EnfoldError(f"a perturbation is a name or a mapping with method, got {given!r}: write perturb: tdiv_sdiv")
    made: Perturbation = method("perturb", name).make(**settings)
    return made
