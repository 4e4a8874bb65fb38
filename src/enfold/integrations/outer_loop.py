"""The parts of `fit` for a training loop of another package: losses, optimizer, schedule and callbacks of ensembles."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.batches import Batch
from enfold.data.dataset import Part
from enfold.data.tree import clone
from enfold.data.unpack import Batches, Unpack, Unpacked, count_inputs, unpack_batch
from enfold.distill.distill import check_student, make_objective
from enfold.distill.loss import DistillationLoss
from enfold.distill.losses.kd import KD
from enfold.distill.objective import DistillationObjective
from enfold.distill.perturbation import Perturbation
from enfold.distill.teacher import as_teacher, count_members
from enfold.engines.inputs import refuse_shape
from enfold.engines.outputs import at_least_float32
from enfold.ensemble import Ensemble, called_network, set_model_output, with_member_weights
from enfold.errors import EnfoldError, NonFiniteLoss
from enfold.evaluate import member_logits
from enfold.metrics import FewExamplesWarning, RowPredictions, metrics_for
from enfold.seeds import derive
from enfold.tasks import (
    Binary,
    Multilabel,
    Rows,
    StudentTask,
    Task,
    as_task,
    current_task,
    first_batch_task,
    known_task,
)
from enfold.train.batch_norm import several_examples
from enfold.train.config import TrainConfig, as_config
from enfold.train.objective import Objective, StepContext, default_loss
from enfold.train.optimize import Optimizer, trained_members

OURS = {  # settings of `fit` that another loop has itself, with what replaces them
    "batch_size": "set it in the loader",
    "order": "one order for all members is that of the loader",
    "bootstrap": "train with enfold.fit",
    "folds": "train with enfold.fit",
    "augment": "augment in the loader",
    "ema": "average the weights in the loop",
    "patience": "stop early in the loop",
    "precision": "set it in the loop",
    "compile": "compile in the loop",
    "device": "set it in the loop",
    "first_member": "leave it out",
}


class OuterLoop:
    """A model that is trained by a loop of another package, which calls these functions in the order of `fit`.

    The loss is the sum of the members' losses, so that members are trained as if each was trained alone.

    Args:
        model: A network or an ensemble.
        config: Settings of the training.
        settings: Fields of `TrainConfig`, which replace those of `config`.
        unpack: Function that splits a batch, as for `fit`.
        outputs: Function that selects the output of a network, as for `fit`.

    Raises:
        EnfoldError: If a setting is one of the loop, or the model is trained in another way.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig | None,
        settings: Mapping[str, Any],
        *,
        unpack: Unpack | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise EnfoldError(
                f"the model must be a network or an Ensemble, got a {type(model).__name__}: pass a module"
            )
        self.given = as_config(config).update(settings)
        self.given = self.given.replace(task=first_batch_task(self.given.task or getattr(model, "task", None)))
        _require_outer_settings(self.given, settings)
        self.config = self.given  # of this training, after `configure`
        self.model, self.unpack = model, unpack
        if outputs is not None:
            set_model_output(model, outputs)
        self.num_inputs = count_inputs(called_network(model))
        self.objective: Objective = default_loss(self.given, trained_members(model))
        self.optimizer: Optimizer | None = None
        self.data: Data | None = None
        self.steps = 0
        self.rows: list[Rows] = []

    @property
    def task(self) -> Task:
        """The task of the model."""
        return as_task(self.config.task)

    @property
    def evaluated_model(self) -> nn.Module:
        """The model that is evaluated."""
        return self.model

    # Settings

    def configure(self, epochs: int) -> TrainConfig:
        """Return the settings for this number of epochs, as the ensemble needs them."""
        config = self.given.replace(epochs=epochs)
        if isinstance(self.model, Ensemble):
            config = self.model.configure(config)
            if type(self.model).fit_members is not Ensemble.fit_members or config.bootstrap or config.folds:
                raise EnfoldError(
                    f"the model must be trained on the batches of a loop, but {type(self.model).__name__} trains its "
                    "members on examples of their own: train it with enfold.fit"
                )
        if config.varies:
            raise EnfoldError(
                "lr and weight_decay must be numbers in a loop of another package, got one value per member: pass one "
                "value, or train with enfold.fit"
            )
        self.config = config
        self.objective = self._make_objective(config)
        return config

    def _make_objective(self, config: TrainConfig) -> Objective:
        own = self.model.objective(config) if isinstance(self.model, Ensemble) else None
        return own or default_loss(config, trained_members(self.model))

    @property
    def has_own_schedule(self) -> bool:
        """Return whether the ensemble sets the schedule of the learning rate."""
        fields = ("schedule", "cycles", "tail", "tail_start", "tail_factor", "tail_low", "tail_cycle", "final_factor")
        return any(getattr(self.config, name) != getattr(self.given, name) for name in fields)

    # Batches

    @property
    def needs_targets(self) -> bool:
        """Return whether training batches without targets are refused."""
        return True

    def split(self, batch: Any, *, training: bool = False) -> Unpacked:
        """Return a batch as inputs, target and weights; a training batch may have no target if the loss needs none."""
        return unpack_batch(batch, self.unpack, self.num_inputs, needs_targets=self.needs_targets or not training)

    def losses(self, batch: Unpacked, progress: float, *position: int) -> Tensor:
        """Return the loss of each member in train mode, (M,); the loop minimises their sum.

        Args:
            batch: The batch.
            progress: The completed fraction of the training.
            *position: Epoch and batch, from 0, for the random draws of a perturbation.
        """
        examples = Batch(clone(batch.inputs), batch.target, weights=batch.weights, augmented=True)
        objective, context = self.objective, StepContext(derive(self.config.seed, "moment", *position), progress)
        prepare = getattr(objective, "for_batch", None)
        try:
            with several_examples():
                if prepare is not None:
                    objective = prepare(self.model, examples, context)
                losses = objective(self.model, examples)
        except Exception as error:
            if not self.steps:
                refuse_shape(self.model, batch.inputs, error)
            raise
        if not bool(torch.isfinite(losses).all()):
            member = int((~torch.isfinite(losses)).nonzero()[0])
            raise NonFiniteLoss(
                f"the loss must be finite, got {float(losses[member])} for member {member} after {self.steps} steps: "
                "lower the learning rate, or clip the norm of gradients"
            )
        return losses

    @torch.no_grad()
    def outputs(self, inputs: Any) -> Tensor:
        """Return the outputs of all members, (M, B, ...)."""
        return at_least_float32(member_logits(self.evaluated_model, inputs))

    def mean_logits(self, outputs: Tensor) -> Tensor:
        """Return the mean prediction in the place of the output of one network: (M, B, ...) -> (B, ...)."""
        task = current_task(self.task)
        if len(outputs) == 1:
            return outputs[0]
        if isinstance(task, Binary | Multilabel):
            return torch.logit(outputs.sigmoid().mean(0), eps=1e-7)
        mean = task.predict(outputs).mean
        return mean.clamp_min(torch.finfo(mean.dtype).tiny).log() if task.is_categorical else mean

    # Evaluation

    def evaluate_batch(self, batch: Unpacked) -> tuple[Tensor, RowPredictions | None]:
        """Return the outputs of a batch, (M, B, ...), and its predictions; None if all targets are ignored."""
        outputs = self.outputs(batch.inputs)
        task = self.task.resolve(outputs, batch.target)
        if task.is_ignored(outputs, batch.target):
            return outputs, None
        rows = task.flatten(outputs, batch.target)
        self.rows.append(Rows(rows.values.cpu(), rows.targets.cpu()))
        return outputs, with_member_weights(self.evaluated_model, task.predictions(self.rows[-1]))

    def evaluate_rows(self) -> dict[str, float]:
        """Return the metrics of all batches since the last call: the headline and the criterion."""
        rows, self.rows = self.rows, []
        if not rows:
            return {}
        values, targets = torch.cat([each.values for each in rows], dim=1), torch.cat([each.targets for each in rows])
        found = current_task(self.task).predictions(Rows(values, targets))
        found = with_member_weights(self.evaluated_model, found)
        table = metrics_for(found)
        names = dict.fromkeys([*found.headline, found.criterion])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FewExamplesWarning)
            return {name: table[name](found) for name in names}

    # Callbacks of ensembles

    def make_optimizer(
        self, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None
    ) -> torch.optim.Optimizer:
        """Return the optimizer of `config`, or of a function of the parameter groups."""
        self.optimizer = Optimizer(self.model, self.config)
        if make is not None:
            scaled = [{**group, "lr": group["lr"] * group.get("lr_scale", 1.0)} for group in self.optimizer.groups]
            self.optimizer.replace(make(scaled))
        return self.optimizer.inner

    def start(self, batches: Iterable[Any] | None, *, resumed: bool) -> None:
        """Prepare the ensemble; the state of a resumed training is retained.

        Args:
            batches: The loader of training batches.
            resumed: Whether the values of the model were restored from a checkpoint.
        """
        known = {"needs_targets": self.needs_targets}
        train: Part = [] if batches is None else Batches(batches, self.unpack, self.num_inputs, **known)
        self.data = Data(train, [], [], None, ())
        if isinstance(self.model, Ensemble):
            restored = {name: clone(value) for name, value in self.model.state_dict().items()} if resumed else None
            self.model.on_fit_start(self.data, self.config)
            if restored is not None:
                self.model.load_state_dict(restored)

    def end_step(self, step: int) -> None:
        """Call `on_step_end` after a step of the optimizer, counted from 1."""
        self.steps = step
        if isinstance(self.model, Ensemble) and self.optimizer is not None:
            self.model.on_step_end(step, self.optimizer)

    def end_epoch(self, epoch: int) -> None:
        """Call `on_epoch_end` after an epoch, counted from 1."""
        if isinstance(self.model, Ensemble):
            self.model.on_epoch_end(epoch, self.config)

    def end(self) -> None:
        """Complete the model after the last epoch."""
        if isinstance(self.model, Ensemble) and self.data is not None:
            with torch.enable_grad():
                self.model.on_fit_end(self.data)
        self.set_task(known_task(self.task))
        self.model.eval()

    def set_task(self, task: Task | None) -> None:
        """Set what the outputs of an ensemble mean."""
        if isinstance(self.model, Ensemble):
            self.model.task = task


