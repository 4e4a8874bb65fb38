"""Steps: how the method of one step is called, by its family.

An ensemble is built from a network and trained with `fit`, a merge is called with the inputs that its signature names,
and a distillation is a call of `distill` with the loss, the start and the student of the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from enfold.data import Split
from enfold.distill import distill
from enfold.distill.distill import Init
from enfold.distill.losses.hydra import Hydra
from enfold.distill.losses.one_to_one import OneToOne
from enfold.engines.initialization import initialize_member
from enfold.ensemble import Ensemble, set_model_task
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.rank_one.reconstruct import reconstruct
from enfold.errors import EnfoldError, UserCodeError
from enfold.evaluate import best_member
from enfold.io.usercode import reporting
from enfold.merge import average, weight_matching
from enfold.run.recipe_checks import code_in
from enfold.run.specs import STARTS, StepSpec
from enfold.run.step_methods import (
    COMPRESS,
    fill_options,
    is_ensemble_student,
    is_trained,
    is_user_code,
    make_perturbation,
    method_of,
    require_options,
    split_options,
    student_method,
)
from enfold.saving import load
from enfold.tasks import task_of
from enfold.train import fit
from enfold.train.checkpoint import stored_history
from enfold.train.loop import Fit

if TYPE_CHECKING:
    from enfold.run.seed_run import SeedRun

BEST = "best_member"


def make_step(
    run: SeedRun, step: StepSpec, members: DeepEnsemble, checkpoint: Path, details: dict[str, Any]
) -> nn.Module:
    """Return the model of a step.

    Args:
        run: The seed that the step belongs to.
        step: The step.
        members: The trained members of the run.
        checkpoint: File of the training checkpoint, from which an interrupted step continues.
        details: What is stored with the model is added to it.
    """
    details["step"] = {"method": step.method, **step.options}
    used = members[: step.first]
    make = {"ensemble": _train_ensemble, "merge": _merge, "distill": _distill}[step.family or ""]
    if step.method == COMPRESS:
        make = _compress
    with reporting(_name(step), always=is_user_code(step)):
        return make(run, step, used, checkpoint, details)


def load_step(run: SeedRun, step: StepSpec, file: Path) -> nn.Module:
    """Return the stored model of a step."""
    network: Any = trial_network(run, step) if step.family == "ensemble" else run.make_network
    if step.student is not None and not is_ensemble_student(step.student):
        network = run.network_factory(step.student)
    method_of(step)  # loading an ensemble finds its class among those that are imported
    return load(file, network)


def as_predictor(step: StepSpec, model: nn.Module) -> nn.Module:
    """Return the model whose outputs are logits of class probabilities; losses may read them differently."""
    if step.family != "distill":
        return model
    method = method_of(step)
    predictor: nn.Module = method.target(**split_options(method, step.options)[0]).as_predictor(model)
    return predictor


def build_ensemble(run: SeedRun, step: StepSpec, network: nn.Module) -> Ensemble:
    """Return the untrained ensemble of a step."""
    method = method_of(step)
    options = fill_options(method, method.check(step.options), run.recipe.members, run.seed)
    ensemble: Ensemble = method.target(network, **options)
    return ensemble


def start_notice(run: SeedRun, step: StepSpec, model: nn.Module) -> str | None:
    """Return a warning if a method that adapts a trained network was given an untrained one."""
    untrained = step.family == "ensemble" and (step.network is None or _is_network_spec(run, step))
    if not untrained or not getattr(model, "needs_trained_network", False):
        return None
    return f"{step.method} adapts a trained network, but this one is untrained: use network: {BEST}"


def _train_ensemble(
    run: SeedRun, step: StepSpec, members: DeepEnsemble, checkpoint: Path, details: dict[str, Any]
) -> nn.Module:
    if step.network is None or _is_network_spec(run, step):
        make = run.make_network if step.network is None else run.network_factory(step.network)
        network, _ = initialize_member(make, run.seed, 0)
    else:
        network = _find_network(run, str(step.network), members, details)
    ensemble = build_ensemble(run, step, network)
    config = run.recipe.step_config(step, run.seed, run.device)
    fit(ensemble, run.data, config=config, checkpoint=checkpoint, title=_title(run, step))
    return ensemble


def _merge(run: SeedRun, step: StepSpec, members: DeepEnsemble, checkpoint: Path, details: dict[str, Any]) -> nn.Module:
    method = method_of(step)
    options = fill_options(method, method.check(step.options), None, run.seed)
    inputs: dict[str, Any] = {"train": run.data, "val": run.data, "example": None, "quiet": False}
    inputs |= {"checkpoint": checkpoint, "cache": run.run.path / "teacher-logits", "title": _title(run, step)}
    if is_trained(step):
        inputs["config"] = run.recipe.step_config(step, run.seed, run.device)
    if "network" in method.inputs:
        inputs["network"] = _find_network(run, step.init or BEST, members, details)
    elif step.init is not None:
        raise EnfoldError(f"'{step.method}' merges the members and has no init, got init={step.init}: remove it")
    given = {name: value for name, value in inputs.items() if name in method.inputs and value is not None}
    merged = method.target(models=members, **given, **options)
    _require_network(step, merged, members)
    if task_of(merged) is None:  # of a function of the user
        set_model_task(merged, members.task)
    return merged  # type: ignore[no-any-return]


def _compress(
    run: SeedRun, step: StepSpec, members: DeepEnsemble, checkpoint: Path, details: dict[str, Any]
) -> nn.Module:
    """Search for the network to ship, and write the table and the explanation beside the results."""
    method = method_of(step)
    config = run.recipe.step_config(step, run.seed, run.device)
    folder = run.run.path / step.label
    result = method.target(members, run.data, config=config, checkpoint=folder / "trials", **method.check(step.options))
    result.save(folder)
    details["start"], details["recommendation"] = "the best member", result.recommendation
    network: nn.Module = result.network
    _require_network(step, network, members)
    return network


def _require_network(step: StepSpec, merged: Any, members: DeepEnsemble) -> None:
    """Refuse the result of a merge that cannot be loaded into the members' network again."""
    rule = f"'{step.method}' must return one network of the members' architecture"
    if not isinstance(merged, nn.Module):
        raise EnfoldError(
            f"{rule}, got {type(merged).__name__}: return an nn.Module, for example models.network(state)"
        )
    found, member = merged.state_dict(), members.member(0).state_dict()
    shapes, wanted = ({n: t.shape for n, t in each.items()} for each in (found, member))
    different = sorted(shapes.keys() ^ wanted.keys()) or [name for name in wanted if shapes[name] != wanted[name]]
    if different:
        raise EnfoldError(f"{rule}, but '{different[0]}' of its {type(merged).__name__} differs: return such a network")
    broken = [n for n, t in found.items() if not t.isfinite().all() and member[n].isfinite().all()]
    if broken:
        raise EnfoldError(
            f"'{step.method}' must return finite weights, got NaN or infinite values in '{broken[0]}' from finite ones "
            "of the members: change its options or its code"
        )


