"""Verbs that train and fold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enfold.cli.options import (
    AsJson,
    Device,
    DryRun,
    Label,
    Out,
    Overrides,
    Resume,
    Run,
    Seeds,
    Settings,
    Trust,
    print_json,
    say,
)
from enfold.cli.show import draw, report, tell_members

if TYPE_CHECKING:
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
    """Train 4 members on data that ships with enfold, fold them, evaluate everything; three seeds, two minutes."""
    from importlib.resources import files

    from enfold.run import parse_recipe

    text = files("enfold.run").joinpath("demo.yaml").read_text(encoding="utf-8")
    changes = [*(overrides or ()), *([f"seeds={list(seeds)}"] if seeds else [])]
    recipe = parse_recipe(text, "the demo", changes)
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
) -> None:
    """Run a whole recipe: train members, fold them, evaluate everything.

    Killed at any moment, it goes on from there with --resume.
    """
    from enfold.run import read_recipe

    changes = [*(overrides or ()), *([f"seeds={list(seeds)}"] if seeds else [])]
    loaded, beside = read_recipe(recipe, changes), recipe.parent
    _run(loaded, out, device, resume=resume, as_json=as_json, dry_run=dry_run, beside=beside, trust_code=trust_code)


def train(
    out: Out,
    data: Annotated[str, typer.Option(help="A name (see `enfold data`), a path, or module:function.")] = "fashion-mini",
    network: Annotated[str, typer.Option(help="mlp, resnet20, ..., or file.py:function.")] = "mlp",
    members: Annotated[
        int | None, typer.Option(help="How many; 4, or of checkpoints the first so many: all if not given.")
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option(help="Members you have already, as a pattern of their files: none are trained.")
    ] = None,
    overrides: Overrides = None,
    seeds: Seeds = None,
    device: Device = "cpu",
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Train members into a new run directory, or bring yours; fold and evaluate them with the next verbs."""
    from enfold.run.override import apply_override
    from enfold.run.recipe import make_recipe

    content: dict[str, Any] = {"name": out.resolve().name, "data": {"source": data}, "network": network}
    given = {"members": members, "checkpoints": checkpoints}
    content |= {key: value for key, value in given.items() if value is not None}
    for change in [*(overrides or ()), *([f"seeds={list(seeds)}"] if seeds else [])]:
        apply_override(content, change)
    recipe = make_recipe(content, "the command line")
    _run(
        recipe,
        out,
        device,
        resume=resume,
        as_json=as_json,
        dry_run=dry_run,
        train_only=True,
        trust_code=trust_code,
    )


def share(
    run_directory: Run,
    method: Annotated[str, typer.Argument(help="A share; `enfold methods` lists them.")],
    label: Label = None,
    overrides: Settings = None,
    device: Device = "cpu",
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Train one more way to hold members in less space, or to draw them around one, beside a run's members.

    It has as many members as the run, but for methods with a number of their own (MIMO 3, snapshots 5, SWAG and
    subspaces 30, SWA 1): --set num_members=... changes it. `enfold methods NAME` explains the settings.
    """
    _add("share", run_directory, method, label, overrides, device, as_json=as_json, trust_code=trust_code)


def fold(
    run_directory: Run,
    method: Annotated[str, typer.Argument(help="A fold; `enfold methods` lists them.")],
    label: Label = None,
    overrides: Settings = None,
    device: Device = "cpu",
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Fold a run's members into one network and evaluate it beside its control."""
    _add("fold", run_directory, method, label, overrides, device, as_json=as_json, trust_code=trust_code)


def evaluate(
    run_directory: Run,
    figures: Annotated[
        bool, typer.Option("--figures", help="Also draw calibration, corruptions and sets from outside: RUN/figures.")
    ] = False,
    device: Device = "cpu",
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Evaluate every model that a run has on test data; what is there already is not computed again.

    What was interrupted is named and left as it is: `enfold run RUN/recipe.yaml RUN --resume` finishes it.
    """
    from enfold.cli.preflight import check_device, open_trusted
    from enfold.run import execute

    check_device(device)
    opened, recipe = open_trusted(run_directory, trust_code)
    with opened.writing():
        summary = execute(opened, recipe, device=device, only=())
        if figures:
            draw(opened.path)
        report(opened, summary, as_json)


def drop(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run.")],
    label: Annotated[str, typer.Argument(help="The name of its row: of a share or a fold, finished or interrupted.")],
    as_json: AsJson = False,
) -> None:
    """Remove one share or fold from a run: its weights, checkpoints, predictions and rows.

    Its control goes with it, unless another fold is compared with that too. Members, and all other models, stay as
    they are. There is no way back but making it again.
    """
    from enfold.run import RunDirectory, drop_method

    opened = RunDirectory.open(run_directory)
    with opened.writing():
        summary = drop_method(opened, label)
        say(f"enfold: '{label}' was dropped from {opened.path}", stderr=True)
        if summary is not None:
            report(opened, summary, as_json)
    if summary is None and as_json:
        print_json({"run": str(opened.path), "dropped": label})


def _add(
    room: str,
    run_directory: Path,
    method: str,
    label: str | None,
    overrides: list[str] | None,
    device: str,
    *,
    as_json: bool,
    trust_code: bool,
) -> None:
    from enfold.cli.preflight import check_device, open_trusted
    from enfold.run import add_method, execute
    from enfold.run.override import apply_override

    opened, _ = open_trusted(run_directory, trust_code)
    content: dict[str, Any] = {"method": method.replace("-", "_"), "label": label or method}
    for change in overrides or ():
        apply_override(content, change)
    check_device(device)
    with opened.writing():
        recipe = add_method(opened, room, content, device=device)
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
) -> None:
    from enfold.cli.preflight import check_device, tell_code
    from enfold.run import RunDirectory
    from enfold.run.execute import cells

    check_device(device)
    place = RunDirectory(out, beside, trust_code=trust_code)
    tell_code(place, recipe)
    cells(place, recipe, device)[0].check()
    if dry_run:
        from enfold.run.estimate import estimate

        found = estimate(recipe, device, beside, trust_code=trust_code)
        print_json(dataclasses.asdict(found)) if as_json else say(str(found))
        return
    with place.writing():
        opened = RunDirectory.create(out, recipe, resume=resume, beside=beside, trust_code=trust_code)
        _make(opened, recipe, device, as_json, train_only)


def _make(opened: RunDirectory, recipe: Recipe, device: str, as_json: bool, train_only: bool) -> None:
    from enfold.run import execute
    from enfold.run.execute import brought, train

    if train_only or recipe.checkpoints is not None:
        train(opened, opened.recipe(), device=device)
        tell_members(recipe, files := brought(opened, opened.recipe(), device=device))
    if not train_only:
        report(opened, execute(opened, opened.recipe(), device=device), as_json)
    elif as_json:
        told = {"run": str(opened.path), "members": recipe.members, "seeds": list(recipe.seeds)}
        print_json({**told, **files})
    else:
        verbs = (("fold", opened.path, "kd"), ("share", opened.path, "batch_ensemble"))
        fold, share = (recipe.command(*verb) for verb in verbs)
        say(f"members in {opened.path}: go on with  {fold}  or  {share}")
