"""Training: the one loop, its plan, its checkpoints."""

from enfold.train.config import TrainConfig
from enfold.train.history import Epoch, History
from enfold.train.loop import fit
from enfold.train.objective import CrossEntropy, Objective
from enfold.train.trajectory import Trajectory

__all__ = ["CrossEntropy", "Epoch", "History", "Objective", "TrainConfig", "Trajectory", "fit"]
