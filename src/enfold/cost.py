"""Cost: what a predictor takes to store and to run, and how many times that is what one network takes.

Machines are noisy, so times are compared as ratios: all models run in one process, every round runs all of
them in rotated order, and the ratio is taken within a round before the median is taken over rounds.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from enfold.engines.modes import eval_mode
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError

Call = Callable[[], object]
Clock = Callable[[], float]

SHORTEST_SAMPLE = 2e-3  # seconds: below this, the clock and the scheduler are what is measured
MOST_REPEATS = 1 << 16  # of a call within a sample, should it take no time at all


@dataclass(frozen=True)
class Latency:
    """Seconds of one call, over the rounds; a round's figure is the mean of as many calls as last 2 ms."""

    median: float
    lower: float  # first quartile
    upper: float  # third quartile
    p95: float


@dataclass(frozen=True)
class Ratios:
    """Each cost divided by that of the reference; None where the reference has none of it."""

    parameters: float | None
    bytes: float | None
    flops: float | None
    passes: float | None
    peak_memory: float | None
    latency: dict[int, float]  # by batch size: the median over rounds of the ratio within the round


@dataclass(frozen=True)
class Cost:
    """What one predictor takes; `dataclasses.asdict` makes it JSON."""

    parameters: int
    trainable: int  # of the parameters
    bytes: int  # to store parameters and buffers
    flops: int  # an example
    passes: int  # forward passes of the network: one a member
    peak_memory: int | None  # bytes at the largest batch size
    latency: dict[int, Latency]  # by batch size
    ratios: Ratios


def parameters(module: nn.Module, *, trainable_only: bool = False) -> int:
    """Return the number of parameters; tied weights count once.

    Of an ensemble that is sampled from statistics of a training, the statistics count, not the trained network.
    """
    if isinstance(module, Ensemble) and not trainable_only:
        counted = module.stored_parameters()
    else:
        counted = [p for p in module.parameters() if p.requires_grad or not trainable_only]
    return sum(size // element for size, element in _unique_storage(counted))


def stored_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and of the buffers that a state_dict keeps; what shares storage counts once."""
    state = module.state_dict(keep_vars=True).values()
    return sum(size for size, _ in _unique_storage(value for value in state if isinstance(value, Tensor)))


def _unique_storage(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """(bytes, bytes of one element) used of each storage: its distinct views, at most all of it."""
    views: dict[int, dict[object, Tensor]] = {}
    for tensor in tensors:
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        views.setdefault(tensor.untyped_storage()._cdata, {})[view] = tensor
    used = []
    for distinct in views.values():
        first = next(iter(distinct.values()))
        size = sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())
        used.append((min(size, first.untyped_storage().nbytes()), first.element_size()))
    return used


def flops(module: nn.Module, inputs: Tensor) -> int:
    """Floating-point operations of the forward pass in eval mode, an example: inputs (B, ...).

    Matrix products, convolutions, recurrent layers and attention are counted, a multiplication and an
    addition as two; element-wise operations are not. What does not depend on the batch, such as making the
    members' weights, is shared by its examples.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_MORE_FORMULAS)
    with eval_mode(module), _frozen(module), torch.no_grad(), _attention_in_the_open():
        module(inputs.clone())  # engines are chosen and compared in the first call, once and for all
        with counter:
            module(inputs.clone())
    return round(counter.get_total_flops() / len(inputs))


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """PyTorch's counter asks for the gradient's graph of what modules are called with, which a bare weight has not."""
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_()


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])  # Q K^T and its product with V


def _lstm_flops(steps: torch.Size, of_input: torch.Size, of_state: torch.Size, *_: object, **__: object) -> int:
    return 2 * steps[0] * steps[1] * (math.prod(of_input) + math.prod(of_state))


# Fused operations of the CPU that PyTorch's own table of formulas lacks, so that they would count as nothing.
_MORE_FORMULAS: dict[object, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten.mkldnn_rnn_layer: _lstm_flops,
}


