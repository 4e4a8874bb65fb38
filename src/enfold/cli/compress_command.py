"""The command that finds the network to ship in place of a run's members, or of checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enfold.cli.options import AsJson, Device, Seed, Trust, print_json, say
from enfold.errors import EnfoldError

if TYPE_CHECKING:
    from enfold.compress import Compression

OF_CHECKPOINTS = ("--network", "--data", "--key", "--task")


def compress(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|CHECKPOINT...",
            help="A run with trained members; or files, folders or quoted patterns of checkpoints of any tool.",
        ),
    ],
    network: Annotated[
        str | None, typer.Option(help="Of checkpoints: their network, mlp, resnet20, ..., or file.py:function.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Of checkpoints: a name (see `enfold data`), a path, or module:function.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Of checkpoints: the key or the prefix of names to read, such as state_dict_ema.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="Of checkpoints: classification, binary, multilabel or regression; inferred by default."),
    ] = None,
    budget: Annotated[str, typer.Option(help="Largest cost of a prediction relative to one member.")] = "1x",
    time: Annotated[
        str | None, typer.Option(help="Limit of the search, such as 30m; epochs are shortened to fit.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs of the final training; by default those of the run.")
    ] = None,
    student: Annotated[
        str | None, typer.Option(help="Another network to distil into: mlp, resnet20, ..., or file.py:function.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Largest size relative to one member, such as 1.5x; no limit by default.")
    ] = None,
    train_longer: Annotated[
        bool, typer.Option("--train-longer", help="Train the members longer first if that helps a member more.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the trainings: --set lr=1e-3; `enfold methods train` lists them."),
    ] = None,
    seed: Seed = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder; by default compress/ of the run, or of the current folder.")
    ] = None,
    device: Device = "cpu",
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Find the single network to ship in place of trained members, and explain the choice.

    Members are diagnosed, merges and distillations are tried, and the best on validation examples is written beside a
    report. An interrupted search continues.

    **Examples**

        enfold compress runs/mine

        enfold compress runs/mine --time 30m --epochs 40

        enfold compress runs/mine --budget 0.5x --student small.py:make --trust-code

        enfold compress 'models/*.ckpt' --network nets.py:make --data cifar10 --epochs 40 --trust-code
    """
    from enfold.cli.preflight import check_device

    check_device(device)
    given = dict(zip(OF_CHECKPOINTS, (network, data, key, task), strict=True))
    named = [name for name, value in given.items() if value is not None]
    changes = _settings(settings, epochs)
    options = {"budget": budget, "memory": memory, "time": time, "train_longer": train_longer}
    if not named and len(sources) == 1:
        about, folder, result = _of_run(Path(sources[0]), seed, student, out, device, options, changes, trust_code)
    else:
        _check(sources, given, named, seed)
        about, folder, result = _of_checkpoints(sources, given, student, out, device, options, changes, trust_code)
    if as_json:
        print_json({**about, **result.as_dict()})
        return
    say(str(result))
    say(f"written to {folder}: network.safetensors, report.html, compress.json")


def _settings(given: list[str] | None, epochs: int | None) -> dict[str, Any]:
    """Return the settings of trainings that the command changes."""
    from enfold.run.override import apply_override

    found: dict[str, Any] = {}
    for change in given or ():
        apply_override(found, change)
    return found if epochs is None else {**found, "epochs": epochs}


def _check(sources: list[str], given: dict[str, str | None], named: list[str], seed: int | None) -> None:
    """Refuse options of checkpoints for runs, and options of runs for checkpoints."""
    runs = [source for source in sources if (Path(source) / "run.json").is_file()]
    if runs and named:
        raise EnfoldError(f"{named[0]} is for checkpoints, got the run '{runs[0]}', which has it: remove {named[0]}")
    if runs:
        raise EnfoldError(f"one run can be compressed at a time, got {len(sources)} paths: pass one of them")
    if seed is not None:
        raise EnfoldError(f"--seed is for runs, got checkpoints: pass --set seed={seed} for another order of examples")
    for name in ("--network", "--data"):
        if given[name] is None:
            raise EnfoldError(f"{name} must be given for checkpoints, got none: add for example {_EXAMPLES[name]}")


_EXAMPLES = {"--network": "--network nets.py:make --trust-code", "--data": "--data cifar10"}


def _of_run(
    path: Path,
    seed: int | None,
    student: str | None,
    out: Path | None,
    device: str,
    options: dict[str, Any],
    changes: dict[str, Any],
    trust_code: bool,
) -> tuple[dict[str, Any], Path, Compression]:
    from enfold.cli.preflight import open_trusted
    from enfold.compress import compress as search
    from enfold.run.analyses import home
    from enfold.run.execute import find_seed
    from enfold.run.lock import writing

    opened, recipe = open_trusted(path, trust_code)
    chosen = find_seed(opened, recipe, seed, device)
    config = recipe.members_config(chosen.seed, device).update(changes)
    folder = home("compress", chosen, out)
    make = None if student is None else chosen.network_factory(student)
    with writing(opened.path if out is None else out):
        result = search(chosen.members(), chosen.data, student=make, folder=folder / "trials", config=config, **options)
        result.save(folder)
    return {"run": str(opened.path), "seed": chosen.seed}, folder, result


def _of_checkpoints(
    sources: list[str],
    given: dict[str, str | None],
    student: str | None,
    out: Path | None,
    device: str,
    options: dict[str, Any],
    changes: dict[str, Any],
    trust_code: bool,
) -> tuple[dict[str, Any], Path, Compression]:
    from enfold.cli.preflight import show_references
    from enfold.compress import compress as search
    from enfold.data import load
    from enfold.ensembles.deep_ensemble import DeepEnsemble
    from enfold.io.usercode import is_reference, looking_in
    from enfold.networks import factory
    from enfold.run.lock import writing
    from enfold.run.outputs import count_outputs, make_task
    from enfold.train import TrainConfig

    folder = Path("compress") if out is None else out
    config = TrainConfig(device=device).update(changes)
    with ExitStack() as stack:
        stack.enter_context(looking_in([Path()], trusted=trust_code))
        texts = [text for text in (given["--network"], given["--data"], student) if text is not None]
        show_references([text for text in texts if is_reference(text) and not Path(text).exists()])
        data = load(str(given["--data"]))
        task = make_task(given["--task"])
        number = count_outputs(data, task)
        members = DeepEnsemble.from_checkpoints(
            sources, factory(str(given["--network"]), data.shape, number), key=given["--key"]
        )
        make = None if student is None else factory(student, data.shape, number)
        stack.enter_context(writing(folder))
        result = search(members, data, student=make, task=task, folder=folder / "trials", config=config, **options)
        result.save(folder)
    return {"checkpoints": sources, "members": members.num_members}, folder, result
