"""Engines: ways to run M networks whose parameters are stacked; all give the same results.

- `Loop` (this file) runs one network after the other, convolutions in channels-last;
- `stacked.StackedProgram` runs each linear layer of all networks as one batched product;
- `vmap.Vmap` runs all networks by torch.vmap.

On two CPU cores batched products are fastest for linear layers, and the loop for convolutions, where vmap and grouped
convolutions are slower than a plain loop; `make bench` measures it (results/bench-members.json). `choose.choose_engine`
selects one after it has compared its results with those of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from enfold.engines.call import call_network
from enfold.engines.inference import PIECE, Fusion, can_prepare, find_fusions, fuse_all, is_plain_eval
from enfold.engines.layout import arrange_images, runs_channels_last
from enfold.engines.outputs import get_logits
from enfold.engines.parameters import unbind_and_record
from enfold.engines.skeleton import Skeleton, State
from enfold.errors import EnfoldError

EngineName = Literal["auto", "measure", "stacked", "loop", "vmap"]
Engine = Callable[[State, Any, bool], Tensor]  # (state, inputs, each) -> (M, B, ...)


class CannotRun(Exception):
    """An engine cannot run a network; the message gives the reason."""


class Loop:
    """Run one network after the other, each with its slice of the stacked state.

    All members run the code of the first network, or each its own (separate modules).

    Without gradients, images are processed in pieces of 64: the outputs of a convolution for more of them are so large
    that the allocator returns them to the system and requests them again, page by page, in each call, which takes as
    long as the arithmetic. Batch norms in eval mode are then fused into the convolutions before them; also for a
    single image, for which fused kernels are stored until a parameter changes.
    """

    def __init__(self, codes: Skeleton | Sequence[Skeleton]) -> None:
        self.codes = [codes] if isinstance(codes, Skeleton) else list(codes)
        self.skeleton = self.codes[0]
        self.channels_last = runs_channels_last(self.skeleton.network)
        self._fusions: dict[object, list[Fusion] | None] = {}  # by shape and dtype; None: do not use pieces

    def code(self, index: int) -> Skeleton:
        """Return the code that member `index` runs."""
        return self.codes[index] if len(self.codes) > 1 else self.skeleton

    def prepare(self, inputs: Any) -> Any:
        """Return the inputs in the members' memory layout, as a copy if a member modifies its inputs."""
        return arrange_images(inputs, self.channels_last, copy=self.writes_inputs)

    @property
    def writes_inputs(self) -> bool:
        """Return whether a member modifies its inputs in place."""
        return any(code.writes_inputs for code in self.codes)

    def __call__(self, state: State, inputs: Any, each: bool) -> Tensor:
        """Common inputs (B, ...) of any structure or, with `each`, a tensor (M, B, ...) -> (M, B, ...)."""
        self.check_reentrant(state)
        slices = {name: self.slice(name, tensor) for name, tensor in state.items()}
        num_members = len(next(iter(slices.values())))
        common = None if each or self.writes_inputs else self.prepare(inputs)
        fusions = self._find_fusions(state, inputs[0] if each else inputs)
        is_single = fusions is not None and len(inputs[0] if each else inputs) == 1
        if fusions is not None and is_single and not can_prepare(fusions, state):
            fusions = None
        outputs = []
        for index in range(num_members):
            own = self.prepare(inputs[index] if each else inputs) if common is None else common
            with self.code(index).use_values({name: tensors[index] for name, tensors in slices.items()}) as network:
                if fusions is None:
                    outputs.append(get_logits(call_network(network, own), network))
                    continue
                with fuse_all(fusions, index if is_single else None):
                    outputs.append(torch.cat([get_logits(network(rows), network) for rows in own.split(PIECE)]))
        return torch.stack(outputs)

    def slice(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Return the tensor of every member with that name."""
        # The results of `unbind` cannot be modified in place, and prediction must not modify parameters.
        if any(name in code.written for code in self.codes):
            own = [tensor[index] for index in range(len(tensor))]
            return own if torch.is_grad_enabled() else [each.clone() for each in own]
        return unbind_and_record(name, tensor, self.skeleton)

    def check_reentrant(self, state: State) -> None:
        """Raise EnfoldError if a block with use_reentrant=True would go twice through the graph of the parameters."""
        if not self.skeleton.is_reentrant or not torch.is_grad_enabled():
            return
        if any(tensor.requires_grad and not tensor.is_leaf for tensor in state.values()):
            raise EnfoldError(
                "members whose parameters are computed from others need use_reentrant=False in "
                "torch.utils.checkpoint.checkpoint, got use_reentrant=True: pass use_reentrant=False, or train with "
                "enfold.fit"
            )

    def forget(self) -> None:
        """Discard the stored kernels, which do not notice a write to `parameter.data`."""
        for fusions in self._fusions.values():
            for fusion in fusions or ():
                fusion.prepared.clear()

    def _find_fusions(self, state: State, rows: Any) -> list[Fusion] | None:
        """Return the layers to fuse if the rows are processed in pieces, or None if they are processed at once."""
        if not isinstance(rows, Tensor):
            return None
        small = 1 < len(rows) <= PIECE or rows.ndim != 4 or rows.device.type != "cpu" or len(self.codes) > 1
        if small or not self.channels_last or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        network = self.skeleton.network
        if not is_plain_eval(network):
            return None
        kind = (rows.shape[1:], rows.dtype, torch.is_autocast_enabled("cpu"))
        if kind not in self._fusions:
            first = {name: tensor[0] for name, tensor in state.items()}
            self._fusions[kind] = find_fusions(self.skeleton, first, rows[:3])
        return self._fusions[kind]
