"""Cost of each efficient ensemble with 4 members, as ratios to one network and beside a Python loop over four networks.

Writes results/bench-efficient-ensembles.json; --quick only prints the tables of BatchEnsemble and MC dropout.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from enfold.cost import time_rounds
from enfold.data import Data, Split
from enfold.ensemble import Ensemble
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.common.sampled import SampledEnsemble
from enfold.ensembles.mc_dropout import MCDropout
from enfold.evaluate import predict
from enfold.networks import WideResNet
from enfold.registry import methods
from enfold.train import TrainConfig
from timing import (
    BATCH,
    ROUNDS,
    SAMPLE,
    FactorsByHand,
    PythonLoop,
    Table,
    cnn,
    inference,
    mlp,
    ratios,
    show,
    table_of,
    training_step,
    write_record,
)

M = 4
MORE_ROUNDS = 21
PROCESSES = 5  # for the step of the MLP: one network takes 2.1 ms in one process and 2.9 in the next
ONE = "--one-process-of-mlp-steps"
OMITTED = {"hydra_ensemble"}  # the same network as multi_head


def dropout_mlp() -> nn.Module:
    """Return an MLP 784-256-256-10 with dropout after each activation."""
    layers = [nn.Linear(784, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def wide_resnet() -> nn.Module:
    """Return a WideResNet-16-2."""
    return WideResNet(depth=16, widen_factor=2)


def efficient_ensembles() -> dict[str, Table]:
    """Return tables of a training step and of inference of every method."""
    tables: dict[str, Table] = {}
    for name, make, shape in (("mlp", mlp, (784,)), ("cnn", cnn, (3, 32, 32))):
        inputs, labels = torch.randn(BATCH, *shape), torch.randint(10, (BATCH,))
        for task in ("train", "infer"):
            cases = _cases(make, inputs, labels, task)
            tables[f"{name}, {task}"] = ratios(cases, rounds=7)
            show(f"{name}, {task}", tables[f"{name}, {task}"])
    return tables


def _cases(make: Callable[[], nn.Module], inputs: Tensor, labels: Tensor, task: str) -> dict[str, Callable[[], object]]:
    def case(model: nn.Module) -> Callable[[], object]:
        if task == "train":
            objective = model.objective(TrainConfig()) if isinstance(model, Ensemble) else None
            return training_step(model, inputs, labels, objective=objective)
        if isinstance(model, SampledEnsemble):
            model.ready.fill_(True)
        return inference(model, inputs)

    cases = {"one network": case(make()), "python loop": case(PythonLoop(make, M))}
    for name, method in methods("ensemble").items():
        options: dict[str, Any] = {"inject": 0.1} if name == "mc_dropout" else {}
        if name in OMITTED:
            continue
        try:
            cases[name] = case(method.target(make(), 1 if name == "swa" else M, **options))
        except Exception as reason:  # a method that is not for this network
            print(f"{name}: {reason}", file=sys.stderr)
    return cases


def batch_ensembles() -> dict[str, Table]:
    """Return tables of BatchEnsemble where its engines matter: wide batches, split batches, a residual network."""
    tables: dict[str, Table] = {}
    for name, make, shape, batch in (
        ("mlp", mlp, (784,), BATCH),
        ("cnn", cnn, (3, 32, 32), BATCH),
        ("wrn-16-2", wide_resnet, (3, 32, 32), 64),
    ):
        inputs, labels = torch.randn(batch, *shape), torch.randint(10, (batch,))
        title = f"{name}, train, batch {batch}"
        tables[title] = mlp_steps() if name == "mlp" else ratios(_steps(make, inputs, labels), MORE_ROUNDS)
        show(title, tables[title])
        cases = {
            "one network": inference(make(), inputs),
            "python loop": inference(PythonLoop(make, M), inputs),
            "BatchEnsemble": inference(BatchEnsemble(make(), M), inputs),
        }
        tables[f"{name}, infer, batch {batch}"] = ratios(cases, MORE_ROUNDS)
        show(f"{name}, infer, batch {batch}", tables[f"{name}, infer, batch {batch}"])
    return tables


def _steps(make: Callable[[], nn.Module], inputs: Tensor, labels: Tensor) -> dict[str, Callable[[], object]]:
    parts = inputs.unflatten(0, (M, -1)), labels.unflatten(0, (M, -1))
    cases = {
        "one network": training_step(make(), inputs, labels),
        "python loop": training_step(PythonLoop(make, M), inputs, labels),
        "repeated batch": training_step(BatchEnsemble(make(), M), inputs, labels),
        "split batch": training_step(BatchEnsemble(make(), M), *parts, own=True),
    }
    if inputs.ndim == 2:
        cases["factors by hand"] = training_step(FactorsByHand(M), inputs, labels)
    else:
        cases["EnsembleBN"] = training_step(BatchEnsemble(make(), M, batch_norm="own"), inputs, labels)
        cases["joint batch norm"] = training_step(BatchEnsemble(make(), M, batch_norm="joint"), inputs, labels)
    return cases


def mlp_steps() -> Table:
    """Return the table of steps of the MLP, from the rounds of several processes."""
    times: dict[str, list[float]] = {}
    for _ in range(PROCESSES):
        again = [sys.executable, __file__, ONE]
        output = subprocess.run(again, check=True, capture_output=True, text=True).stdout  # noqa: S603 - this file itself
        for case, samples in json.loads(output).items():
            times.setdefault(case, []).extend(samples)
    return table_of(times)


def many_rows() -> dict[str, Table]:
    """Return the table of 10,000 rows: one network called directly, members by `predict`, which takes chunks."""
    rows = Split(torch.randn(10_000, 784), torch.randint(10, (10_000,)))
    data = Data(rows, rows, rows, 10, (784,))
    one, members = mlp().eval(), BatchEnsemble(mlp(), M).eval()
    cases = {
        "one network": inference(one, rows.inputs),
        "one network by predict": lambda: predict(one, data.test),
        "BatchEnsemble by predict": lambda: predict(members, data.test),
        "BatchEnsemble at once": inference(BatchEnsemble(mlp(), M), rows.inputs),
    }
    table = ratios(cases)
    show("mlp, 10,000 rows", table)
    return {"mlp, 10,000 rows": table}


def dropout() -> dict[str, Table]:
    """Return the table of four samples of MC dropout."""
    inputs = torch.randn(BATCH, 784)
    network = dropout_mlp()
    cases = {
        "one network": inference(network, inputs),
        "MC dropout": inference(MCDropout(network, M), inputs),
        "MC dropout, one mask per batch": inference(MCDropout(network, M, per_example=False), inputs),
    }
    table = ratios(cases)
    show("mlp, mc dropout", table)
    return {"mlp, mc dropout": table}


def main() -> None:
    """Measure all tables and write the record."""
    warnings.filterwarnings("ignore", message="There is a performance drop")
    torch.manual_seed(0)
    torch.set_num_threads(2)
    if ONE in sys.argv:
        inputs, labels = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
        print(json.dumps(time_rounds(_steps(mlp, inputs, labels), ROUNDS, shortest=SAMPLE)))
        return
    tables = {**batch_ensembles(), **many_rows(), **dropout()}
    if "--quick" in sys.argv:
        return
    write_record("efficient-ensembles", {**tables, **efficient_ensembles()}, members=M)


if __name__ == "__main__":
    main()
