"""One thread for all tests: two threads on a busy machine are slower and make timings erratic."""

import gc
import os
import sys
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; processes that tests start have it too
import torch
import typer.main
from hypothesis import settings

settings.register_profile("busy", deadline=None, max_examples=25)  # a busy machine is no failure
settings.load_profile("busy")
torch.set_num_threads(1)
for absent in (torch.cuda, torch.xpu, torch.mtia):
    if not absent.is_available():  # a seed waits there with a trace of the stack: a tenth of the time of all tests
        absent.manual_seed_all = lambda seed: None
typer.main.get_command = cache(typer.main.get_command)  # every test of the command line would build all commands
sys.path.insert(0, str(Path(__file__).parent))  # for the networks of zoo.py, which tests of several rooms share


def pytest_configure(config):
    """Tests of everything else judge calibration by handfuls of examples; test_calibration.py asks for the warning."""
    config.addinivalue_line("filterwarnings", "ignore:a calibration error with:UserWarning")


def pytest_collection_finish():
    """What was imported stays, so the garbage collector excludes it; it runs less often than by default."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
