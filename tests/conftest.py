"""One thread for all tests: two threads on a busy machine are slower and make timings erratic."""

import gc
import os
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; processes that tests start have it too
import pytest
import torch
import typer.main
from hypothesis import settings

settings.register_profile("busy", deadline=None, max_examples=25)  # a busy machine is not a failure
settings.load_profile("busy")
torch.set_num_threads(1)
for absent in (torch.cuda, torch.xpu, torch.mtia):
    if not absent.is_available():  # torch would store a stack trace for each seed, which is slow
        absent.manual_seed_all = lambda seed: None
typer.main.get_command = cache(typer.main.get_command)  # every test of the command line would build all commands
sys.path.insert(0, str(Path(__file__).parent))  # for the helper modules in this folder


def pytest_configure(config):
    """Ignore warnings about few examples for a calibration error, except in test_calibration.py."""
    config.addinivalue_line("filterwarnings", "ignore:a calibration error with:UserWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test with `combinations` run as many as contain every value of every parameter; the others are slow."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("combinations") and not item.get_closest_marker("slow"):
            tests[item.nodeid.split("[")[0]].append(item)
    for combinations in tests.values():
        for item in set(combinations) - set(cover(combinations)):
            item.add_marker(pytest.mark.slow)


def cover(items):
    """Return items that contain each value of each parameter, chosen one after the other, rarely used values first."""
    values = {item: [(name, id(value)) for name, value in item.callspec.params.items()] for item in items}
    uses, chosen = Counter(), []

    def gain(item):
        counts = [uses[value] for value in values[item]]
        return counts.count(0), -sum(counts)

    while any(not uses[value] for each in values.values() for value in each):
        chosen.append(max(items, key=gain))
        uses.update(values[chosen[-1]])
    return chosen


def pytest_collection_finish():
    """Exclude everything that is imported from garbage collection, and collect less often than by default."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
