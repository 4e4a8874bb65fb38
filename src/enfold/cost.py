"""Cost of a model: parameters, bytes, FLOPs, memory and latency, absolute and relative to a reference.

Timings are noisy, so latencies are compared as ratios: all models run in one process, every round runs all of them in
rotated order, and the result is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from enfold.costs import Cost, Costs, Latency, Ratios
from enfold.data.tree import clone, count_examples, describe, device_of, is_container, map_tensors, tensors
from enfold.engines.call import call_network
from enfold.engines.modes import eval_mode
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError

Call = Callable[[], object]
Clock = Callable[[], float]

SHORTEST_SAMPLE = 2e-3  # seconds: shorter samples are dominated by the clock and the scheduler
MOST_REPEATS = 1 << 16  # maximum number of calls in a sample


def parameters(module: nn.Module, *, trainable_only: bool = False) -> int:
    """Return the number of parameters; tied weights count once.

    For an ensemble that is sampled from statistics of the training, the statistics are counted instead of the network.

    Args:
        module: A network or an ensemble.
        trainable_only: Count only parameters that require gradients.
    """
    if isinstance(module, Ensemble) and not trainable_only:
        counted = module.stored_parameters()
    else:
        counted = [p for p in module.parameters() if p.requires_grad or not trainable_only]
    return sum(size // element for size, element in _unique_storage(counted))


def stored_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters and persistent buffers; tensors with common storage count once.

    Args:
        module: A network or an ensemble.
    """
    state = module.state_dict(keep_vars=True).values()
    return sum(size for size, _ in _unique_storage(value for value in state if isinstance(value, Tensor)))


def _unique_storage(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return (used bytes, bytes of one element) of each storage; used are its distinct views, at most all of it."""
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


def flops(module: nn.Module, inputs: Any, *, examples: int | None = None) -> int:
    """Return the floating-point operations per example of the forward pass in eval mode.

    Matrix products, convolutions, recurrent layers and attention are counted, with a multiply-add as two operations;
    element-wise operations are not. Operations that do not depend on the batch, such as the computation of the members'
    weights, are divided by the batch size.

    Args:
        module: A network or an ensemble.
        inputs: A batch of inputs (B, ...), in the structure that the network takes.
        examples: The number of examples in the batch; None to take it from the shape of the tensors.

    Raises:
        EnfoldError: If the number of examples is unknown, as in a batch of graphs.
    """
    size = count_examples(inputs) if examples is None else examples
    if not size:
        raise EnfoldError(
            f"examples must be the number of examples where inputs do not show it, got {describe(inputs)} and "
            f"examples={examples}: pass examples="
        )
    counter = FlopCounterMode(display=False, custom_mapping=_MORE_FORMULAS)
    with eval_mode(module), _no_gradients(module), torch.no_grad(), _unfused_attention():
        call_network(module, clone(inputs))  # the first call chooses and verifies the engine
        with counter:
            call_network(module, clone(inputs))
    return round(counter.get_total_flops() / size)


@contextmanager
def _no_gradients(module: nn.Module) -> Iterator[None]:
    """Disable gradients of the parameters: PyTorch's counter needs a graph of module inputs, which a leaf lacks."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_()


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])  # Q K^T and its product with V


def _lstm_flops(steps: torch.Size, of_input: torch.Size, of_state: torch.Size, *_: object, **__: object) -> int:
    return 2 * steps[0] * steps[1] * (math.prod(of_input) + math.prod(of_state))


# Fused CPU operations that PyTorch's table of formulas lacks; they would count as 0.
_MORE_FORMULAS: dict[object, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten.mkldnn_rnn_layer: _lstm_flops,
}


@contextmanager
def _unfused_attention() -> Iterator[None]:
    """Disable the fused operation of nn.MultiheadAttention in eval mode, which would count as 0."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def latency(
    calls: Mapping[str, Call], *, rounds: int = 9, warmup: int = 3, clock: Clock | None = None
) -> dict[str, Latency]:
    """Return the latency of several calls, measured interleaved in this process.

    Args:
        calls: Functions by name.
        rounds: Number of rounds.
        warmup: Calls of each function before the measurement.
        clock: Clock that returns seconds; the default waits for accelerators.
    """
    return {name: summarise(s) for name, s in time_rounds(calls, rounds, warmup, clock).items()}


def time_rounds(
    calls: Mapping[str, Call],
    rounds: int = 9,
    warmup: int = 3,
    clock: Clock | None = None,
    shortest: float = SHORTEST_SAMPLE,
) -> dict[str, list[float]]:
    """Return the seconds per call of each function in each round; the order is rotated between rounds.

    Args:
        calls: Functions by name.
        rounds: Number of rounds.
        warmup: Calls of each function before the measurement.
        clock: Clock that returns seconds; the default waits for accelerators.
        shortest: Minimum seconds of a sample, which repeats its call; longer samples depend less on previous calls.

    Raises:
        EnfoldError: If `rounds` is below 1 or `warmup` is negative.
    """
    if rounds < 1 or warmup < 0:
        raise EnfoldError(
            f"rounds must be at least 1 and warmup at least 0, got rounds={rounds} and warmup={warmup}: "
            "use for example rounds=9 and warmup=3"
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
                samples[name].append(_measure_seconds(calls[name], repeats[name], clock) / repeats[name])
    return samples


def summarise(samples: Sequence[float]) -> Latency:
    """Return median, quartiles and 95th percentile, with linear interpolation.

    Args:
        samples: Latencies in seconds.
    """
    quantiles = torch.tensor([0.5, 0.25, 0.75, 0.95], dtype=torch.float64)
    return Latency(*torch.tensor(samples, dtype=torch.float64).quantile(quantiles).tolist())


def round_ratio(samples: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median over rounds of the ratio within a round, in which disturbances of a round cancel.

    Args:
        samples: Latency of the model in each round.
        reference: Latency of the reference model in each round.
    """
    return statistics.median(own / other for own, other in zip(samples, reference, strict=True))


