"""Boosting: networks are trained one after the other, each with more weight on the examples that earlier ones miss.

    w_n = 1/N at the start; then for m = 1 ... M:
    f_m   trained with the weights w                                                                   (1)
    e_m   = Σ_n w_n 1[f_m(x_n) ≠ y_n],   Σ_n w_n = 1                                                   (2)
    a_m   = ln((1 - e_m) / e_m) + ln(C - 1)                                                            (3)
    w_n   <- w_n exp(a_m 1[f_m(x_n) ≠ y_n]) / Z                                                        (4)
    p     = Σ_m a_m p_m / Σ_m a_m                                                                      (5)

SAMME, for C classes: J. Zhu, H. Zou, S. Rosset, T. Hastie: Multi-class AdaBoost, Statistics and Its Interface 2, 2009.
AdaBoost.M1 is (1) to (5) without ln(C - 1): Y. Freund, R. E. Schapire: A decision-theoretic generalization of on-line
learning and an application to boosting, Journal of Computer and System Sciences 55, 1997. They are equal for C = 2.

Boosting ends before M members, as in the papers, with a member that is no better than chance, e_m >= 1 - 1/C for SAMME
and e_m >= 1/2 for AdaBoost.M1, which is left out (unless it is the first, which is kept with a warning); and with a
member without errors, after which (4) changes nothing. Networks that fit all training examples therefore end it at
once: boosting is for members that underfit, such as small networks or few epochs. Members are trained one after the
other, so that the cost is that of a deep ensemble without its parallelism.

`weighting` says how w is used in (1): "loss" multiplies the loss of an example by N w_n; "resampled" draws N examples
with replacement, with the probabilities w.

Differs from the papers: (5) is the mean of probabilities by the weights a, not the vote argmax_c Σ_m a_m 1[f_m = c],
which is `enfold.metrics.majority_vote`; members are networks with initialisations of their own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data import Data, Split
from enfold.engines.base import EngineName
from enfold.ensembles.common.efficient import refuse_ties
from enfold.ensembles.common.search import FewerCandidatesWarning, Setting, WeightedEnsemble
from enfold.ensembles.deep_ensemble import Factory
from enfold.errors import EnfoldError, level_outside
from enfold.evaluate import predict
from enfold.io.files import part_file
from enfold.loggers import Log, LoggerLike, as_log
from enfold.metrics import Predictions, example_correct
from enfold.seeds import generator
from enfold.tasks import may_have_classes
from enfold.train import Epoch, History, TrainConfig, fit
from enfold.train.diversity import warn_if_similar
from enfold.train.example_weights import WeightedLoss
from enfold.train.objective import TaskLoss

SMALLEST = 1e-10  # weighted error of a member without errors, which has no finite weight


@checked
class Boosting(WeightedEnsemble):
    """Networks that are trained one after the other, on examples weighted by the errors of earlier ones.

    After training, `member_weights` has the normalized weights a of the members, and `num_members` how many there are.

    Args:
        network: The network, or a function that makes one.
        num_members: The largest number of members.
        rule: "samme", for any number of classes, or "adaboost.m1".
        weighting: How weights of examples are used in training: in the "loss", or by drawing examples ("resampled").
        seed: The seed of the members' initialisation; drawn examples follow the seed of the training.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module | Factory,
        num_members: PositiveInt = 4,
        *,
        rule: Literal["samme", "adaboost.m1"] = "samme",
        weighting: Literal["loss", "resampled"] = "loss",
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        if isinstance(network, nn.Module):
            refuse_ties(network)
        super().__init__(network, num_members, seed, engine)
        self.size = num_members  # num_members is smaller after a training that ended early
        self.rule, self.weighting, self.seed = rule, weighting, seed

    def options(self) -> dict[str, Any]:
        """Return the options of the constructor."""
        return {**super().options(), "num_members": self.size}

    @property
    def notice(self) -> str:  # type: ignore[override]
        """A remark if boosting ended before M members."""
        if self.num_members == self.size:
            return ""
        return (
            f"boosting ended after {self.num_members} of {self.size} members, because the next one was no better than "
            "chance or the last one had no error: train smaller networks, or fewer epochs"
        )

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Refuse tasks without classes."""
        if not may_have_classes(config.task):
            raise EnfoldError(
                "Boosting weighs examples by errors of classification, got task='regression': use DeepEnsemble or "
                "Bagging"
            )
        return config

    def on_fit_start(self, data: Data, config: TrainConfig) -> None:
        """Raise an error: members that are trained together are not boosted."""
        raise EnfoldError(
            "objective must be None for Boosting, which weighs the examples in the loss itself, got an objective or "
            "sample weights: leave it out, or use DeepEnsemble"
        )

    def fit_members(
        self,
        data: Data,
        config: TrainConfig,
        *,
        checkpoint: Path | None,
        title: str,
        quiet: bool,
        on_epoch: Callable[[Epoch], None] | None = None,
        logger: LoggerLike | Log = None,
    ) -> History:
        """Train one member after the other; each has a file beside `checkpoint`.

        Args:
            data: The data.
            config: The training settings.
            checkpoint: File of the training checkpoint, from which an interrupted training continues.
            title: The title of the progress bar.
            quiet: Show no progress bar.
            on_epoch: Function called with the record of every epoch of every member.
            logger: Where settings and metrics are logged to, with a part for each member.
        """
        train = data.train
        if not isinstance(train, Split):
            raise EnfoldError(
                "train must be tensors or a Dataset for Boosting, which weighs each example, got a loader: pass the "
                "examples, or use DeepEnsemble"
            )
        self.counts.fill_(1)  # all networks are trained again
        self._update_size()
        self.set_weights(None)
        self.to(config.device)
        count, history, log = len(train), History(), as_log(logger)
        weights = torch.full((count,), 1 / count, dtype=torch.float64)
        members: list[nn.Module] = []
        alphas: list[float] = []
        for index in range(self.size):
            network = self.network({name: tensor[index] for name, tensor in self.tree.state().items()})
            options = {
                "checkpoint": None if checkpoint is None else part_file(checkpoint, f"member-{index}"),
                "title": f"{title}: member {index + 1} of {self.size}",
                "quiet": quiet,
                "on_epoch": on_epoch,
                "logger": log.part(f"member_{index}"),
            }
            history.epochs += self._train(network, data, train, config, weights, index, options).epochs
            found = self._predict(network, train, config)
            missed, classes = 1 - example_correct(found), found.num_classes
            error = float(weights @ missed)  # (2)
            if self._is_no_better_than_chance(error, classes) and members:
                break
            members.append(network.cpu())
            alphas.append(self._weight(error, classes))
            if error == 0 or alphas[-1] <= 0:
                break
            weights = weights * torch.exp(alphas[-1] * missed)  # (4)
            weights = weights / weights.sum()
        self._store(members, alphas, config)
        warn_if_similar(self, data)
        return history

    def _train(
        self,
        network: nn.Module,
        data: Data,
        train: Split,
        config: TrainConfig,
        weights: Tensor,
        index: int,
        options: Mapping[str, Any],
    ) -> History:
        """Train one member with the weights of the examples, (1)."""
        own = {name: config.per_member(name, self.size)[index] for name in Setting._fields}
        config = config.replace(**own, first_member=config.first_member + index)
        if self.weighting == "resampled":
            source = generator(config.seed, "boosting", index)
            drawn = torch.multinomial(weights, len(weights), replacement=True, generator=source)
            data = data.replace(train=train[drawn])
            return fit(network, data, config=config, **options)
        loss = TaskLoss(config.task, own["label_smoothing"])
        objective = WeightedLoss(loss, (len(weights) * weights).to(config.device, torch.float32))
        return fit(network, data, config=config, objective=objective, **options)

    @staticmethod
    def _predict(network: nn.Module, train: Split, config: TrainConfig) -> Predictions:
        """Return the predictions for all training examples."""
        found = predict(network, train, task=config.task)
        if type(found) is not Predictions or len(found) != len(train):
            raise EnfoldError(
                f"Boosting needs one class for each example, got {type(found).__name__} of {len(found)} targets for "
                f"{len(train)} examples: use DeepEnsemble or Bagging"
            )
        return found

    def _is_no_better_than_chance(self, error: float, classes: int) -> bool:
        return error >= (1 - 1 / classes if self.rule == "samme" else 0.5)

    def _weight(self, error: float, classes: int) -> float:
        """Return equation (3)."""
        error = min(max(error, SMALLEST), 1 - SMALLEST)
        return math.log((1 - error) / error) + (math.log(classes - 1) if self.rule == "samme" else 0.0)

    def _store(self, members: list[nn.Module], alphas: list[float], config: TrainConfig) -> None:
        """Store the trained members with their weights, (5)."""
        per_member = [config.per_member(name, self.size) for name in Setting._fields]
        settings = [Setting(*values) for values in list(zip(*per_member, strict=True))[: len(members)]]
        self.set_networks(members, [1] * len(members), settings)
        is_useless = len(alphas) == 1 and alphas[0] <= 0
        self.set_weights(None if is_useless else alphas)
        self.to(config.device).eval()
        if self.notice:
            why = f"{self.notice}; the first member is no better than chance" if is_useless else self.notice
            warnings.warn(why, FewerCandidatesWarning, stacklevel=level_outside())
