"""Training: the one loop, its plan, its checkpoints."""

from enfold.train.follow import Follower
from enfold.train.history import Epoch, History
from enfold.train.loop import fit
from enfold.train.objective import CrossEntropy, Objective
from enfold.train.plan import Plan
from enfold.train.trajectory import Trajectory

__all__ = ["CrossEntropy", "Epoch", "Follower", "History", "Objective", "Plan", "Trajectory", "fit"]
