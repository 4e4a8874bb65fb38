"""Training: one loop, its settings and its checkpoints."""

from enfold.train.config import TrainConfig
from enfold.train.fit import fit
from enfold.train.history import Epoch, History
from enfold.train.objective import Objective, TaskLoss, cross_entropy
from enfold.train.trajectory import Trajectory

__all__ = ["Epoch", "History", "Objective", "TaskLoss", "TrainConfig", "Trajectory", "cross_entropy", "fit"]
