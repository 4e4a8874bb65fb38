"""Write the goldens, or look how far they move.

python -m tests.goldens.record [PREFIX]            write all cases, or those that begin so; not the demo
python -m tests.goldens.record demo                write the table of the demo, which takes two minutes
python -m tests.goldens.record --spread [PREFIX]   compare with runs with 2 threads and without oneDNN; write nothing
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from . import adapter, golden
from .cases import Case, cases


def computed(case: Case) -> dict[str, object]:
    """Run a case without the progress of its trainings."""
    with redirect_stderr(io.StringIO()):
        return case.run()


def record(chosen: list[Case], prefix: str) -> None:
    """Compute and write, and say what took longest."""
    found, seconds = {}, {}
    for case in chosen:
        started = time.process_time()
        found[case.name] = computed(case)
        seconds[case.name] = time.process_time() - started
    if prefix:
        areas = {name.partition("/")[0] for name in found}
        found = {f"{area}/{name}": values for area in areas for name, values in golden.read(area).items()} | found
    sizes = golden.write(found)
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:5]:
        print(f"{seconds[name]:6.2f} s  {name}")
    for method in adapter.unlisted():
        print(f"no golden uses {method}: add it to a table of adapter.py")
    print(f"{len(chosen)} cases in {sum(seconds.values()):.1f} s, {sum(sizes.values()):,} bytes")


@contextmanager
def variation(threads: int, onednn: bool) -> Iterator[None]:
    """Compute in another order of additions."""
    torch.set_num_threads(threads)
    torch._C._set_mkldnn_enabled(onednn)
    adapter.members.cache_clear()
    adapter.finetuned.cache_clear()
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)
        torch.set_num_threads(1)


def spread(chosen: list[Case]) -> None:
    """Print the largest relative deviation of each case where it is above a tenth of the tolerance."""
    for threads, onednn in ((1, False), (2, True), (2, False)):
        print(f"{threads} threads, oneDNN {'on' if onednn else 'off'}:", flush=True)
        with variation(threads, onednn):
            for case in chosen:
                area, _, name = case.name.partition("/")
                deviations = golden.compare(golden.read(area)[name], computed(case))
                largest = max(deviations, key=lambda each: each.relative)
                if largest.relative > case.tolerance / 10:
                    print(f"  {largest.relative:.1e} of {case.tolerance:.0e}  {case.name}  {largest}", flush=True)


def main(arguments: list[str]) -> None:
    """Do what the arguments say."""
    torch.set_num_threads(1)
    prefix = next((each for each in arguments if not each.startswith("-")), "")
    chosen = [case for case in cases() if case.name.startswith(prefix)]
    if prefix == "demo":
        with TemporaryDirectory() as folder:
            golden.write({"demo/table": golden.summarize(adapter.demo(Path(folder) / "demo"))})
    elif "--spread" in arguments:
        spread(chosen)
    else:
        record(chosen, prefix)


if __name__ == "__main__":
    main(sys.argv[1:])
