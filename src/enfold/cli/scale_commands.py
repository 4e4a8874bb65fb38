"""Runs that are divided among processes and machines."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enfold.cli.options import AsJson, Device, Run, Trust, say
from enfold.cli.output import report
from enfold.errors import EnfoldError

if TYPE_CHECKING:
    from enfold.executors import Parallel
    from enfold.run import Recipe, RunDirectory

SCRIPT = """\
#!/bin/bash
# Members first, then steps, then the table. Submit it with  bash submit.sh  on a machine of the cluster.
# Edit the resources; nothing is lost if a job ends early: submit the script again.
set -e
resources=(--cpus-per-task=4 --mem=8G --time=24:00:00)
shards=({name} --parsable --array=1-{count} "${{resources[@]}}")
members=$(sbatch "${{shards[@]}}" --wrap {shard})
steps=$(sbatch "${{shards[@]}}" --dependency="afterany:$members" --wrap {shard})
sbatch {name} "${{resources[@]}}" --dependency="afterok:$steps" --wrap {gather}"""
OWN = ("--print-sbatch", "--shard")


def parallel_of(
    executor: str | None,
    workers: int | None,
    threads: int | None,
    block_size: int,
    address: str | None,
    *,
    is_shard: bool,
) -> Parallel | None:
    """Return the options of an executor that were given; None if neither an executor nor a shard was."""
    from enfold.executors import Parallel

    if executor is None and not is_shard:
        given = {"--workers": workers, "--threads": threads, "--address": address}
        given["--block-size"] = None if block_size == 1 else block_size
        wrong = [name for name, value in given.items() if value is not None]
        if wrong:
            raise EnfoldError(f"{wrong[0]} is an option of --executor, got none: add for example --executor local")
        return None
    return Parallel(executor or "serial", workers, threads, block_size, address=address)


def make_cells(opened: RunDirectory, device: str, parallel: Parallel | None) -> None:
    """Make all models of a run on an executor; what is evaluated afterwards is stored then."""
    from enfold.run.cells import Cells, has_blocks

    if parallel is None:
        if has_blocks(opened):
            raise EnfoldError(
                f"'{opened.path}' was started with --executor or --shard, got neither: add --executor serial"
            )
        return
    cells = Cells(opened, opened.recipe(), parallel, device)
    cells.make()
    cells.remove_blocks()


def make_shard(
    recipe: Recipe,
    out: Path,
    device: str,
    parallel: Parallel,
    shard: str,
    *,
    beside: Path,
    trust_code: bool,
) -> None:
    """Make one shard of a run, and print what is left of the run."""
    from enfold.cli.preflight import check_device, show_code
    from enfold.run import RunDirectory
    from enfold.run.cells import Cells, Shard
    from enfold.run.execute import seed_runs

    own = Shard.parse(shard)
    check_device(device)
    place = RunDirectory(out, beside, trust_code=trust_code)
    place.require_trust(recipe)
    show_code(place, place.code(recipe))
    seed_runs(place, recipe, device)[0].check()
    opened = RunDirectory.join(out, recipe, beside=beside, trust_code=trust_code)
    left = Cells(opened, opened.recipe(), parallel, device).make(own)
    if not left:
        say(f"all parts of {out} are made: evaluate them with  {recipe.command('gather', out)}")
        return
    say(f"shard {shard} of {out} is made; {len(left)} parts of the run are left: {_some(left)}")
    if any("member" in each for each in left):
        say("the steps of a seed need all of its members: run the shards once more when these are made")


def gather(
    run_directory: Run,
    device: Device = "cpu",
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Evaluate a run whose parts were made with `enfold run --shard`, and print its table.

    It trains nothing: missing parts are an error that names them.

    **Examples**

        enfold gather runs/mine
    """
    import json

    from enfold.cli.preflight import check_device, show_code
    from enfold.executors import Parallel
    from enfold.run import RunDirectory, execute
    from enfold.run.cells import FOLDER, SETTINGS, Cells

    check_device(device)
    opened = RunDirectory.open(run_directory, trust_code=trust_code)
    recipe = opened.recipe()
    opened.require_trust(recipe)
    show_code(opened, opened.code(recipe))
    settings = opened.path / FOLDER / SETTINGS
    size = json.loads(settings.read_text(encoding="utf-8"))["block_size"] if settings.is_file() else 1
    with opened.writing():
        cells = Cells(opened, recipe, Parallel("serial", block_size=size), device)
        missing = cells.missing()
        if missing:
            raise EnfoldError(
                f"all parts of a run must be made before it is evaluated, but {len(missing)} are missing in "
                f"'{opened.path}', {_some(missing)}: run its shards again"
            )
        opened.prepare()
        cells.make()  # puts the members together
        summary: dict[str, Any] = execute(opened, recipe, device=device)
        cells.remove_blocks()
        report(opened, summary, as_json)


def sbatch_script(words: Sequence[str], recipe: Recipe, out: Path, count: int) -> str:
    """Return a script that submits a run in shards to SLURM.

    Args:
        words: The words of the command line.
        recipe: The recipe.
        out: The folder of the run.
        count: The number of shards.
    """
    if count < 1:
        raise EnfoldError(f"--print-sbatch must be the number of shards, got {count}: write for example 8")
    kept, skip = [], False
    for word in words:
        if not skip and not word.startswith(tuple(f"{name}=" for name in OWN)) and word not in OWN:
            kept.append(word)
        skip = word in OWN
    shard = f"{shlex.join(['enfold', *kept])} --shard $SLURM_ARRAY_TASK_ID/{count}"
    return SCRIPT.format(
        name=shlex.quote(f"--job-name={recipe.name}"),
        count=count,
        shard=shlex.quote(shard),
        gather=shlex.quote(recipe.command("gather", out)),
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