class OuterDistillation(OuterLoop):
    """A student that is trained by a loop of another package.

    Args:
        student: The student, a network or an ensemble.
        teacher: An ensemble, a network or a list of networks.
        loss: The distillation loss; the default is `KD()`.
        perturb: A perturbation of the inputs.
        config: Settings of the training.
        settings: Fields of `TrainConfig`, which replace those of `config`.
        unpack: Function that splits a batch, as for `fit`.
        outputs: Function that selects the output of the student, as for `fit`.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: Any,
        loss: DistillationLoss | None,
        perturb: Perturbation | None,
        config: TrainConfig | None,
        settings: Mapping[str, Any],
        *,
        unpack: Unpack | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.loss = KD() if loss is None else loss
        for name, value, kind, example in (
            ("loss", self.loss, DistillationLoss, "KD()"),
            ("perturb", perturb, Perturbation, "Gaussian()"),
            ("student", student, nn.Module, "MyNet()"),
        ):
            if value is not None and not isinstance(value, kind):
                raise EnfoldError(f"{name} must be a {kind.__name__}, got a {type(value).__name__}: pass {example}")
        self.perturb, self.teacher = perturb, as_teacher(teacher)
        if not isinstance(self.teacher, nn.Module):
            raise EnfoldError(
                "teacher must be an ensemble, a network or a list of networks in a loop of another package, got a "
                f"{type(teacher).__name__}, whose logits belong to examples in memory: use enfold.distill"
            )
        given = self.loss.configure(as_config(config).update(settings))
        if not isinstance(student, Ensemble) and self.loss.pretrain(given) is not None:
            raise EnfoldError(
                f"student must be an ensemble for loss={type(self.loss).__name__}(), which trains a network first, got "
                f"a {type(student).__name__}: pass the ensemble, or use enfold.distill"
            )
        model = self.loss.build_student(student, count_members(self.teacher), given)
        taught = first_batch_task(given.task or getattr(self.teacher, "task", None))
        super().__init__(model, given.replace(task=taught), {}, unpack=unpack, outputs=outputs)
        _require_outer_settings(self.given, settings)
        self.student_task = StudentTask(teacher=as_task(self.given.task))

    @property
    def needs_targets(self) -> bool:
        """Return whether the loss uses the targets of training batches."""
        return bool(self.loss.weights[0])

    @property
    def task(self) -> Task:
        """The task of the student."""
        return self.student_task

    @property
    def evaluated_model(self) -> nn.Module:
        """The model that is evaluated."""
        return self.loss.evaluated_model(self.model)

    def _make_objective(self, config: TrainConfig) -> Objective:
        empty = Data([], [], [], None, ())
        objective: DistillationObjective = make_objective(self.loss, self.teacher, empty, config, perturb=self.perturb)
        check_student(objective, self.model, config)
        return objective

    def finish(self) -> nn.Module:
        """Return the result of the distillation, such as one network from a student of `LatentBE`."""
        return self.loss.finish(self.model, self.data or Data([], [], [], None, ()))


def _require_outer_settings(config: TrainConfig, settings: Mapping[str, Any]) -> None:
    """Refuse settings that the loop of another package would ignore."""
    usual = TrainConfig()
    own = {"epochs": "set it in the loop"} | OURS
    for name, remedy in own.items():
        value = getattr(config, name)
        changed = value != getattr(usual, name) and (name, value) != ("order", "shared")
        if name in settings or (changed and name in OURS):
            raise EnfoldError(f"{name} must be left out where another package has the loop, got {value!r}: {remedy}")
