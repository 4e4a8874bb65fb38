"""One thread for all tests: two threads on a busy machine are slower and make timings erratic."""

import torch

torch.set_num_threads(1)