@contextmanager
def _attention_in_the_open() -> Iterator[None]:
    """nn.MultiheadAttention fuses itself into one operation in eval mode, which would count as nothing."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def latency(
    calls: Mapping[str, Call], *, rounds: int = 9, warmup: int = 3, clock: Clock | None = None
) -> dict[str, Latency]:
    """How long each of several calls takes, measured interleaved in this process."""
    return {name: summarise(s) for name, s in time_rounds(calls, rounds, warmup, clock).items()}


def time_rounds(
    calls: Mapping[str, Call],
    rounds: int = 9,
    warmup: int = 3,
    clock: Clock | None = None,
    shortest: float = SHORTEST_SAMPLE,
) -> dict[str, list[float]]:
    """Seconds of each call in each round; every round runs all of them, the first one moving to the end.

    A sample repeats its call for at least `shortest` seconds: the longer, the less it matters what ran before.
    """
    if rounds < 1 or warmup < 0:
        raise EnfoldError(
            f"a measurement needs at least 1 round and 0 warm-up calls, got {rounds} and {warmup}: "
            "for example rounds=9, warmup=3"
        )
    clock = clock or _synchronised_clock
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    with _no_garbage_collection():
        for call in calls.values():
            for _ in range(warmup):
                call()
        repeats = {name: _repeats(call, clock, shortest) for name, call in calls.items()}
        for round_ in range(rounds):
            start = round_ % max(len(names), 1)
            for name in names[start:] + names[:start]:
                samples[name].append(_elapsed(calls[name], repeats[name], clock) / repeats[name])
    return samples


def summarise(samples: Sequence[float]) -> Latency:
    """Median, quartiles and 95th percentile, interpolated linearly."""
    quantiles = torch.tensor([0.5, 0.25, 0.75, 0.95], dtype=torch.float64)
    return Latency(*torch.tensor(samples, dtype=torch.float64).quantile(quantiles).tolist())


def round_ratio(samples: Sequence[float], reference: Sequence[float]) -> float:
    """The median over rounds of the ratio within the round: what slowed a whole round cancels."""
    return statistics.median(own / other for own, other in zip(samples, reference, strict=True))


def _repeats(call: Call, clock: Clock, shortest: float) -> int:
    """How many calls make a sample that is long enough."""
    repeats = 1
    while repeats < MOST_REPEATS and _elapsed(call, repeats, clock) < shortest:
        repeats *= 2
    return repeats


def _elapsed(call: Call, repeats: int, clock: Clock) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return clock() - start


def _synchronised_clock() -> float:
    """Seconds, once an accelerator has done all that was asked of it."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection would hit whichever call happens to run."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def peak_memory(call: Call, device: str | torch.device = "cpu") -> int | None:
    """Most bytes allocated at once during a call, beyond what was allocated before it.

    On a CPU every allocation and release of PyTorch's allocator is followed, so that the temporary buffers
    inside an operation count as well; what a mathematical library allocates by itself is not seen. On CUDA
    the allocator tells its peak. Other devices do not tell: None.
    """
    call()  # engines are chosen and compared in the first call, once and for all
    device = torch.device(device)
    if device.type == "cpu":
        return _peak_of_cpu(call)
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_of_cpu(call: Call) -> int:
    with _no_garbage_collection(), _quiet_profiler(), profile(profile_memory=True) as profiler:
        result = call()  # kept, or the last release would be recorded or not as Python pleases
    del result
    if profiler.kineto_results is None:
        raise EnfoldError("memory is measured by the profiler, got a PyTorch built without it: install a usual build")
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()  # negative for a release
        peak = max(peak, current)
    return peak


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """The profiler reads this level when it first starts; else it writes two lines to stderr at every use."""
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]


def measure(
    models: Mapping[str, nn.Module],
    reference: str,
    example: Tensor,
    *,
    batch_sizes: Sequence[int] = (1, 128),
    rounds: int = 9,
    warmup: int = 3,
) -> dict[str, Cost]:
    """The cost of every model in eval mode, and its ratios to the model named `reference`.

    `example` is one prepared input without batch axis, on the device of the models. FLOPs and memory are
    those of the largest batch. The models come back in the modes they were in.
    """
    if reference not in models:
        raise EnfoldError(f"the reference must be one of {', '.join(models)}, got {reference!r}: name one of them")
    if not batch_sizes or min(batch_sizes) < 1:
        raise EnfoldError(f"batch sizes must be at least 1, got {list(batch_sizes)}: for example batch_sizes=(1, 128)")
    with eval_mode(*models.values()), torch.inference_mode():
        batches = {size: torch.stack([example] * size) for size in batch_sizes}  # a model may work in place on it
        times = {
            size: time_rounds({name: partial(model, batch) for name, model in models.items()}, rounds, warmup)
            for size, batch in batches.items()
        }
        counts = {name: _count(model, batches[max(batch_sizes)]) for name, model in models.items()}
    return {
        name: Cost(
            **counts[name],
            trainable=parameters(model, trainable_only=True),
            latency={size: summarise(seconds[name]) for size, seconds in times.items()},
            ratios=Ratios(
                **_divide(counts[name], counts[reference]),
                latency={size: round_ratio(s[name], s[reference]) for size, s in times.items()},
            ),
        )
        for name, model in models.items()
    }


class _Counts(TypedDict):
    """The costs that are counted, not timed."""

    parameters: int
    bytes: int
    flops: int
    passes: int
    peak_memory: int | None


def _count(model: nn.Module, batch: Tensor) -> _Counts:
    return {
        "parameters": parameters(model),
        "bytes": stored_bytes(model),
        "flops": flops(model, batch),
        "passes": model.num_members if isinstance(model, Ensemble) else 1,
        "peak_memory": peak_memory(partial(model, batch), batch.device),
    }


def _divide(own: _Counts, reference: _Counts) -> dict[str, float | None]:
    def ratio(value: int | None, one: int | None) -> float | None:
        return None if value is None or not one else value / one

    return {
        "parameters": ratio(own["parameters"], reference["parameters"]),
        "bytes": ratio(own["bytes"], reference["bytes"]),
        "flops": ratio(own["flops"], reference["flops"]),
        "passes": ratio(own["passes"], reference["passes"]),
        "peak_memory": ratio(own["peak_memory"], reference["peak_memory"]),
    }