def _distill(
    run: SeedRun, step: StepSpec, members: DeepEnsemble, checkpoint: Path, details: dict[str, Any]
) -> nn.Module:
    method = method_of(step)
    own, common = split_options(method, step.options)
    loss = method.target(**own)
    teacher = members if step.teacher is None else run.step(run.recipe.step(step.teacher), run.members())
    init, student = _start(run, step, loss, members, details, _count_students(loss, teacher, members))
    trained = distill(
        teacher,
        run.data,
        loss=loss,
        init=init,
        student=student,
        perturb=make_perturbation(step.perturb),
        config=run.recipe.step_config(step, run.seed, run.device),
        checkpoint=checkpoint,
        cache=run.run.path / "teacher-logits",
        title=_title(run, step),
        **common,
    )
    history = stored_history(checkpoint)
    if step.init in (None, BEST) and step.student is None and history is not None and history.unchanged:
        details["start"] = f"member {best_member(members, run.data)}"
    return trained


def _count_students(loss: Any, teacher: nn.Module, members: DeepEnsemble) -> int:
    """Return how many members a student has by default: as many as there are teachers if each has its own."""
    has_own = isinstance(loss, OneToOne | Hydra)
    return teacher.num_members if has_own and isinstance(teacher, Ensemble) else members.num_members


