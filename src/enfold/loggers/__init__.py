"""Loggers: settings and metrics of trainings in TensorBoard, Weights & Biases or MLflow, or in an object of your own.

    enfold.fit(ensemble, train, val, logger="tensorboard")
    enfold.distill(ensemble, train, val, logger=[WandB("digits"), MyLogger()])

The packages are optional; each is imported when its logger is made.
"""

from enfold.loggers.log import Log, LoggerLike, LoggerWarning, as_log, with_log
from enfold.loggers.logger import Logger
from enfold.loggers.mlflow import MLflow
from enfold.loggers.tensorboard import TensorBoard
from enfold.loggers.wandb import WandB

__all__ = ["Log", "Logger", "LoggerLike", "LoggerWarning", "MLflow", "TensorBoard", "WandB", "as_log", "with_log"]
