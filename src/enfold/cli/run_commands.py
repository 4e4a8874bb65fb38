"""Commands that train, distill, merge and evaluate."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enfold.cli.options import (
    Address,
    AsJson,
    BlockSize,
    ClusterName,
    Device,
    DryRun,
    ExecutorName,
    Label,
    MethodName,
    Options,
    Out,
    Overrides,
    PrintSbatch,
    Resume,
    Run,
    Seeds,
    ShardOption,
    Threads,
    Trust,
    Workers,
    print_json,
    say,
)
from enfold.cli.output import draw, report, show_members, show_theory, show_unfinished
from enfold.errors import EnfoldError

if TYPE_CHECKING:
    from enfold.executors import Parallel
    from enfold.run import Recipe, RunDirectory


def demo(
    out: Annotated[Path, typer.Argument(help="The run directory.")] = Path("runs/demo"),
    overrides: Overrides = None,
    seeds: Seeds = None,
    device: Device = "cpu",
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Train 4 members on data that ships with enfold, merge and distill them, evaluate all models.

    Three seeds, about two minutes on two cores.

    **Examples**

        enfold demo

        enfold demo runs/quick --seed 0 --set train.epochs=4
    """
    from importlib.resources import files

    from enfold.run import parse_recipe

    text = files("enfold.run").joinpath("demo.yaml").read_text(encoding="utf-8")
    recipe = parse_recipe(text, "the demo", _changes(overrides, seeds))
    _run(recipe, out, device, resume=resume, as_json=as_json, dry_run=dry_run, trust_code=trust_code)


def run(
    recipe: Annotated[Path, typer.Argument(help="A YAML file; see recipes/ for examples.")],
    out: Out,
    overrides: Overrides = None,
    seeds: Seeds = None,
    device: Device = "cpu",
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    trust_code: Trust = False,
    executor: ExecutorName = None,
    workers: Workers = None,
    threads: Threads = None,
    block_size: BlockSize = 1,
    address: Address = None,
    shard: ShardOption = None,
    print_sbatch: PrintSbatch = None,
    cluster: ClusterName = None,
) -> None:
    """Run a recipe: train members, carry out its steps, evaluate all models.

    An interrupted run continues with --resume to the same bits. --executor and --shard divide it among processes and
    machines (docs/scale.md).

    **Examples**

        enfold run recipes/fashion-mlp.yaml runs/fashion --dry-run

        enfold run recipes/fashion-mlp.yaml runs/fashion --dry-run --cluster 8xA100

        enfold run recipes/fashion-mlp.yaml runs/fashion --seed 0 --set train.epochs=5

        enfold run mine.yaml runs/mine --trust-code

        enfold run mine.yaml runs/mine --executor local --workers 4 --threads 8

        enfold run mine.yaml runs/mine --shard 1/8

        enfold run mine.yaml runs/mine --print-sbatch 8 > submit.sh
    """
    from enfold.cli.scale_commands import make_shard, parallel_of, sbatch_script
    from enfold.run import read_recipe

    parallel = parallel_of(executor, workers, threads, block_size, address, is_shard=shard is not None)
    loaded = read_recipe(recipe, _changes(overrides, seeds), trust_code=trust_code)
    if print_sbatch is not None:
        say(sbatch_script(sys.argv[1:], loaded, out, print_sbatch))
        return
    where: dict[str, Any] = {"beside": recipe.parent, "trust_code": trust_code}
    if shard is not None and parallel is not None:
        make_shard(loaded, out, device, parallel, shard, **where)
        return
    if cluster is not None and not dry_run:
        raise EnfoldError("--cluster is an option of --dry-run, got a run: add --dry-run")
    where["cluster"] = cluster
    _run(loaded, out, device, resume=resume, as_json=as_json, dry_run=dry_run, parallel=parallel, **where)


