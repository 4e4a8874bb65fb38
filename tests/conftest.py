"""One thread for all tests: two threads on a busy machine are slower and make timings erratic."""

import sys
from pathlib import Path

import torch
from hypothesis import settings

settings.register_profile("busy", deadline=None)  # a busy machine is no failure
settings.load_profile("busy")
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))  # for the networks of zoo.py, which tests of several rooms share
