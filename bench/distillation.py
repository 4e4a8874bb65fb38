"""What a step of distillation costs, as ratios to plain training steps: LatentBE, knowledge distillation, TDiv-SDiv.

Teachers are looked up ("cached", where inputs stay the same) or asked in every step. Writes
results/bench-distillation.json.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable

import torch
from enfold.distill.base import Distillation
from torch import nn

from enfold import DeepEnsemble
from enfold.data import Data, Split
from enfold.data.batches import Batch, Order
from enfold.distill.losses.kd import KD
from enfold.distill.losses.latent_be import LatentBE
from enfold.networks import factory
from enfold.registry import methods
from enfold.train import TrainConfig
from enfold.train.backward import backward
from enfold.train.objective import StepContext
from timing import BATCH, PythonLoop, Table, cnn, mlp, ratios, show, training_step, write_record

M = 4
MOVED = "tdiv_sdiv"  # the perturbation whose overhead is measured, where it is installed
Cases = dict[str, Callable[[], object]]
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (mlp, (784,), BATCH),
    "cnn": (cnn, (3, 32, 32), BATCH),
    "resnet-14": (
        factory({"name": "resnet", "depth": 14, "width": 8, "stem_stride": 2}, (3, 32, 32), 10),
        (3, 32, 32),
        64,
    ),
}


def one_batch(shape: tuple[int, ...], size: int) -> tuple[Data, Batch]:
    """Pixels, and all of them as one batch."""
    split = Split(torch.rand(size, *shape), torch.randint(10, (size,)))
    channels = (0.5,) * shape[0] if len(shape) == 3 else None
    data = Data(split, split, split, 10, shape, mean=channels, std=channels)
    return data, next(Order(size).batches(data, 0))


def lesson(
    method: Distillation, make: Callable[[], nn.Module], data: Data, batch: Batch, *, cached: bool
) -> Callable[[], object]:
    """A step of a student: the teachers' answers, forward, backward, SGD with momentum."""
    teachers = DeepEnsemble(make, M).eval()
    share = method.student_share(M)
    student = (make() if share is None else share(make())).train()
    plan = TrainConfig(
        optimizer="sgd", augment=() if cached or method.perturb else ("flip",)
    )  # moved pictures are asked about
    planned = dataclasses.replace(method, plan=plan)
    teacher = planned.teacher(teachers, data)
    if (teacher.targets is None) == cached:
        raise TypeError("answers are cached where inputs never change")
    objective = planned.objective(teacher, teachers)
    optimizer = torch.optim.SGD([p for p in student.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
    seen = batch if cached else Batch(batch.inputs, batch.labels)  # what was augmented has no number

    def step() -> None:
        optimizer.zero_grad()
        backward(student, seen, objective, moment=StepContext())
        optimizer.step()

    return step


def latent() -> dict[str, Table]:
    """LatentBE at M = 4, beside a Python loop over four plain networks, each with a training step of its own."""
    tables: dict[str, Table] = {}
    method = LatentBE(plan=TrainConfig(optimizer="sgd"))
    for name, (make, shape, size) in NETWORKS.items():
        data, batch = one_batch(shape, size)
        cases: Cases = {
            "python loop": training_step(PythonLoop(make, M), batch.inputs, batch.labels),
            "LatentBE, cached": lesson(method, make, data, batch, cached=True),
            "LatentBE, asked": lesson(method, make, data, batch, cached=False),
        }
        if name != "mlp":
            own = LatentBE(batch_norm="shared", plan=method.plan)
            cases["LatentBE, a batch norm a member, cached"] = lesson(own, make, data, batch, cached=True)
        if MOVED in methods("perturb"):
            moved = LatentBE(perturb=MOVED, plan=method.plan)
            cases["LatentBE, TDiv-SDiv"] = lesson(moved, make, data, batch, cached=False)
        tables[f"LatentBE, {name}, batch {size}"] = measured(f"LatentBE, {name}, batch {size}", cases)
    return tables


def knowledge_distillation() -> dict[str, Table]:
    """One student of four teachers, beside a training step of one plain network."""
    tables: dict[str, Table] = {}
    for name, (make, shape, size) in NETWORKS.items():
        data, batch = one_batch(shape, size)
        cases: Cases = {
            "one network": training_step(make(), batch.inputs, batch.labels),
            "distill, cached": lesson(KD(), make, data, batch, cached=True),
            "distill, asked": lesson(KD(), make, data, batch, cached=False),
        }
        tables[f"distill, {name}, batch {size}"] = measured(f"distill, {name}, batch {size}", cases)
    return tables


def measured(title: str, cases: Cases) -> Table:
    """The ratios to the first case, shown."""
    table = ratios(cases)
    show(title, table)
    return table


def main() -> None:
    """All tables and the record."""
    warnings.filterwarnings("ignore", message="There is a performance drop")
    torch.manual_seed(0)
    torch.set_num_threads(2)
    tables = {**knowledge_distillation(), **latent()}
    if "--quick" in sys.argv:
        return
    write_record("distillation", tables, members=M)


if __name__ == "__main__":
    main()
