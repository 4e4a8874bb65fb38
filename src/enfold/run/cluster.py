"""Estimate a run on devices that are not here: from floating-point operations, memory and the start of a task.

    operations of a training = epochs (3 N_train + N_val) F        F: those of a forward pass of one example
    seconds of a training    = operations / (share x peak of the device) + start of a task
    seconds of the run       = sum over phases of ceil(trainings / devices) x seconds of a training

A backward pass has about twice the operations of a forward pass. The share of its peak that a device reaches depends on
the network and the input pipeline; it is the largest uncertainty, and may be measured by a short training there.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from enfold.cost import flops, peak_memory, stored_bytes
from enfold.data.dataset import Split
from enfold.data.tree import first_examples
from enfold.errors import EnfoldError
from enfold.run.directory import RunDirectory
from enfold.run.recipe import Recipe
from enfold.run.seed_run import SeedRun
from enfold.run.step_methods import is_trained

SHARE = 0.2  # of the peak: convolutional networks under autocast reach about this
PROBE = 8  # examples with which activations are measured
CLUSTER = re.compile(r"(\d{1,6})x([A-Za-z0-9-]+)(?:@(0?\.\d+|1(?:\.0*)?))?")


@dataclass(frozen=True)
class Device:
    """A kind of device: peak FLOP/s of dense products in 16 bits and in float32 (TF32 where it exists), and memory."""

    half: float
    single: float
    gib: float


DEVICES = {  # data sheets of the manufacturer
    "T4": Device(65e12, 8.1e12, 16),
    "V100": Device(125e12, 15.7e12, 32),
    "L4": Device(121e12, 60e12, 24),
    "A10": Device(125e12, 62.5e12, 24),
    "A100": Device(312e12, 156e12, 80),
    "A100-40": Device(312e12, 156e12, 40),
    "H100": Device(989e12, 494e12, 80),
}


@dataclass(frozen=True)
class Cluster:
    """A number of devices of one kind, and the share of their peak that is reached."""

    count: int
    kind: str
    share: float = SHARE

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read "8xA100" or "8xA100@0.3".

        Raises:
            EnfoldError: If it is written otherwise, or the device is unknown.
        """
        found = CLUSTER.fullmatch(text)
        if found is None or not int(found[1]) or found[2] not in DEVICES or (found[3] and not float(found[3])):
            raise EnfoldError(
                f"a cluster is a number of devices of one kind, and optionally the share of their peak, such as "
                f"8xA100 or 8xA100@0.3, got {text!r}: the kinds are {', '.join(DEVICES)}"
            )
        return cls(int(found[1]), found[2], float(found[3] or SHARE))

    def rate(self, precision: str) -> float:
        """Return the FLOP/s that a device reaches."""
        device = DEVICES[self.kind]
        return self.share * (device.single if precision in ("float32", "fp32") else device.half)


@dataclass(frozen=True)
class Training:
    """What one training needs.

    Attributes:
        operations: Floating-point operations.
        memory_bytes: Weights, gradients, state of the optimizer, and activations of a batch.
    """

    operations: float
    memory_bytes: int


@dataclass(frozen=True)
class Network:
    """What a network needs, measured here.

    Attributes:
        forward: Operations of a forward pass of one example.
        stored_bytes: Its weights.
        activation_bytes: Memory of a forward and a backward pass, per example.
    """

    forward: float
    stored_bytes: int
    activation_bytes: float

    @classmethod
    def measure(cls, network: nn.Module, inputs: Any) -> Network:
        """Measure a network with a few examples."""
        few = first_examples(inputs, PROBE)
        peak = peak_memory(lambda: _backward(network, few)) or 0
        return cls(flops(network, few), stored_bytes(network), peak / PROBE)

    def training(
        self, *, train: int, val: int = 0, epochs: int, batch_size: int, states: int = 5, teachers: int = 0
    ) -> Training:
        """Return what a training needs.

        Args:
            train: The number of training examples.
            val: The number of validation examples.
            epochs: Epochs.
            batch_size: Examples of a batch.
            states: Copies of the weights: weights, best weights, gradients and the state of the optimizer.
            teachers: Networks that run forward on every batch.
        """
        return Training(
            epochs * ((3 + teachers) * train + val) * self.forward,
            int(self.stored_bytes * (states + teachers) + self.activation_bytes * batch_size),
        )


