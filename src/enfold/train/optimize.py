"""One optimizer for M members: torch's own, on stacked parameters, or on each member's slice where settings differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from enfold.engines.parameters import decay_groups, take_used
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.train.config import TrainConfig


def trained_members(model: nn.Module) -> int:
    """Return the number of losses that a model has in training; 1 for a single network."""
    return model.trained_members if isinstance(model, Ensemble) else 1


class Optimizer:
    """The optimizer of a model; parameters with a member axis are clipped, and may have settings, by member."""

    def __init__(self, model: nn.Module, plan: TrainConfig) -> None:
        self.plan = plan
        self.num_members = trained_members(model)
        self.groups = param_groups(model, plan)
        self.slices: list[tuple[Tensor, list[Tensor]]] = []
        self.inner = self._make(self._sliced() if plan.varies else self.groups)
        everything = (parameter for group in self.inner.param_groups for parameter in group["params"])
        self.names = {id(parameter): str(index) for index, parameter in enumerate(everything)}  # in a stored state

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        plan = self.plan
        rates = [{**group, "lr": group.get("lr", 1.0) * group.get("lr_scale", 1.0)} for group in groups]
        base = [{**group, "base_lr": group["lr"]} for group in rates]
        if plan.optimizer == "sgd":
            nesterov = plan.nesterov and plan.momentum > 0
            return torch.optim.SGD(base, momentum=plan.momentum, nesterov=nesterov)
        kind = torch.optim.AdamW if plan.optimizer == "adamw" else torch.optim.Adam
        half = all(parameter.dtype == torch.float16 for group in groups for parameter in group["params"])
        return kind(base, betas=plan.betas, eps=1e-4 if half else 1e-8)  # 1e-8 is 0 in float16

    def _sliced(self) -> list[dict[str, Any]]:
        """One group a member: leaves that share storage with the stacked parameters' slices."""
        rates = self.plan.per_member("lr", self.num_members)
        decays = self.plan.per_member("weight_decay", self.num_members)
        by_member: list[dict[str, Any]] = []
        for group in self.groups:
            if not group["member_axis"] and self.num_members > 1:
                raise EnfoldError(
                    "lr and weight_decay must be numbers unless members own all parameters, got a common parameter: "
                    "use one value for all, or a DeepEnsemble"
                )
            decayed, scale = group["weight_decay"] > 0, group.get("lr_scale", 1.0)
            views = [_leaves(parameter, self.num_members) for parameter in group["params"]]
            self.slices += list(zip(group["params"], views, strict=True))
            for index in range(self.num_members):
                own = [leaves[index] for leaves in views]
                decay = decays[index] if decayed else 0.0
                kept: dict[str, Any] = {
                    key: group[key] for key in ("grad_scale", "decay_to", "towards") if key in group
                }
                by_member.append({**kept, "params": own, "lr": rates[index], "lr_scale": scale, "weight_decay": decay})
        return by_member

    def step(self, rate_factor: float, scaler: torch.amp.GradScaler) -> None:
        """Clip, update with the learning rates multiplied by `rate_factor`, and clear the gradients.

        What a member did not use is left as it is, as torch leaves a parameter without a gradient.
        """
        used = self._used()
        for stacked, leaves in self.slices:
            grads = [None] * len(leaves) if stacked.grad is None else _slices(stacked.grad, len(leaves))
            for leaf, grad, wanted in zip(leaves, grads, used.get(id(stacked), [True] * len(leaves)), strict=True):
                leaf.grad = grad if wanted else None
        for group in self.inner.param_groups:
            group["lr"] = group["base_lr"] * rate_factor
        scaler.unscale_(self.inner) if scaler.is_enabled() else None
        self._declared()
        if self.plan.clip_norm is not None:
            self._clip(self.plan.clip_norm)
        scaler.step(self.inner)  # without scaling this is self.inner.step()
        scaler.update()
        self.clear()

    def _used(self) -> dict[int, list[bool]]:
        """Which members used a parameter, of those that some did not; these are stepped slice by slice from now on."""
        found: dict[int, list[bool]] = {}
        for group in self.groups:
            for parameter in group["params"]:
                used = take_used(parameter)
                if used is not None and group["member_axis"]:
                    found[id(parameter)] = used
                    self._split(parameter)
        return found

    def _split(self, parameter: Tensor) -> None:
        """Put a parameter's slices in its place, each with its own part of the memory and its own count of steps."""
        if any(stacked is parameter for stacked, _ in self.slices):
            return
        leaves = _leaves(parameter, len(parameter))
        self.slices.append((parameter, leaves))
        for group in self.inner.param_groups:
            group["params"] = [each for held in group["params"] for each in (leaves if held is parameter else [held])]
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
    def _declared(self) -> None:
        """Scale gradients, and decay to another value than 0, where a group declares it."""
        for group in self.inner.param_groups:
            scale, target = group.get("grad_scale", 1.0), group.get("decay_to")
            for parameter in group["params"]:
                if scale != 1.0 and parameter.grad is not None:
                    parameter.grad.mul_(scale)
                if target is None or not group["towards"] or parameter.grad is None:
                    continue
                if self.plan.optimizer == "adamw":
                    parameter.lerp_(torch.full_like(parameter, target), group["lr"] * group["towards"])
                else:
                    parameter.grad.add_(parameter - target, alpha=group["towards"])

    def clear(self) -> None:
        """Forget the gradients, and who gave them."""
        for group in self.groups:
            for parameter in group["params"]:
                parameter.grad = None
                take_used(parameter)

    def _clip(self, limit: float) -> None:
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
        """The optimizer's memory by position, of a slice also the member, and name."""
        return {
            f"{self.names[id(parameter)]}.{name}": torch.as_tensor(value)
            for parameter, values in self.inner.state.items()
            for name, value in values.items()
            if value is not None
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put the memory back, laid out as the parameters are."""
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
            memory = torch.empty_like(like, dtype=value.dtype, requires_grad=False).copy_(value)
            content["state"].setdefault(index, {})[name] = memory
        self.inner.load_state_dict(content)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _slices(stacked: Tensor, num_members: int) -> list[Tensor]:
    return list(stacked.unbind(0)) if num_members > 1 else [stacked]


def _leaves(parameter: Tensor, num_members: int) -> list[Tensor]:
    return [part.requires_grad_() for part in _slices(parameter.detach(), num_members)]


def _scaled(group: dict[str, Any], plan: TrainConfig) -> dict[str, Any]:
    """`step_scale` as a factor on gradients, or on the learning rate where an optimizer undoes factors on gradients."""
    scale = group.get("step_scale", 1.0)
    if plan.optimizer == "sgd":
        return {**group, "grad_scale": scale * group.get("grad_scale", 1.0)}
    slowed = {**group, "lr_scale": scale * group.get("lr_scale", 1.0)}
    return {**slowed, "towards": group["towards"] / scale} if scale and "towards" in group else slowed


def param_groups(model: nn.Module, plan: TrainConfig) -> list[dict[str, Any]]:
    """What a model declares, or for a plain network: its parameters, decayed or not as the plan says."""
    decay = max(plan.per_member("weight_decay", trained_members(model)))  # above 0 if any member's is
    rate = plan.per_member("lr", trained_members(model))[0]
    if isinstance(model, Ensemble):
        declared = model.param_groups(decay, plan.decay)
    else:
        named = [(parameter, parameter.ndim) for parameter in model.parameters()]
        declared = decay_groups(named, decay, plan.decay)
    groups = []
    for group in declared:
        trainable = [parameter for parameter in group["params"] if parameter.requires_grad]
        if trainable:
            if "decay_to" in group:  # torch decays to 0 only
                group = {**group, "towards": group["weight_decay"], "weight_decay": 0.0}
            group = _scaled(group, plan)
            groups.append({"member_axis": False, "lr": rate, **group, "params": trainable})
    if not groups:
        raise EnfoldError("a model must have trainable parameters to be trained, got none: set requires_grad")
    return groups