def train(
    out: Annotated[Path, typer.Argument(metavar="RUN", help="A new run directory; with METHOD an existing run.")],
    method: Annotated[
        str | None, typer.Argument(help="An ensemble method to add to RUN; METHOD --help shows its options.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A name (see `enfold data`), a path, or module:function. [fashion-mini]")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(help="mlp, resnet20, ..., or file.py:function [mlp]. With METHOD also best_member or a label."),
    ] = None,
    members: Annotated[int | None, typer.Option(help="Number of members; 4, or the number of checkpoints.")] = None,
    checkpoints: Annotated[
        str | None, typer.Option(help="Pattern of files with trained members, which are used instead of training.")
    ] = None,
    label: Label = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A value of the recipe: train.epochs=5; with METHOD an option of it: rank=2. `enfold methods train` "
            "lists the training settings.",
        ),
    ] = None,
    seeds: Seeds = None,
    device: Device = "cpu",
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Train members into a new run, or add an efficient ensemble to a run.

    With METHOD, one ensemble of that method is trained and evaluated beside the members. It has as many members as the
    run, except for methods with a published number (MIMO 3, snapshot ensembles 5, SWAG 30): --set num_members=8 changes
    it. `enfold methods METHOD` describes the options.

    **Examples**

        enfold train runs/mine --data cifar10 --network resnet20 --members 4 --set train.epochs=20

        enfold train runs/mine --network nets.py:make_net --checkpoints 'models/*.pt' --trust-code

        enfold train runs/mine batch-ensemble --set rank=2

        enfold train runs/mine lora-ensemble --network best_member --label lora
    """
    from enfold.run.override import apply_override
    from enfold.run.recipe import make_recipe

    if method is not None:
        given = {"--data": data, "--members": members, "--checkpoints": checkpoints, "--seed": seeds}
        wrong = [name for name, value in given.items() if value is not None]
        if wrong or resume or dry_run:
            name = wrong[0] if wrong else "--resume" if resume else "--dry-run"
            raise EnfoldError(f"{name} is an option of a new run, but METHOD adds to a run: remove {name}")
        added = {} if network is None else {"network": network}
        _add("ensemble", out, method, label, added, overrides, device, as_json=as_json, trust_code=trust_code)
        return
    if label is not None:
        raise EnfoldError("--label names the row of a METHOD, got no METHOD: remove --label")
    content: dict[str, Any] = {"name": out.resolve().name}
    content |= {"data": {"source": data or "fashion-mini"}, "network": network or "mlp"}
    optional = {"members": members, "checkpoints": checkpoints}
    content |= {key: value for key, value in optional.items() if value is not None}
    changes = {apply_override(content, change): f"--set {change}" for change in _changes(overrides, seeds)}
    recipe = make_recipe(content, "the command line", overrides=changes)
    _run(recipe, out, device, resume=resume, as_json=as_json, dry_run=dry_run, train_only=True, trust_code=trust_code)


def distill(
    run_directory: Run,
    method: MethodName = "kd",
    label: Label = None,
    init: Annotated[
        str | None,
        typer.Option(
            help="What the student starts from: best_member, random, average, matched, als, or a step's label."
        ),
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="The label of a step; the members by default.")] = None,
    student: Annotated[
        str | None, typer.Option(help="Another network, or an ensemble as '{method: batch_ensemble, rank: 2}'.")
    ] = None,
    perturb: Annotated[str | None, typer.Option(help="A perturbation of the inputs, such as tdiv_sdiv.")] = None,
    overrides: Options = None,
    device: Device = "cpu",
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Distill the members of a run into one network, and evaluate it beside its control.

    **Examples**

        enfold distill runs/mine kd --set temperature=4 --set train.epochs=20

        enfold distill runs/mine kd --init matched --label from-matched

        enfold distill runs/mine latent-be --perturb conf_ods

        enfold distill runs/mine one-to-one --student '{method: batch_ensemble, rank: 2}'

        enfold distill runs/mine mine.py:MyLoss --trust-code
    """
    from enfold.run.yaml_text import read_yaml

    given = {"init": init, "teacher": teacher, "student": student, "perturb": perturb}
    added = {key: read_yaml(text) for key, text in given.items() if text is not None}
    _add("distill", run_directory, method, label, added, overrides, device, as_json=as_json, trust_code=trust_code)