def _backward(network: nn.Module, inputs: Any) -> None:
    from enfold.evaluate import member_logits

    network.zero_grad()
    member_logits(network, inputs).float().square().mean().backward()
    network.zero_grad()


@dataclass(frozen=True)
class ClusterEstimate:
    """Time and memory of a run on a cluster.

    Attributes:
        seconds: Time until the last training ends.
        device_seconds: Time of all trainings together.
        start_seconds: The start of a task, as measured here.
        memory_bytes: The largest training's.
        fits: Whether that is less than the memory of a device.
        trainings: The number of trainings in each phase.
        operations: Of all trainings.
        cluster: The cluster.
    """

    seconds: float
    device_seconds: float
    start_seconds: float
    memory_bytes: int
    fits: bool
    trainings: tuple[int, ...]
    operations: float
    cluster: Cluster

    def __str__(self) -> str:
        c, used = self.cluster, self.memory_bytes / 2**30
        fits = "" if self.fits else " (does not fit: divide the batch, or shard the network)"
        return (
            f"{c.count} x {c.kind} at {100 * c.share:.0f} % of the peak: about {_time(self.seconds)} for "
            f"{' + '.join(map(str, self.trainings))} trainings of {self.operations:.2g} operations together, "
            f"{_time(self.device_seconds)} of devices, {used:.1f} of {DEVICES[c.kind].gib:g} GiB{fits}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def predict_run(
    phases: list[list[Training]], cluster: Cluster, *, precision: str = "float32", start_seconds: float = 0.0
) -> ClusterEstimate:
    """Return the time of phases of trainings, each of which begins when the one before has ended.

    Args:
        phases: Trainings that run at the same time.
        cluster: Where.
        precision: The precision of products, as in `TrainConfig`.
        start_seconds: The start of a task.
    """
    rate, seconds, device_seconds = cluster.rate(precision), 0.0, 0.0
    phases = [phase for phase in phases if phase]
    for phase in phases:
        taken = [training.operations / rate + start_seconds for training in phase]
        seconds += max(max(taken), math.ceil(len(taken) / cluster.count) * sum(taken) / len(taken))
        device_seconds += sum(taken)
    every = [training for phase in phases for training in phase]
    memory = max((training.memory_bytes for training in every), default=0)
    return ClusterEstimate(
        seconds,
        device_seconds,
        start_seconds,
        memory,
        memory < DEVICES[cluster.kind].gib * 2**30,
        tuple(map(len, phases)),
        sum(training.operations for training in every),
        cluster,
    )


def estimate_on_cluster(recipe: Recipe, cluster: Cluster, run: RunDirectory) -> ClusterEstimate:
    """Return the time and memory of a recipe with one task for each member, step and control.

    Args:
        recipe: The recipe.
        cluster: Where it would run.
        run: The run directory, which is not written.
    """
    seed = SeedRun(run, recipe, recipe.seeds[0], "cpu")
    config = recipe.members_config(0, "cpu")
    if not isinstance(seed.data.train, Split):
        raise EnfoldError("--cluster needs data whose number of examples is known, got a loader: leave out --cluster")
    network = Network.measure(seed.make_network(), seed.data.prepare(seed.data.train.inputs[:PROBE]))
    count, val = len(seed.data.train), len(seed.data.val) if isinstance(seed.data.val, Split) else 0

    def training(settings: Any, teachers: int = 0) -> Training:
        return network.training(
            train=count,
            val=val,
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            states=3 + (1 if settings.optimizer == "sgd" else 2),
            teachers=teachers,
        )

    repeats = len(recipe.seeds)
    members = [] if recipe.checkpoints else [training(config)] * recipe.members * repeats
    trained = [step for step in recipe.steps if is_trained(step)]
    steps = [training(recipe.step_config(step, 0), recipe.members) for step in trained]
    controls = [training(each) for each in seed.controls.values()]
    return predict_run(
        [members, (steps + controls) * repeats],
        cluster,
        precision=config.precision,
        start_seconds=measure_start(),
    )


def measure_start() -> float:
    """Return the seconds in which a process starts and imports what a training needs, here."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import enfold.run.execute"], check=False)
    return time.perf_counter() - started


def _time(seconds: float) -> str:
    for unit, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"
