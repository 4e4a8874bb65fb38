"""Distillation: train one network, or an efficient ensemble, to match an ensemble of teachers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import check_value
from enfold.data import Data, Split
from enfold.data.convert import Examples, as_data, has_targets, require
from enfold.data.dataset import has_examples
from enfold.data.unpack import Unpack
from enfold.distill.cached import CachedTeacher
from enfold.distill.loss import DistillationLoss
from enfold.distill.losses.kd import KD
from enfold.distill.objective import DistillationObjective
from enfold.distill.out_of_fold import OutOfFoldTeacher, check_out_of_fold
from enfold.distill.perturbation import Perturbation
from enfold.distill.teacher import Teacher, as_teacher, count_members, first_member, starting_member, teacher_weights
from enfold.distill.weight_penalty import WeightPenalty
from enfold.engines.copying import copy_network
from enfold.engines.initialization import initialize_member
from enfold.engines.modes import eval_mode, refuse_inference_mode
from enfold.engines.outputs import get_output
from enfold.ensemble import Ensemble, called_network, set_model_output, set_model_task
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits, predict
from enfold.io.files import part_file
from enfold.loggers import Log, LoggerLike, as_log, with_log
from enfold.tasks import (
    Classification,
    Inferred,
    StudentTask,
    Task,
    as_task,
    current_task,
    first_batch_task,
    known_task,
    task_of,
)
from enfold.train import Objective, TrainConfig, fit
from enfold.train.history import Epoch, warn_if_unchanged
from enfold.train.optimize import trained_members

Student = Callable[[], nn.Module] | Ensemble
Init = nn.Module | Literal["random"]


@with_log
def distill(
    teacher: nn.Module | Sequence[nn.Module] | CachedTeacher | OutOfFoldTeacher,
    train: Examples,
    val: Examples | None = None,
    *,
    student: Student | None = None,
    init: Init | None = None,
    loss: DistillationLoss | None = None,
    perturb: Perturbation | None = None,
    weight_penalty: float = 0.0,
    penalty_reduction: Literal["sum", "mean"] = "mean",
    config: TrainConfig | None = None,
    checkpoint: str | Path | None = None,
    cache: str | Path | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    logger: LoggerLike | Log = None,
    title: str | None = None,
    quiet: bool = False,
    unpack: Unpack | None = None,
    outputs: Callable[[Any], torch.Tensor] | None = None,
    **settings: Any,
) -> nn.Module:
    """Train a student to match a teacher, and return it.

    ``distill(ensemble, train, val, loss=KD(temperature=2.0), epochs=20, lr=1e-3)`` gives one network of the members'
    class. Teacher, student and init are not changed.

    Args:
        teacher: An ensemble, a network, a list of networks, cached logits (`CachedTeacher`), or members that answer for
            the examples that they were not trained on (`OutOfFoldTeacher`).
        train: Training examples, as for `fit`, or inputs only: a tensor, (inputs, None), or batches without targets.
        val: Validation examples, as for `fit`; they choose the best epoch, and the member to start from. Without
            targets, the epoch with the lowest divergence from the teacher is chosen, and the start is member 0.
        student: What is trained: None for a network of the members' architecture, a function that makes another
            network, or an ensemble, of which a copy is trained.
        init: The weights that the student starts from: a network, which is copied; "random" for new weights; None for
            the best member on `val` (member 0 without `val`), or for the weights of `student`.
        loss: The distillation loss; the default is `KD()`. `LatentBE` trains a `BatchEnsemble` and returns one network;
            `OneToOne` and `Hydra` return an ensemble.
        perturb: A perturbation of the inputs, the same for teacher and student.
        weight_penalty: Strength of a penalty on the distance of an ensemble student's weights to its teachers'.
        penalty_reduction: Whether the penalty is a sum or a mean over the weights of a layer.
        config: Training settings; the default is `TrainConfig()`.
        checkpoint: A file that is written after every epoch. If it exists, training continues from it to the same
            bits; other data, teachers, weights or settings are refused.
        cache: A folder for the teacher's logits, which are computed once if inputs never change.
        on_epoch: Called with the record of every epoch, an `Epoch`.
        logger: Where settings and metrics are logged to, as for `fit`.
        title: The name on the progress bar.
        quiet: Show no progress bar.
        unpack: A function that splits a batch, as for `fit`.
        outputs: A function that selects the output of a network, as for `fit`.
        **settings: Fields of `TrainConfig`, which replace those of `config`.

    Returns:
        The student: a network of the members' class or of `student`, or an ensemble.

    Raises:
        EnfoldError: If an argument is of the wrong kind, or arguments do not fit each other.
        NonFiniteLoss: If a loss becomes NaN or infinite.

    Warns:
        UnchangedWarning: If no epoch had a lower validation NLL than the start, which is then the result.
    """
    refuse_inference_mode("distill")
    log = as_log(logger)
    require(train, "train", "distill")
    loss = KD() if loss is None else loss
    _check_arguments(student, init, loss, perturb, weight_penalty, penalty_reduction, config)
    folds = teacher if isinstance(teacher, OutOfFoldTeacher) else None
    models = as_teacher(teacher if folds is None else folds.members)
    config = loss.configure((config or TrainConfig()).update(settings))
    config = config.replace(task=first_batch_task(config.task or task_of(models)))
    network = _called_network(models, init)
    data = as_data(
        train,
        val,
        batch_size=config.batch_size,
        unpack=unpack,
        network=network,
        indexed=folds is not None,
        needs_targets=False,
    )
    _check_targets(data, models, loss, config)
    if folds is not None:
        check_out_of_fold(folds, data, loss, perturb)
    if outputs is not None and isinstance(models, nn.Module):
        models = copy_network(models)
        set_model_output(models, outputs)
    title = title or f"distill ({type(loss).__name__})"

    # Which network learns, and from which weights
    network, start = _initial_network(models, data, student, init or loss.default_init, config)
    is_ready = isinstance(init, nn.Module) or isinstance(network, Ensemble)
    first_stage = None if is_ready else loss.pretrain(config)
    if first_stage is not None:
        network = distill(
            models if folds is None else folds,
            data,
            init=network,
            loss=first_stage[0],
            perturb=None if perturb is None or perturb.replaces_batch else perturb,
            config=first_stage[1],
            checkpoint=checkpoint and part_file(Path(checkpoint), "first"),
            cache=cache,
            on_epoch=on_epoch,
            logger=log.part("first_stage"),
            title=f"{title}, first stage",
            quiet=quiet,
        )
    model = loss.build_student(network, count_members(models), config)
    outputs = outputs or _output_of_teachers(models, model)
    if outputs is not None:
        set_model_output(model, outputs)

    # What it learns: each batch gives targets, which the objective compares with the student
    if trained_members(model) > 1 and config.order == "own":
        config = config.replace(order="shared")  # the teacher then runs once per batch, for all students
    with eval_mode(*([models] if isinstance(models, nn.Module) else [])), warnings.catch_warnings():
        for category in loss.ignored_warnings:
            warnings.simplefilter("ignore", category)
        unseen = None if folds is None else folds.unseen
        distillation = make_objective(loss, models, data, config, perturb=perturb, cache=cache, unseen=unseen)
        check_student(distillation, model, config)
        objective: Objective = distillation
        if weight_penalty:
            objective = _add_penalty(distillation, models, model, weight_penalty, penalty_reduction)

        # Training by the one loop
        history = fit(
            model,
            data,
            config=config.replace(task=distillation.student_task),
            objective=objective,
            checkpoint=checkpoint,
            on_epoch=on_epoch,
            logger=log,
            title=title,
            quiet=quiet,
            evaluated_model=loss.evaluated_model,
        )
    remedy = "lower the learning rate, train for more epochs, or take the last epoch with TrainConfig(select='last')"
    warn_if_unchanged(history, type(loss).__name__, start, remedy)
    if config.epochs:
        loss.check_result(model, models, data)
    result = loss.finish(model, data)
    set_model_task(result, known_task(distillation.student_task) or task_of(result))
    return result


def make_objective(
    loss: DistillationLoss,
    teacher: nn.Module | Sequence[nn.Module] | CachedTeacher,
    data: Data,
    config: TrainConfig,
    *,
    perturb: Perturbation | None = None,
    cache: str | Path | None = None,
    unseen: torch.Tensor | None = None,
) -> DistillationObjective:
    """Return a distillation loss as an objective of `fit`, for training loops other than `distill`.

    Args:
        loss: The distillation loss.
        teacher: The teacher, as for `distill`.
        data: The training data.
        config: Training settings: targets are computed once if `augment` is empty and there is no perturbation.
        perturb: A perturbation of the inputs.
        cache: A folder for the teacher's logits.
        unseen: Which members answer for each training example, (M, N); None for all.
    """
    is_constant = not config.augment and perturb is None
    folder = None if cache is None else Path(cache)
    task = as_task(config.task)
    models = as_teacher(teacher)
    weights = teacher_weights(models)
    if weights is not None and unseen is not None:
        raise EnfoldError(
            "an OutOfFoldTeacher must have members without weights, as different members answer for each example, got "
            "weights: call set_weights(None) on the ensemble"
        )

    def target(values: torch.Tensor) -> torch.Tensor:
        known = current_task(task)
        return loss.task_target(values, known) if weights is None else loss.weighted_target(values, known, weights)

    source = Teacher(
        models,
        data,
        target,
        is_constant=is_constant,
        folder=folder,
        task=task,
        unseen=unseen,
    )
    return DistillationObjective(loss, source, perturb, config.label_smoothing, StudentTask(teacher=task))


def _output_of_teachers(models: nn.Module | CachedTeacher, student: nn.Module) -> Callable[[Any], Tensor] | None:
    """Return the function that selects the output of the teachers for a student of their class without one."""
    if not isinstance(models, nn.Module):
        return None
    teacher, taught = called_network(models), called_network(student)
    return get_output(teacher) if type(taught) is type(teacher) and get_output(taught) is None else None


def _called_network(models: nn.Module | CachedTeacher, init: object) -> nn.Module | None:
    """Return a network whose forward pass shows how many inputs there are."""
    if isinstance(models, nn.Module):
        return called_network(models)
    return init if isinstance(init, nn.Module) else None


def _check_arguments(
    student: object, init: object, loss: object, perturb: object, penalty: object, reduction: object, config: object
) -> None:
    """Raise an error that names the first argument of the wrong kind."""
    check_value("weight_penalty", penalty, Annotated[float, Field(ge=0, allow_inf_nan=False)])
    check_value("penalty_reduction", reduction, Literal["sum", "mean"])
    for name, value, kind, example in (
        ("loss", loss, DistillationLoss, "KD()"),
        ("perturb", perturb, Perturbation, "ConfODS()"),
        ("config", config, TrainConfig, "TrainConfig(epochs=20)"),
    ):
        if value is not None and not isinstance(value, kind):
            raise EnfoldError(f"{name} must be a {kind.__name__}, got {value!r}: pass {example}")
    if (
        student is not None
        and not isinstance(student, Ensemble)
        and (isinstance(student, nn.Module) or not callable(student))
    ):
        raise EnfoldError(
            f"student must be a function that makes a network, or an ensemble, got {type(student).__name__}: pass "
            "lambda: YourNetwork(...), or init=network to start from a network"
        )
    if isinstance(init, Ensemble) or not (init is None or init == "random" or isinstance(init, nn.Module)):
        given = f"a {type(init).__name__}" if isinstance(init, nn.Module) else repr(init)
        raise EnfoldError(
            f"init must be a network, 'random' or None, got {given}: pass an ensemble as student=, and "
            "ensemble.member(0) or a merged network as init="
        )
    if student is not None and init is not None and (isinstance(student, Ensemble) or init != "random"):
        raise EnfoldError(
            "init must be None if student has weights of its own, got both: leave out init, or leave out student to "
            "train a network of the class of init"
        )


def _initial_network(
    models: nn.Module | CachedTeacher, data: Data, student: Student | None, init: Init | None, config: TrainConfig
) -> tuple[nn.Module, str]:
    """Return the network or ensemble that training starts from, and its name in warnings."""
    if isinstance(student, Ensemble):
        return copy_network(student), "the ensemble passed as student"
    if student is not None:
        return initialize_member(student, config.seed, -1)[0], "a network with random weights"
    if isinstance(init, nn.Module):
        return copy_network(init), "the network passed as init"
    if init == "random":
        return initialize_member(first_member(models), config.seed, -1, trained=True)[
            0
        ], "a network with random weights"
    member, index = starting_member(models, data, config.task)
    return member, f"member {index}"


def _check_targets(data: Data, models: nn.Module | CachedTeacher, loss: DistillationLoss, config: TrainConfig) -> None:
    """Raise an error if examples have no targets, but the loss or the validation needs them."""
    is_labelled = not has_examples(data.train) or has_targets(data.train)
    if not is_labelled and loss.weights[0]:
        raise EnfoldError(
            f"loss must not use targets if train has none, got {loss!r}, which gives them the weight "
            f"{loss.weights[0]:.3g}: pass alpha=1 (hard=0 for AEKD), or targets"
        )
    if not has_examples(data.val):
        return
    if not has_targets(data.val) and isinstance(models, CachedTeacher):
        raise EnfoldError(
            "val must have targets for a CachedTeacher, which has logits for training examples only, got inputs only: "
            "pass targets, val=None, or the networks as teacher"
        )
    is_open = isinstance(current_task(as_task(config.task)), Inferred)
    if not is_labelled and is_open and has_targets(data.val) and isinstance(models, nn.Module):
        predict(models, data.val, task=config.task)  # the task follows from these targets


def check_student(objective: DistillationObjective, model: nn.Module, config: TrainConfig) -> None:
    """Raise an error if the student does not fit teacher, data or settings; nothing is trained yet."""
    data, loss, teacher = objective.teacher.data, objective.loss, objective.teacher
    config.per_member("label_smoothing", trained_members(model))
    if isinstance(model, Ensemble):
        config = model.configure(config)
        if not model.accepts_loss(config):
            raise EnfoldError(
                f"student must be an ensemble that is trained by the common loop and loss, but {type(model).__name__} "
                "with these options has its own: pass another one, such as BatchEnsemble(network, num_members=4)"
            )
    loss.check(teacher, model, config)
    if isinstance(data.train, Split) and len(data.train):
        _check_classes(model, data, current_task(teacher.task))
    if objective.perturb is not None and teacher.models is not None:
        objective.perturb.check_task(current_task(teacher.task))
        objective.perturb.check(teacher.models, model)


@torch.no_grad()
def _check_classes(model: nn.Module, data: Data, task: Task) -> None:
    with eval_mode(model), torch.random.fork_rng(devices=[]):
        device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        outputs = member_logits(model, data.prepare(cast("Split", data.train).inputs[:2]).to(device))
    classes, is_labels = outputs.shape[-1], type(task) is Classification and outputs.ndim == 3
    if is_labels and data.num_classes not in (None, classes):
        raise EnfoldError(
            f"student must predict the {data.num_classes} classes of the data, got {classes} classes: change its last "
            "layer"
        )


def _add_penalty(
    objective: Objective, models: nn.Module | CachedTeacher, model: nn.Module, strength: float, reduction: Any
) -> WeightPenalty:
    if not isinstance(model, Ensemble) or count_members(models) != model.num_members:
        raise EnfoldError(
            f"weight_penalty compares each member of the student with its teacher, got {count_members(models)} "
            f"teachers and {count_members(model)} students: pass an ensemble of as many members as student="
        )
    return WeightPenalty(objective, cast("Ensemble", models), strength, reduction)
