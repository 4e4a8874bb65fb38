"""Cost of a step of distillation, as ratios to plain training steps: LatentBE, knowledge distillation, TDiv-SDiv.

Teacher logits are cached (where inputs never change), or computed in every step ("live"). Writes
results/bench-distillation.json.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import torch
from torch import nn

from enfold import DeepEnsemble
from enfold.data import Data, Split
from enfold.data.batches import Batch, Order
from enfold.distill import DistillationLoss, Perturbation, make_objective
from enfold.distill.losses.kd import KD
from enfold.distill.losses.latent_be import LatentBE
from enfold.distill.perturb.tdiv_sdiv import TDivSDiv
from enfold.networks import factory
from enfold.train import TrainConfig
from enfold.train.backward import backward
from enfold.train.objective import StepContext
from timing import BATCH, PythonLoop, Table, cnn, mlp, ratios, show, training_step, write_record

M = 4
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
    """Return pixels, and all of them as one batch."""
    split = Split(torch.rand(size, *shape), torch.randint(10, (size,)))
    channels = (0.5,) * shape[0] if len(shape) == 3 else None
    data = Data(split, split, split, 10, shape, mean=channels, std=channels)
    return data, next(Order(size).batches(data, 0))


def student_step(
    loss: DistillationLoss,
    make: Callable[[], nn.Module],
    data: Data,
    batch: Batch,
    *,
    cached: bool,
    perturb: Perturbation | None = None,
) -> Callable[[], object]:
    """Run a step of a student: targets, forward, backward, SGD with momentum."""
    teachers = DeepEnsemble(make, M).eval()
    config = TrainConfig(optimizer="sgd", augment=() if cached or perturb else ("flip",))
    student = loss.build_student(make(), M, config).train()
    objective = make_objective(loss, teachers, data, config, perturb=perturb)
    if (objective.teacher.targets is None) == cached:
        raise TypeError("targets are cached where inputs never change")
    optimizer = torch.optim.SGD([p for p in student.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
    used = batch if cached else Batch(batch.inputs, batch.targets)  # augmented examples have no index

    def step() -> None:
        optimizer.zero_grad()
        backward(student, used, objective, context=StepContext())
        optimizer.step()

    return step


def latent() -> dict[str, Table]:
    """Measure LatentBE at M = 4 and a Python loop over four plain networks with one training step each."""
    tables: dict[str, Table] = {}
    for name, (make, shape, size) in NETWORKS.items():
        data, batch = one_batch(shape, size)
        cases: Cases = {
            "python loop": training_step(PythonLoop(make, M), batch.inputs, batch.targets),
            "LatentBE, cached": student_step(LatentBE(), make, data, batch, cached=True),
            "LatentBE, live": student_step(LatentBE(), make, data, batch, cached=False),
        }
        if name != "mlp":
            own = LatentBE(batch_norm="shared")
            cases["LatentBE, a batch norm a member, cached"] = student_step(own, make, data, batch, cached=True)
        cases["LatentBE, TDiv-SDiv"] = student_step(LatentBE(), make, data, batch, cached=False, perturb=TDivSDiv())
        tables[f"LatentBE, {name}, batch {size}"] = measured(f"LatentBE, {name}, batch {size}", cases)
    return tables


def knowledge_distillation() -> dict[str, Table]:
    """Measure one student of four teachers and a training step of one plain network."""
    tables: dict[str, Table] = {}
    for name, (make, shape, size) in NETWORKS.items():
        data, batch = one_batch(shape, size)
        cases: Cases = {
            "one network": training_step(make(), batch.inputs, batch.targets),
            "distill, cached": student_step(KD(), make, data, batch, cached=True),
            "distill, live": student_step(KD(), make, data, batch, cached=False),
        }
        tables[f"distill, {name}, batch {size}"] = measured(f"distill, {name}, batch {size}", cases)
    return tables


def measured(title: str, cases: Cases) -> Table:
    """Return the ratios to the first case, and print them."""
    table = ratios(cases)
    show(title, table)
    return table


def main() -> None:
    """Measure all tables and write the record."""
    warnings.filterwarnings("ignore", message="There is a performance drop")
    torch.manual_seed(0)
    torch.set_num_threads(2)
    tables = {**knowledge_distillation(), **latent()}
    if "--quick" in sys.argv:
        return
    write_record("distillation", tables, members=M)


if __name__ == "__main__":
    main()
