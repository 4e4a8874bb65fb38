"""Hugging Face: trainers of ensembles and students, networks from a configuration, and data sets as loaders.

    factory = ModelFactory(AutoModelForSequenceClassification, config)
    ensemble = DeepEnsemble(factory, 4)                                    # a seed for each member
    EnsembleTrainer(ensemble, args, train_dataset=train, eval_dataset=val).train()
    DistillTrainer(factory(), args, teacher=ensemble, train_dataset=train).train()
    fit(ensemble, make_loader(train, shuffle=True), make_loader(val))      # without a Trainer

The loss is the sum of the members' losses and gradients are clipped for each member, so that each is trained as if
alone; predictions and metrics are those of the mean prediction.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data.unpack import Unpack, Unpacked, unpack_batch
from enfold.distill.loss import DistillationLoss
from enfold.distill.perturbation import Perturbation
from enfold.ensemble import Ensemble, called_network
from enfold.errors import EnfoldError, MissingExtra
from enfold.integrations.huggingface_data import ModelFactory, make_loader
from enfold.integrations.outer_loop import OuterDistillation, OuterLoop
from enfold.io.checkpoints import load_into
from enfold.metrics import metrics_for
from enfold.saving import save
from enfold.tasks import TaskLike
from enfold.train.config import TrainConfig

try:
    import accelerate  # noqa: F401 - the Trainer needs it
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import SAFE_WEIGHTS_NAME
except ImportError as error:
    raise MissingExtra("transformers", "hf", "enfold.integrations.huggingface") from error

__all__ = ["DistillTrainer", "EnsembleTrainer", "ModelFactory", "make_loader"]
OPTIMIZERS = {"adamw": "adamw", "sgd": "sgd"}  # beginnings of the names of optimizers, by which weight decay is applied


class _Callbacks(TrainerCallback):  # type: ignore[misc]
    """Forward the events of the Trainer to the callbacks of an ensemble."""

    def __init__(self, trainer: LoopTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepare the ensemble."""
        self.trainer.loop.steps = state.global_step
        self.trainer.loop.start(kwargs.get("train_dataloader"), resumed=state.global_step > 0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Apply the options of parameter groups to the gradients; with `max_grad_norm` that is done before clipping."""
        optimizer = self.trainer.loop.optimizer
        if args.max_grad_norm <= 0 and optimizer is not None:
            optimizer.prepare_gradients()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Call `on_step_end` of the ensemble."""
        self.trainer.loop.end_step(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Call `on_epoch_end` of the ensemble."""
        self.trainer.loop.end_epoch(math.ceil(state.epoch - 1e-6))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete the ensemble."""
        self.trainer.loop.end()


class LoopTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose losses, optimizer and metrics are those of enfold.

    Args:
        loop: The model with its losses.
        args: Arguments of the training.
        options: Further arguments of `Trainer`.
    """

    optimizer: Any
    lr_scheduler: Any

    def __init__(self, loop: OuterLoop, args: TrainingArguments, options: dict[str, Any]) -> None:
        for name in ("model_init", "compute_loss_func"):
            if options.get(name) is not None:
                raise EnfoldError(f"{name} must be None in a Trainer of enfold, got {options[name]!r}: leave it out")
        if args.world_size > 1 or args.n_gpu > 1:
            raise EnfoldError(
                f"the Trainer of an ensemble must run in one process on one device, got {args.world_size} processes "
                f"and {args.n_gpu} devices: set CUDA_VISIBLE_DEVICES=0"
            )
        self.loop = loop
        args, smoothing = copy.copy(args), args.label_smoothing_factor
        args.label_smoothing_factor = 0.0  # smoothed by `loop`; the Trainer needs a model with a `config` for it
        super().__init__(model=loop.model, args=args, **options)
        self.args.label_smoothing_factor = smoothing
        network = called_network(loop.model)
        self.model_accepts_loss_kwargs = False  # the loss is a mean over the batch
        self.label_names = list(args.label_names or ["labels"])
        if len(self.label_names) > 1:
            raise EnfoldError(
                f"label_names must have one name, got {', '.join(self.label_names)}: pass unpack=, a function that "
                "returns the inputs and one target of a batch"
            )
        parameters = inspect.signature(network.forward).parameters
        self._signature_columns = [*parameters, "label", "label_ids", *self.label_names]
        self.add_callback(_Callbacks(self))
        self.given_unpack, loop.unpack = loop.unpack, self.split

    def split(self, batch: Any, *, training: bool = False) -> Unpacked:
        """Return a batch as inputs, target and weights.

        Args:
            batch: The batch.
            training: Whether the batch may have no labels if the loss uses none.

        Raises:
            EnfoldError: If it has no labels.
        """
        needs_targets = self.loop.needs_targets or not training
        if self.given_unpack is not None:
            return unpack_batch(batch, self.given_unpack, needs_targets=needs_targets)
        name = self.label_names[0]
        if not needs_targets and isinstance(batch, Mapping) and batch.get(name) is None:
            return unpack_batch(batch, needs_targets=False)
        if not hasattr(batch, "get") or batch.get(name) is None:
            keys = ", ".join(map(str, batch)) if hasattr(batch, "keys") else type(batch).__name__
            raise EnfoldError(
                f"a batch must have the targets as '{name}', got {keys}: add the column 'labels' to the dataset, or "
                "pass TrainingArguments(label_names=[...])"
            )
        renamed = {key: value for key, value in batch.items() if key != name}
        return unpack_batch({**renamed, "labels": batch[name]})

    # Training

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the sum of the members' losses, and, on request, the mean prediction as `logits`."""
        progress = self.state.global_step / max(self.state.max_steps, 1)
        batch = self.split(inputs, training=True)
        loss = self.loop.losses(batch, min(progress, 1.0), self.state.global_step).sum()
        if not return_outputs:
            return loss
        return loss, {"logits": self.loop.mean_logits(self.loop.outputs(batch.inputs))}

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the optimizer of the arguments for the parameter groups of the ensemble."""
        self.loop.configure(self._count_epochs())
        given: torch.optim.Optimizer | None = self.optimizer
        if given is not None:
            return self.loop.make_optimizer(lambda groups: given)
        kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        if {"params", "model", "optimizer_dict"} & options.keys() or not isinstance(kind, type):
            raise EnfoldError(
                f"optim must be an optimizer of parameter groups, got {self.args.optim}: pass for example "
                "TrainingArguments(optim='adamw_torch')"
            )
        made = self.optimizer = self.loop.make_optimizer(lambda groups: kind(groups, **options))
        return made

    def _count_epochs(self) -> int:
        if self.args.max_steps <= 0:
            return math.ceil(float(self.args.num_train_epochs))
        try:
            batches = len(self.get_train_dataloader())
        except TypeError:  # a stream without a length
            return 1
        steps = max(batches // int(self.args.gradient_accumulation_steps), 1)
        return math.ceil(int(self.args.max_steps) / steps)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the schedule of the arguments, or that of an ensemble which needs its own, such as SWAG."""
        if self.lr_scheduler is not None or not self.loop.has_own_schedule:
            return super().create_scheduler(num_training_steps, optimizer)
        config = self.loop.config
        steps = math.ceil(num_training_steps / max(config.epochs, 1))
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer if optimizer is None else optimizer, lambda step: config.rate_factor(step, steps)
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip the norm of the gradients of each member, and return the norm of all before it."""
        optimizer = self.loop.optimizer
        assert optimizer is not None  # noqa: S101 - made by create_optimizer
        self.accelerator.unscale_gradients()
        optimizer.prepare_gradients()
        norm = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
        optimizer.clip(self.args.max_grad_norm)
        return norm

    # Evaluation

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Any]:
        """Return the criterion of the mean prediction, such as NLL, the mean prediction, and the targets."""
        inputs = self._prepare_inputs(inputs)
        has_labels = self.given_unpack is not None or inputs.get(self.label_names[0]) is not None
        loss = targets = None
        with torch.no_grad(), self.compute_loss_context_manager():
            if has_labels:
                batch = self.split(inputs)
                outputs, found = self.loop.evaluate_batch(batch)
                targets = batch.target
                loss = outputs.new_tensor(math.nan if found is None else metrics_for(found)[found.criterion](found))
            else:
                outputs = self.loop.outputs(inputs)
        return (loss, None, None) if prediction_loss_only else (loss, self.loop.mean_logits(outputs), targets)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Return predictions and metrics, among them the metrics of enfold for all examples."""
        self.loop.rows = []
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        found = {f"{prefix}_{name}": value for name, value in self.loop.evaluate_rows().items()}
        return output._replace(metrics={**found, **(output.metrics or {})})

    # Files

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        if isinstance(self.model, Ensemble):
            state = self.model.state_dict() if state_dict is None else state_dict
            state_dict = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items()}
        super()._save(output_dir, state_dict)
        if isinstance(self.model, Ensemble):
            save(self.model, Path(output_dir or self.args.output_dir) / SAFE_WEIGHTS_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        file = Path(resume_from_checkpoint) / SAFE_WEIGHTS_NAME
        if isinstance(self.model, Ensemble) and file.is_file():
            load_into(self.model, file)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)


class EnsembleTrainer(LoopTrainer):
    """A `Trainer` that trains an ensemble.

    Optimizer, schedule, epochs and batches are those of `args`; ensembles such as SWAG set their own schedule. The
    logged training loss is the sum over members. Evaluation gives the loss of the mean prediction (NLL for classes),
    the metrics of enfold as `eval_nll`, `eval_accuracy` and so on, and the mean prediction as `logits` for
    `compute_metrics`. `save_model` writes a folder that `enfold.load(folder / "model.safetensors", factory)` reads.

    Args:
        model: The ensemble; it is trained in place, and its callbacks are called as by `enfold.fit`.
        args: `TrainingArguments`; None for the defaults.
        task: What the outputs mean, as for `enfold.fit`; None to infer it from the first batch.
        unpack: A function that splits a batch, as for `enfold.fit`.
        outputs: A function that selects the output of a network, as for `enfold.fit`.
        **options: Further arguments of `Trainer`, such as `train_dataset` and `data_collator`.

    Raises:
        EnfoldError: If an argument is of the wrong kind, or a batch has no labels.
    """

    def __init__(
        self,
        model: Ensemble,
        args: TrainingArguments | None = None,
        *,
        task: TaskLike = None,
        unpack: Unpack | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, Ensemble):
            raise EnfoldError(
                f"model must be an Ensemble, got a {type(model).__name__}: pass for example DeepEnsemble(factory, 4)"
            )
        args = TrainingArguments() if args is None else args
        loop = OuterLoop(model, _read_config(args, task), {}, unpack=unpack, outputs=outputs)
        super().__init__(loop, args, options)


class DistillTrainer(LoopTrainer):
    """A `Trainer` that distils a teacher to a student.

    Args:
        model: The student, which is trained in place: a network or an ensemble.
        args: `TrainingArguments`; None for the defaults.
        teacher: An ensemble, a network or a list of networks. It is not trained.
        loss: The distillation loss; the default is `KD()`.
        perturb: A perturbation of the inputs, the same for teacher and student.
        task: What the outputs mean, as for `enfold.fit`; None for the task of the teacher, or to infer it.
        unpack: A function that splits a batch, as for `enfold.fit`.
        outputs: A function that selects the output of the student, as for `enfold.fit`.
        **options: Further arguments of `Trainer`, such as `train_dataset` and `data_collator`.

    Raises:
        EnfoldError: If an argument is of the wrong kind, or a batch has no labels.
    """

    loop: OuterDistillation

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        *,
        teacher: nn.Module | list[nn.Module],
        loss: DistillationLoss | None = None,
        perturb: Perturbation | None = None,
        task: TaskLike = None,
        unpack: Unpack | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
        **options: Any,
    ) -> None:
        args = TrainingArguments() if args is None else args
        config = _read_config(args, task)
        loop = OuterDistillation(model, teacher, loss, perturb, config, {}, unpack=unpack, outputs=outputs)
        super().__init__(loop, args, options)

    @property
    def network(self) -> nn.Module:
        """The result: the student, or the network that `loss` makes from it."""
        return self.loop.finish()


def _read_config(args: Any, task: TaskLike) -> TrainConfig:
    """Return the arguments of a Trainer as settings of enfold."""
    if not isinstance(args, TrainingArguments):
        raise EnfoldError(
            f"args must be TrainingArguments, got a {type(args).__name__}: pass TrainingArguments(folder)"
        )
    kind = next((ours for name, ours in OPTIMIZERS.items() if str(args.optim.value).startswith(name)), "adam")
    settings: dict[str, Any] = {
        "optimizer": kind,
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "decay": "weights",
        "label_smoothing": args.label_smoothing_factor,
        "seed": args.seed,
        "task": task,
    }
    return TrainConfig(**settings)