def _repeats(call: Call, clock: Clock, shortest: float) -> int:
    """Return the number of calls that take at least `shortest` seconds."""
    repeats = 1
    while repeats < MOST_REPEATS and _measure_seconds(call, repeats, clock) < shortest:
        repeats *= 2
    return repeats


def _measure_seconds(call: Call, repeats: int, clock: Clock) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return clock() - start


def _synchronised_clock() -> float:
    """Return the time in seconds after pending work of an accelerator has finished."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, which would slow down an arbitrary call."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def peak_memory(call: Call, device: str | torch.device = "cpu") -> int | None:
    """Return the peak of memory allocated during a call in bytes, minus what was allocated before.

    On the CPU all allocations of PyTorch's allocator are counted, including temporary buffers inside operations, but
    not those of external libraries. On CUDA the allocator reports its peak.

    Args:
        call: The function to measure.
        device: The device it runs on.

    Returns:
        The peak in bytes; None for other devices.
    """
    call()  # the first call chooses and verifies the engine
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
        result = call()  # held until the end, so that its release is never recorded
    del result
    if profiler.kineto_results is None:
        raise EnfoldError(
            "peak_memory needs a PyTorch with the Kineto profiler, got one without: install another build"
        )
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()  # negative for a release
        peak = max(peak, current)
    return peak


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Set the log level that the profiler reads at its first start; otherwise it writes to stderr at every use."""
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
    example: Any,
    *,
    batch_sizes: Sequence[int] = (1, 128),
    rounds: int = 9,
    warmup: int = 3,
) -> Costs:
    """Return the cost of each model in eval mode, with ratios to a reference model.

    FLOPs and memory are measured with the largest batch. The models' training modes are restored.

    Args:
        models: Models by name.
        reference: Name of the model that ratios refer to.
        example: One prepared input without batch axis, on the device of the models: a tensor, or a tuple or dictionary
            of tensors. For other inputs, such as graphs, a function that returns a batch of a given size.
        batch_sizes: Batch sizes whose latency is measured.
        rounds: Number of rounds of the latency measurement.
        warmup: Calls of each model before the measurement.

    Returns:
        The cost of each model by name, a dictionary that prints as a table.

    Raises:
        EnfoldError: If `reference` is not one of the models, a batch size is below 1, or no batch can be made of the
            example.
    """
    if reference not in models:
        raise EnfoldError(f"reference must be one of {', '.join(models)}, got {reference!r}: choose one of these")
    if not batch_sizes or min(batch_sizes) < 1:
        raise EnfoldError(
            f"batch_sizes must be one or more integers of at least 1, got {list(batch_sizes)}: use for example "
            "batch_sizes=(1, 128)"
        )
    largest = max(batch_sizes)
    with eval_mode(*models.values()), torch.inference_mode():
        batches = {size: _make_batch(example, size) for size in batch_sizes}
        times = {
            size: time_rounds(
                {name: partial(call_network, model, batch) for name, model in models.items()}, rounds, warmup
            )
            for size, batch in batches.items()
        }
        counts = {name: _count(model, batches[largest], largest) for name, model in models.items()}
    found = {
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
    return Costs(found, reference)


class _Counts(TypedDict):
    """The costs other than latency."""

    parameters: int
    bytes: int
    flops: int
    passes: int
    peak_memory: int | None


def _make_batch(example: Any, size: int) -> Any:
    """Return a batch of copies of an example, as models may modify it in place."""
    if callable(example) and not tensors(example):
        return example(size)
    if not is_container(example) or not tensors(example):
        raise EnfoldError(
            f"example must be a tensor, or a tuple or dictionary of tensors, got {describe(example)}: pass a function "
            "that returns a batch of a given size"
        )
    return map_tensors(lambda tensor: torch.stack([tensor] * size), example)


def _count(model: nn.Module, batch: Any, size: int) -> _Counts:
    return {
        "parameters": parameters(model),
        "bytes": stored_bytes(model),
        "flops": flops(model, batch, examples=size),
        "passes": model.num_members if isinstance(model, Ensemble) else 1,
        "peak_memory": peak_memory(partial(call_network, model, batch), device_of(batch)),
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