def _start(
    run: SeedRun, step: StepSpec, loss: Any, members: DeepEnsemble, details: dict[str, Any], count: int
) -> tuple[Init | None, Any]:
    """Return the arguments `init` and `student` of `distill`; the default of both is of the run, not of the teacher."""
    details["start"] = {None: "the best member", "random": "an untrained network"}.get(step.init, f"init: {step.init}")
    if step.student is not None and not is_ensemble_student(step.student):
        _check_init(step)
        return None, run.network_factory(step.student)
    if step.student is None:
        if step.init == "als":
            raise EnfoldError("init: als needs a BatchEnsemble: add student: {method: batch_ensemble}")
        if step.teacher is not None and (step.init or loss.default_init) == "random":
            return None, run.make_network  # members of the teacher need not exist as networks
        if step.teacher is not None and step.init is None:
            return _find_network(run, BEST, members, {}), None
        if step.init in (None, "random") or (step.init == BEST and loss.default_init is None):
            return ("random" if step.init == "random" else None), None
        return _find_network(run, str(step.init), members, details), None
    method, options = student_method(step.student)  # type: ignore[arg-type]
    options = fill_options(method, options, count, run.seed)
    if step.init == "als":
        if not (isinstance(method.target, type) and issubclass(method.target, BatchEnsemble)):
            raise EnfoldError(f"init: als needs a BatchEnsemble as student, got {method.name}: use batch_ensemble")
        return None, _reconstruct(run, members, options)
    if step.init == "random":
        network, _ = initialize_member(members.member(0), run.seed, -1, trained=True)
    else:
        network = _find_network(run, step.init or BEST, members, details)
    return None, method.target(network, **options)


def _check_init(step: StepSpec) -> None:
    """Refuse a start for a student of another architecture."""
    if step.init not in (None, "random"):
        raise EnfoldError(
            f"a student of another architecture has random weights, got init={step.init}: remove init or student"
        )


def _reconstruct(run: SeedRun, members: DeepEnsemble, options: dict[str, Any]) -> nn.Module:
    """Return the BatchEnsemble nearest to the members, with statistics of batch norm measured again."""
    num_members = options.pop("num_members", members.num_members)
    if num_members != members.num_members:
        raise EnfoldError(f"init: als needs num_members={members.num_members}, one for each member, got {num_members}")
    student = reconstruct(members, **options)
    student.reestimate_batch_norm(run.data)
    return student


def _find_network(run: SeedRun, name: str, members: DeepEnsemble, details: dict[str, Any]) -> nn.Module:
    """Return the network of an earlier step, the best member, or a merge of the members."""
    if any(step.label == name for step in run.recipe.steps):
        return run.step(run.recipe.step(name), run.members())
    if name == BEST:
        index = best_member(members, run.data)
        details["start"] = f"member {index}"
        return members.member(index)
    if name == "average":
        return average(members, run.data)
    if name == "matched":
        return weight_matching(members, run.data, seed=run.seed)
    if name == "random":
        return initialize_member(members.member(0), run.seed, -1, trained=True)[0]
    raise EnfoldError(f"there is no network '{name}': use the label of an earlier step, or one of {', '.join(STARTS)}")


def _is_network_spec(run: SeedRun, step: StepSpec) -> bool:
    """Return whether `network:` of an ensemble step is an architecture, not a trained network."""
    if step.network is None or isinstance(step.network, dict):
        return step.network is not None
    return step.network not in (BEST, *(each.label for each in run.recipe.steps))


def _name(step: StepSpec) -> str:
    """The step in messages about exceptions, with its code."""
    code = ", ".join(each for each in code_in(step.model_dump(mode="json")))
    return f"step '{step.label}'{f' ({code})' if code else ''}"


def _title(run: SeedRun, step: StepSpec) -> str:
    return f"seed {run.seed}: {step.label}"


