"""Which members use a stacked parameter in a pass.

A network alone has `grad is None` for a parameter that a batch does not need, and optimizers pass over it. A stacked
parameter has one gradient for all members, in which such a member's part is 0: to an optimizer that is a gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from enfold.errors import UnusedParameterWarning, level_outside

_ATTRIBUTE = "_used_by"  # of a stacked parameter: for each member, whether its gradient has come
_WARNED: WeakSet[object] = WeakSet()


def unbind_watched(name: str, stacked: Tensor, owner: object) -> Sequence[Tensor]:
    """Return the members' slices of a stacked tensor; of a parameter, a backward pass records who used theirs.

    A record that nobody took since the last call is of an optimizer that knows nothing of members: `owner`'s user is
    warned once.
    """
    slices = stacked.unbind(0)
    if not stacked.is_leaf or slices[0].grad_fn is None or torch.compiler.is_compiling():
        return slices
    _warn_of_unused(name, take_used(stacked), owner)

    def record(gradients: tuple[Tensor | None, ...]) -> None:
        note_used(stacked, [gradient is not None for gradient in gradients])

    slices[0].grad_fn.register_prehook(record)
    return slices


def note_used(stacked: Tensor, used: Sequence[bool]) -> None:
    """Record who used a stacked parameter, beside those who did in passes before."""
    before = getattr(stacked, _ATTRIBUTE, None) or [False] * len(used)
    setattr(stacked, _ATTRIBUTE, [one or other for one, other in zip(before, used, strict=True)])


def take_used(stacked: Tensor) -> list[bool] | None:
    """Return which members used a stacked parameter if not all of them did, and forget the record."""
    used: list[bool] | None = getattr(stacked, _ATTRIBUTE, None)
    if used is None:
        return None
    delattr(stacked, _ATTRIBUTE)
    return used if any(used) and not all(used) else None


def _warn_of_unused(name: str, used: list[bool] | None, owner: object) -> None:
    if used is None or owner in _WARNED:
        return
    _WARNED.add(owner)
    warnings.warn(
        f"member {used.index(False)} did not use '{name}' in a batch in which others did: an optimizer of your own "
        "takes that for a gradient of 0 and applies weight decay and momentum, which it would not do to that network "
        "alone; train with enfold.fit, which leaves it as it is",
        UnusedParameterWarning,
        stacklevel=level_outside(),
    )
