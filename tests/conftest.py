"""One thread for all tests: two threads on a busy machine are slower and make timings erratic."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from enfold.members import choice

settings.register_profile("busy", deadline=None, max_examples=25)  # a busy machine is no failure
settings.load_profile("busy")
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))  # for the networks of zoo.py, which tests of several rooms share


def pytest_configure(config):
    """Tests of everything else judge calibration by handfuls of examples; test_calibration.py asks for the warning."""
    config.addinivalue_line("filterwarnings", "ignore:a calibration error in:UserWarning")
    config.addinivalue_line("markers", "engines: tries engines on each network, as users have it")


@pytest.fixture(autouse=True)
def _trusted_engines(request, monkeypatch):
    """Engines are tried on every network before they are used; outside of the tests of that, known networks pass."""
    if "members" not in request.path.parts and "engines" not in request.keywords:
        monkeypatch.setattr(choice, "require_no_memory", lambda *ignored: None)
        monkeypatch.setattr(choice, "passed", lambda engine, *ignored: engine)