def merge(
    run_directory: Run,
    method: MethodName = "weight_matching",
    label: Label = None,
    init: Annotated[str | None, typer.Option(help="repair: the label of the step whose network is repaired.")] = None,
    first: Annotated[int | None, typer.Option(help="Merge the first members only.")] = None,
    overrides: Options = None,
    device: Device = "cpu",
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Merge the weights of a run's members into one network, and evaluate it.

    **Examples**

        enfold merge runs/mine weight-matching --label matched

        enfold merge runs/mine repair --init matched

        enfold merge runs/mine perm-avg --set order=joint --set train.epochs=5

        enfold merge runs/mine mine.py:my_merge --trust-code
    """
    added = {key: value for key, value in {"init": init, "first": first}.items() if value is not None}
    _add("merge", run_directory, method, label, added, overrides, device, as_json=as_json, trust_code=trust_code)


def evaluate(
    run_directory: Run,
    figures: Annotated[
        bool, typer.Option("--figures", help="Also draw calibration, corruptions and OOD detection to RUN/figures.")
    ] = False,
    theory: Annotated[
        bool,
        typer.Option(
            "--theory",
            help="Also print votes, Jensen's gap, Masegosa's variance and the rank-one defect of all ensembles.",
        ),
    ] = False,
    device: Device = "cpu",
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Evaluate all models of a run on test data; stored results are not computed again.

    Steps that were interrupted are listed; `enfold run RUN/recipe.yaml RUN --resume` finishes them.

    **Examples**

        enfold evaluate runs/demo

        enfold evaluate runs/demo --json

        enfold evaluate runs/demo --figures

        enfold evaluate runs/demo --theory
    """
    from enfold.cli.preflight import check_device, open_trusted
    from enfold.run import execute

    check_device(device)
    opened, recipe = open_trusted(run_directory, trust_code)
    with opened.writing():
        summary = execute(opened, recipe, device=device, only=())
        if figures:
            draw(opened.path)
        if theory:
            from enfold.run.theory import theory_rows

            summary = {**summary, "theory": theory_rows(opened, recipe, device)}
        report(opened, summary, as_json)
        if theory and not as_json:
            show_theory(summary["theory"])


def drop(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run.")],
    label: Annotated[str, typer.Argument(help="The label of a step, finished or interrupted.")],
    as_json: AsJson = False,
) -> None:
    """Remove a step from a run: its weights, checkpoints, predictions and rows.

    Its control is removed too, unless another step has the same one. All other models are left unchanged.

    **Examples**

        enfold drop runs/mine batch-ensemble
    """
    from enfold.run import RunDirectory, drop_step

    opened = RunDirectory.open(run_directory)
    with opened.writing():
        summary = drop_step(opened, label)
        say(f"enfold: '{label}' was removed from {opened.path}", stderr=True)
        if summary is not None:
            report(opened, summary, as_json)
    if summary is None and as_json:
        print_json({"run": str(opened.path), "dropped": label})


def _changes(overrides: list[str] | None, seeds: list[int] | None) -> list[str]:
    return [*(overrides or ()), *([f"seeds={list(seeds)}"] if seeds else [])]


def _add(
    family: str,
    run_directory: Path,
    method: str,
    label: str | None,
    given: dict[str, Any],
    overrides: list[str] | None,
    device: str,
    *,
    as_json: bool,
    trust_code: bool,
) -> None:
    """Add a step to a run and evaluate it."""
    from enfold.cli.preflight import check_device, open_trusted, show_code
    from enfold.io.usercode import is_reference
    from enfold.run import add_step, execute
    from enfold.run.override import apply_override
    from enfold.run.recipe_checks import code_in
    from enfold.run.specs import default_label

    opened, recipe = open_trusted(run_directory, trust_code)
    name = method if is_reference(method) else method.replace("-", "_")
    content: dict[str, Any] = {"method": name, "label": label or default_label({"method": method}), "family": family}
    content |= given
    given_by = {apply_override(content, change): f"--set {change}" for change in overrides or ()}
    check_device(device)
    if trust_code:
        show_code(opened, [each for each in code_in(content) if each not in opened.code(recipe)])
    with opened.writing():
        recipe = add_step(opened, content, device=device, overrides=given_by)
        report(opened, execute(opened, recipe, device=device, only=[content["label"]]), as_json)


def _run(
    recipe: Recipe,
    out: Path,
    device: str,
    *,
    resume: bool,
    as_json: bool = False,
    dry_run: bool = False,
    train_only: bool = False,
    beside: Path | None = None,
    trust_code: bool = False,
    parallel: Parallel | None = None,
    cluster: str | None = None,
) -> None:
    from enfold.cli.preflight import check_device, show_code
    from enfold.cli.scale_commands import make_cells
    from enfold.run import RunDirectory
    from enfold.run.execute import seed_runs

    check_device(device)
    place = RunDirectory(out, beside, trust_code=trust_code)
    place.require_trust(recipe)
    show_code(place, place.code(recipe))
    seed_runs(place, recipe, device)[0].check()
    if cluster is not None:
        from enfold.run.cluster import Cluster, estimate_on_cluster

        there = estimate_on_cluster(recipe, Cluster.parse(cluster), place)
        print_json(there.as_dict()) if as_json else say(str(there))
        return
    if dry_run:
        from enfold.run.estimate import estimate

        found = estimate(recipe, device, beside, trust_code=trust_code)
        print_json(dataclasses.asdict(found)) if as_json else say(str(found))
        return
    with place.writing():
        opened = RunDirectory.create(out, recipe, resume=resume, beside=beside, trust_code=trust_code)
        changed = opened.changed_environment() if resume else ""
        if changed:
            say(f"enfold: the run was started with other {changed}", stderr=True)
            opened.log("resumed", changed=changed)
        make_cells(opened, device, parallel)
        try:
            _execute(opened, recipe, device, as_json, train_only)
        except EnfoldError:
            show_unfinished(opened)
            raise


def _execute(opened: RunDirectory, recipe: Recipe, device: str, as_json: bool, train_only: bool) -> None:
    from enfold.run import execute
    from enfold.run.execute import describe_checkpoints, train

    files: dict[str, Any] = {}
    if train_only or recipe.checkpoints is not None:
        train(opened, opened.recipe(), device=device)
        show_members(recipe, files := describe_checkpoints(opened, opened.recipe(), device=device))
    if not train_only:
        report(opened, execute(opened, opened.recipe(), device=device), as_json)
    elif as_json:
        print_json({"run": str(opened.path), "members": recipe.members, "seeds": list(recipe.seeds), **files})
    else:
        verbs = (("distill", opened.path, "kd"), ("merge", opened.path, "weight_matching"))
        commands = "  or  ".join(recipe.command(*verb) for verb in verbs)
        say(f"members in {opened.path}: continue with  {commands}")
