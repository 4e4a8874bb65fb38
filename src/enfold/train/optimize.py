"""The optimizer of M members: PyTorch's, on stacked parameters, or on each member's slice if settings differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from enfold.engines.parameters import decay_groups, take_used
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.train.config import TrainConfig
from enfold.train.data_parallel import shard_as


def trained_members(model: nn.Module) -> int:
    """Return the number of losses that a model has in training; 1 for a single network."""
    return model.trained_members if isinstance(model, Ensemble) else 1


class Optimizer:
    """The optimizer of a model; gradients with a member axis are clipped for each member.

    Args:
        model: A network or an ensemble.
        config: Settings of the training.

    Raises:
        EnfoldError: If the model has no trainable parameters, or settings of each member do not fit the model.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.config = config
        self.num_members = trained_members(model)
        self.groups = param_groups(model, config)
        self.slices: list[tuple[Tensor, list[Tensor]]] = []
        self.inner = self._make(self._member_groups() if config.varies else self.groups)
        everything = (parameter for group in self.inner.param_groups for parameter in group["params"])
        self.names = {id(parameter): str(index) for index, parameter in enumerate(everything)}  # names in a saved state

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        config = self.config
        rates = [{**group, "lr": group.get("lr", 1.0) * group.get("lr_scale", 1.0)} for group in groups]
        base = [{**group, "base_lr": group["lr"]} for group in rates]
        if config.optimizer == "sgd":
            nesterov = config.nesterov and config.momentum > 0
            return torch.optim.SGD(base, momentum=config.momentum, nesterov=nesterov)
        kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
        half = all(parameter.dtype == torch.float16 for group in groups for parameter in group["params"])
        return kind(base, betas=config.betas, eps=1e-4 if half else 1e-8)  # 1e-8 is 0 in float16

    def _member_groups(self) -> list[dict[str, Any]]:
        """Return one group per member, whose leaves are views of the slices of stacked parameters."""
        rates = self.config.per_member("lr", self.num_members)
        decays = self.config.per_member("weight_decay", self.num_members)
        by_member: list[dict[str, Any]] = []
        for group in self.groups:
            if not group["member_axis"] and self.num_members > 1:
                raise EnfoldError(
                    "lr and weight_decay must be numbers if members have parameters in common, got one value per "
                    "member: use one value for all, or a DeepEnsemble"
                )
            decayed, scale = group["weight_decay"] > 0, group.get("lr_scale", 1.0)
            views = [_leaves(parameter, self.num_members) for parameter in group["params"]]
            self.slices += list(zip(group["params"], views, strict=True))
            for index in range(self.num_members):
                own = [leaves[index] for leaves in views]
                decay = decays[index] if decayed else 0.0
                options: dict[str, Any] = {
                    key: group[key] for key in ("grad_scale", "decay_to", "towards") if key in group
                }
                by_member.append(
                    {**options, "params": own, "lr": rates[index], "lr_scale": scale, "weight_decay": decay}
                )
        return by_member

    def step(self, rate_factor: float, scaler: torch.amp.GradScaler) -> None:
        """Clip the gradients, update the parameters and clear the gradients.

        Slices that a member did not use are unchanged, as parameters without a gradient are in PyTorch.

        Args:
            rate_factor: Factor on the learning rates.
            scaler: Gradient scaler of mixed precision.
        """
        used = self._find_used()
        for stacked, leaves in self.slices:
            grads = [None] * len(leaves) if stacked.grad is None else _slices(stacked.grad, len(leaves))
            for leaf, grad, wanted in zip(leaves, grads, used.get(id(stacked), [True] * len(leaves)), strict=True):
                leaf.grad = grad if wanted else None
        for group in self.inner.param_groups:
            group["lr"] = group["base_lr"] * rate_factor
        scaler.unscale_(self.inner) if scaler.is_enabled() else None
        self.prepare_gradients()
        scaler.step(self.inner)  # self.inner.step() if scaling is disabled
        scaler.update()
        self.clear()

    def prepare_gradients(self) -> None:
        """Apply the options of groups to the gradients, and clip them; before a step of `inner` by another loop."""
        self._apply_group_options()
        if self.config.clip_norm is not None:
            self.clip(self.config.clip_norm)

    def replace(self, inner: torch.optim.Optimizer) -> None:
        """Use another optimizer of the same parameters."""
        self.inner = inner

    def _find_used(self) -> dict[int, list[bool]]:
        """Return which members used a parameter, for those that some did not use; these are split from now on."""
        found: dict[int, list[bool]] = {}
        for group in self.groups:
            for parameter in group["params"]:
                used = take_used(parameter)
                if used is not None and group["member_axis"]:
                    found[id(parameter)] = used
                    self._split(parameter)
        return found

    def _split(self, parameter: Tensor) -> None:
        """Replace a parameter by its slices, each with its own optimizer state and step count."""
        if any(stacked is parameter for stacked, _ in self.slices):
            return
        leaves = _leaves(parameter, len(parameter))
        self.slices.append((parameter, leaves))
        for group in self.inner.param_groups:
            group["params"] = [each for old in group["params"] for each in (leaves if old is parameter else [old])]
        name, memory = self.names.pop(id(parameter)), self.inner.state.pop(parameter, {})
        for index, leaf in enumerate(leaves):
            self.names[id(leaf)] = f"{name}/{index}"
            self.inner.state[leaf] = {
                key: value[index].clone()
                if isinstance(value, Tensor) and value.shape == parameter.shape
                else _copy(value)
                for key, value in memory.items()
            }

    @torch.no_grad()
    def _apply_group_options(self) -> None:
        """Scale gradients and decay to values other than 0, as groups specify."""
        for group in self.inner.param_groups:
            scale, target = group.get("grad_scale", 1.0), group.get("decay_to")
            for parameter in group["params"]:
                if scale != 1.0 and parameter.grad is not None:
                    parameter.grad.mul_(scale)
                if target is None or not group["towards"] or parameter.grad is None:
                    continue
                if self.config.optimizer == "adamw":
                    parameter.lerp_(torch.full_like(parameter, target), group["lr"] * group["towards"])
                else:
                    parameter.grad.add_(parameter - target, alpha=group["towards"])

    def clear(self) -> None:
        """Clear the gradients and the records of the members that used them."""
        for group in self.groups:
            for parameter in group["params"]:
                parameter.grad = None
                take_used(parameter)

    def clip(self, limit: float) -> None:
        """Clip the norm of the gradients of each member, and of those that members have in common."""
        owned = [p.grad for g in self.groups if g["member_axis"] for p in g["params"] if p.grad is not None]
        shared = [p for g in self.groups if not g["member_axis"] for p in g["params"]]
        if shared:
            nn.utils.clip_grad_norm_(shared, limit)
        if owned:
            norms = torch.stack([grad.reshape(len(grad), -1).norm(dim=1) for grad in owned]).norm(dim=0)  # (M,)
            factors = (limit / (norms + 1e-6)).clamp_max(1.0)
            for grad in owned:
                grad.mul_(factors.view(-1, *(1,) * (grad.ndim - 1)))

    def state(self) -> dict[str, Tensor]:
        """Return the state of the optimizer by parameter index (and member, for slices) and name."""
        return {
            f"{self.names[id(parameter)]}.{name}": torch.as_tensor(value)
            for parameter, values in self.inner.state.items()
            for name, value in values.items()
            if value is not None
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of `state()`, in the memory format of the parameters."""
        split = {key.split("/")[0] for key in state if "/" in key}
        for parameter in [each for group in self.inner.param_groups for each in group["params"]]:
            if self.names[id(parameter)] in split:
                self._split(parameter)
        content = self.inner.state_dict()
        content["state"] = {}
        parameters = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        positions = {self.names[id(parameter)]: index for index, parameter in enumerate(parameters)}
        for key, value in state.items():
            place, name = key.split(".", 1)
            index = positions[place]
            like = parameters[index] if value.shape == parameters[index].shape else value
            memory = torch.empty_like(like, dtype=value.dtype, requires_grad=False).copy_(shard_as(like, value))
            content["state"].setdefault(index, {})[name] = memory
        self.inner.load_state_dict(content)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _slices(stacked: Tensor, num_members: int) -> list[Tensor]:
    return list(stacked.unbind(0)) if num_members > 1 else [stacked]


def _leaves(parameter: Tensor, num_members: int) -> list[Tensor]:
    return [part.requires_grad_() for part in _slices(parameter.detach(), num_members)]


def _apply_step_scale(group: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """Return the group with `step_scale` as a factor on gradients, or on the learning rate of Adam and AdamW."""
    scale = group.get("step_scale", 1.0)
    if config.optimizer == "sgd":
        return {**group, "grad_scale": scale * group.get("grad_scale", 1.0)}
    slowed = {**group, "lr_scale": scale * group.get("lr_scale", 1.0)}
    return {**slowed, "towards": group["towards"] / scale} if scale and "towards" in group else slowed


def param_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Return the parameter groups of a model: those an ensemble specifies, or those of a network by weight decay.

    Args:
        model: A network or an ensemble.
        config: Settings of the training.

    Raises:
        EnfoldError: If there are no trainable parameters.
    """
    decay = max(config.per_member("weight_decay", trained_members(model)))  # positive if any member's is
    rate = config.per_member("lr", trained_members(model))[0]
    if isinstance(model, Ensemble):
        declared = model.param_groups(decay, config.decay)
    else:
        named = [(parameter, parameter.ndim) for parameter in model.parameters()]
        declared = decay_groups(named, decay, config.decay)
    groups = []
    for group in declared:
        trainable = [parameter for parameter in group["params"] if parameter.requires_grad]
        if trainable:
            if "decay_to" in group:  # PyTorch decays to 0 only
                group = {**group, "towards": group["weight_decay"], "weight_decay": 0.0}
            group = _apply_step_scale(group, config)
            groups.append({"member_axis": False, "lr": rate, **group, "params": trainable})
    if not groups:
        raise EnfoldError("model must have trainable parameters, got none: set requires_grad=True")
    return groups
