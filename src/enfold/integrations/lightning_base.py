"""The common code of the modules for `lightning` and `pytorch_lightning`, which imports neither."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from enfold.data.convert import as_data
from enfold.data.unpack import Unpack
from enfold.distill.loss import DistillationLoss
from enfold.distill.perturbation import Perturbation
from enfold.engines.skeleton import read_state
from enfold.ensemble import Ensemble, called_network, predict_outputs
from enfold.ensembles.common.sampled import SampledEnsemble
from enfold.errors import EnfoldError
from enfold.integrations.outer_loop import OuterDistillation, OuterLoop
from enfold.tasks import current_task, known_task
from enfold.tasks.infer import task_from_dict, task_to_dict
from enfold.train.config import TrainConfig

if TYPE_CHECKING:

    class Base:
        """A class of Lightning, beside which the hooks are inherited."""

        trainer: Any
        log: Any
        log_dict: Any
        clip_gradients: Any

else:
    Base = object


class TrainedByLightning(Base):
    """The hooks of a LightningModule that trains a network or an ensemble of enfold."""

    loop: OuterLoop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        return self.loop.model(*args, **kwargs)

    # Training

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the sum of the members' losses, and log their mean as `train_loss`."""
        unpacked = self.loop.split(batch, training=True)
        losses = self.loop.losses(unpacked, self._progress(), self.trainer.current_epoch, batch_idx)
        size = len(unpacked.target) if isinstance(unpacked.target, Tensor) else 1
        self.log("train_loss", losses.detach().mean(), on_step=False, on_epoch=True, prog_bar=True, batch_size=size)
        return losses.sum()

    def _progress(self) -> float:
        total = self.trainer.estimated_stepping_batches
        return min(self.trainer.global_step / total, 1.0) if math.isfinite(total) and total > 0 else 0.0

    def configure_optimizers(self) -> dict[str, Any]:
        """Return optimizer and schedule of the settings for the epochs of the Trainer."""
        trainer = self.trainer
        if not isinstance(trainer.max_epochs, int) or trainer.max_epochs < 1:
            raise EnfoldError(
                f"max_epochs must be a number of epochs, got {trainer.max_epochs}: pass Trainer(max_epochs=20), as "
                "schedules and the collection of members depend on it"
            )
        config = self.loop.configure(trainer.max_epochs)
        optimizer = self.loop.make_optimizer()
        _ = trainer.estimated_stepping_batches  # loads the training data
        batches = trainer.num_training_batches
        steps = math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else 1
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: config.rate_factor(step, steps))
        interval = "step" if math.isfinite(batches) else "epoch"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}

    def on_fit_start(self) -> None:
        """Prepare the ensemble."""
        self.loop.start(self.trainer.train_dataloader, resumed=self.trainer.ckpt_path is not None)

    def on_train_start(self) -> None:
        """Count steps from those of a checkpoint."""
        self.loop.steps = self.trainer.global_step

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the options of parameter groups to the gradients, and clip them for each member."""
        assert self.loop.optimizer is not None  # noqa: S101 - made by configure_optimizers
        self.loop.optimizer.prepare_gradients()

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the norm of the gradients of each member."""
        assert self.loop.optimizer is not None  # noqa: S101 - made by configure_optimizers
        if gradient_clip_val and str(gradient_clip_algorithm or "norm") == "norm":
            self.loop.optimizer.clip(float(gradient_clip_val))
        elif gradient_clip_val:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Call `on_step_end` of the ensemble."""
        if self.trainer.global_step > self.loop.steps:  # not while gradients are accumulated
            self.loop.end_step(self.trainer.global_step)

    def on_train_epoch_end(self) -> None:
        """Call `on_epoch_end` of the ensemble."""
        self.loop.end_epoch(self.trainer.current_epoch + 1)

    def on_train_end(self) -> None:
        """Complete the ensemble."""
        self.loop.end()

    # Evaluation

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Collect the predictions of a batch."""
        self.loop.evaluate_batch(self.loop.split(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Collect the predictions of a batch."""
        self.loop.evaluate_batch(self.loop.split(batch))

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of all validation examples as `val_nll` and so on."""
        self._log_metrics("val")

    def on_test_epoch_end(self) -> None:
        """Log the metrics of all test examples as `test_nll` and so on."""
        self._log_metrics("test")

    def _log_metrics(self, prefix: str) -> None:
        found = {f"{prefix}_{name}": value for name, value in self.loop.evaluate_rows().items()}
        self.log_dict(found, prog_bar=prefix == "val", sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return the fields of the `Prediction` of a batch, such as `mean`; a batch may have targets."""
        try:
            inputs = self.loop.split(batch).inputs
        except EnfoldError:  # a batch of inputs alone
            inputs = batch[0] if isinstance(batch, list | tuple) and len(batch) == 1 else batch
        found = predict_outputs(self.loop.evaluated_model, current_task(self.loop.task), self.loop.outputs(inputs))
        return {name: getattr(found, name) for name in ("mean", "members", "total", "aleatoric", "epistemic")}

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store what the outputs mean."""
        checkpoint["enfold_task"] = task_to_dict(known_task(self.loop.task))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what the outputs mean."""
        self.loop.set_task(task_from_dict(checkpoint.get("enfold_task")))


class EnsembleHooks(TrainedByLightning):
    """A LightningModule that trains an ensemble."""

    def __init__(
        self,
        ensemble: Ensemble,
        config: TrainConfig | None = None,
        *,
        unpack: Unpack | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if not isinstance(ensemble, Ensemble):
            raise EnfoldError(
                f"ensemble must be an Ensemble, got a {type(ensemble).__name__}: pass for example "
                "DeepEnsemble(make_net, 4)"
            )
        self.loop = OuterLoop(ensemble, config, settings, unpack=unpack, outputs=outputs)
        self.ensemble = ensemble


class DistillHooks(TrainedByLightning):
    """A LightningModule that trains a student."""

    loop: OuterDistillation

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module | list[nn.Module],
        config: TrainConfig | None = None,
        *,
        loss: DistillationLoss | None = None,
        perturb: Perturbation | None = None,
        unpack: Unpack | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.loop = OuterDistillation(student, teacher, loss, perturb, config, settings, unpack=unpack, outputs=outputs)
        self.student = self.loop.model

    @property
    def network(self) -> nn.Module:
        """The result: the student, or the network that `loss` makes from it."""
        return self.loop.finish()


class CollectHooks(Base):
    """The hooks of a Callback that collects the members of an ensemble from the network of the user's module."""

    def __init__(
        self,
        ensemble: SampledEnsemble,
        network: str | Callable[[Any], nn.Module] = "net",
        *,
        unpack: Unpack | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(ensemble, SampledEnsemble):
            raise EnfoldError(
                "ensemble must be one whose members are collected along one training, got a "
                f"{type(ensemble).__name__}: pass for example SWAG(module.net), or train it in an EnsembleModule"
            )
        self.ensemble, self.network, self.unpack = ensemble, network, unpack
        self.restored: dict[str, Any] | None = None

    def _find_network(self, module: Any) -> nn.Module:
        found = module.get_submodule(self.network) if isinstance(self.network, str) else self.network(module)
        state, expected = read_state(found), self.ensemble.centre.state()
        if {name: tensor.shape for name, tensor in state.items()} != {
            name: tensor.shape for name, tensor in expected.items()
        }:
            raise EnfoldError(
                f"network must be the network that the {type(self.ensemble).__name__} was made from, got a "
                f"{type(found).__name__} with other parameters: pass its name in the module, such as network='net'"
            )
        return found

    @torch.no_grad()
    def _follow(self, module: Any) -> None:
        state = read_state(self._find_network(module))
        for name, tensor in self.ensemble.centre.state().items():
            tensor.copy_(state[name])

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to collect."""
        network = self._find_network(pl_module)
        self.ensemble.to(next(network.parameters()).device)
        self.config = self.ensemble.configure(TrainConfig(epochs=max(trainer.max_epochs or 0, 0)))
        self.ensemble.on_fit_start(as_data([]), self.config)
        if self.restored is not None:
            self.ensemble.load_state_dict(self.restored)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Collect the weights of the network."""
        self._follow(pl_module)
        self.ensemble.on_epoch_end(trainer.current_epoch + 1, self.config)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Make the members available, with batch-norm statistics of their own."""
        self._follow(pl_module)
        network = called_network(self.ensemble)
        with torch.enable_grad():
            self.ensemble.on_fit_end(as_data(trainer.train_dataloader, unpack=self.unpack, network=network))
        self.ensemble.eval()

    def state_dict(self) -> dict[str, Any]:
        """Return what was collected, for the checkpoints of the Trainer."""
        return {"ensemble": copy.copy(self.ensemble.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what was collected."""
        self.restored = state_dict["ensemble"]