def check_step(run: SeedRun, step: StepSpec) -> None:
    """Check a step with untrained networks, before anything is trained.

    Raises:
        EnfoldError: If the options do not fit each other, the network or the data; the message names the step.
    """
    try:
        with reporting(_name(step), always=is_user_code(step)):
            if step.family == "ensemble":
                _check_ensemble(run, step)
            elif step.family == "merge":
                _check_merge(run, step)
            else:
                _check_distill(run, step)
    except UserCodeError:
        raise
    except EnfoldError as error:
        raise EnfoldError(f"step '{step.label}': {error}") from error


def trial_network(run: SeedRun, step: StepSpec) -> Callable[[], nn.Module]:
    """Return a factory of untrained networks with the architecture of an ensemble step."""
    return run.network_factory(step.network or "") if _is_network_spec(run, step) else run.make_network


def _check_ensemble(run: SeedRun, step: StepSpec) -> None:
    method = method_of(step)
    method.check(step.options)
    require_options(method, step.options)
    make = trial_network(run, step)
    if _is_network_spec(run, step):
        run.check_network(f"the network of '{step.label}'", make)

    def build() -> Ensemble:
        return build_ensemble(run, step, make())

    run.check_network(f"the ensemble '{step.label}'", build)
    ensemble = build()
    config = ensemble.configure(run.recipe.step_config(step, run.seed, run.device))
    planned = Fit(ensemble, run.data, config, ensemble.objective(config), None)
    if isinstance(run.data.train, Split):
        next(planned.order.batches(run.data, 0))


def _check_merge(run: SeedRun, step: StepSpec) -> None:
    method = method_of(step)
    options = method.check(step.options)
    require_options(method, options)
    if step.train and "config" not in method.inputs:
        raise EnfoldError("train settings need a merge function with the parameter config: remove train")
    if step.init is not None and "network" not in method.inputs:
        raise EnfoldError(f"'{step.method}' merges the members and has no init, got init={step.init}: remove it")
    if step.init is None and "network" in method.inputs:
        raise EnfoldError(f"'{step.method}' works on the network of an earlier step: add init: LABEL")
    reference, count = options.get("reference"), step.first or run.recipe.members
    if isinstance(reference, int) and not 0 <= reference < count:
        raise EnfoldError(f"reference must be the number of a member, 0 to {count - 1}, got {reference}: change it")


def _check_distill(run: SeedRun, step: StepSpec) -> None:
    """Run `distill` for no epoch on a few examples, with untrained members."""
    if not isinstance(run.data.train, Split):
        return
    if step.student is not None and not is_ensemble_student(step.student):
        _check_init(step)
        run.check_network(f"the student of '{step.label}'", run.network_factory(step.student))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        members = DeepEnsemble(run.make_network, run.recipe.members, seed=run.seed).eval()[: step.first]
        method = method_of(step)
        require_options(method, step.options)
        own, common = split_options(method, step.options)
        loss = method.target(**own)
        count = _count_students(loss, _trial_teacher(run, step, members), members)
        if count != members.num_members:
            members = DeepEnsemble(run.make_network, count, seed=run.seed).eval()
        init, student = _trial_start(run, step, loss, members)
        config = run.recipe.step_config(step, run.seed, run.device).replace(epochs=0, warmup_epochs=0)
        few = run.data.replace(train=run.data.train[:8])
        distill(
            members,
            few,
            loss=loss,
            init=init,
            student=student,
            perturb=make_perturbation(step.perturb),
            config=config,
            quiet=True,
            **common,
        )


def _trial_teacher(run: SeedRun, step: StepSpec, members: DeepEnsemble) -> nn.Module:
    """Return an untrained model with as many members as the teacher of a step has, as far as is known."""
    named = None if step.teacher is None else run.recipe.step(step.teacher)
    if named is None or named.family != "ensemble":
        return members
    return build_ensemble(run, named, trial_network(run, named)())


def _trial_start(run: SeedRun, step: StepSpec, loss: Any, members: DeepEnsemble) -> tuple[Any, Any]:
    """Return the same as `_start`, with an untrained network in place of the best member, merges and earlier steps."""
    known = step.init in ("random", "als") and step.init not in [each.label for each in run.recipe.steps]
    trial = step if known or step.init is None else step.model_copy(update={"init": "random"})
    return _start(run, trial.model_copy(update={"teacher": None}), loss, members, {}, members.num_members)
