"""Cost of a step of permAVG beside Algorithm 1 of the thesis, implemented literally, for MLPs 784-512-256-128-10.

Writes results/bench-merging.json. Forward, backward and Adam's step at the published rate of 0.1, so that costs move as
in training; batch 128. "Algorithm 1" is in its fastest literal form: exp instead of log, autograd through all
iterations, N passes a layer; each matrix is made wherever it occurs (as printed), or once a step. Costs near a
permutation are where 100 iterations have not converged; at the start few are needed. Differences are those after some
steps.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.cost import time_rounds
from enfold.data.batches import Batch
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.io.files import write_json
from enfold.merge.common.soft import Balance, SoftAverage
from enfold.merge.common.states import states_of
from enfold.networks import MLP
from enfold.saving import versions
from enfold.symmetry import symmetries
from enfold.train import cross_entropy
from enfold.train.backward import backward
from timing import BATCH, Table, show

RESULTS = Path(__file__).parent.parent / "results"
Step = Callable[[], tuple[Tensor, list[Tensor]]]
WIDTHS = (512, 256, 128)
RATE = 0.1  # of Adam, as published
PRINTED = "Algorithm 1, as printed"
ROUNDED = "Algorithm 1 in float32"  # which its inverses round
MOVED = 5  # steps before differences are measured
FORMS = {
    "100 iterations": Balance(100),
    "at most 100, tolerance 1e-8": Balance(100, 1e-8),  # as by default
    "warm, implicit, tolerance 1e-5": Balance(100, 1e-5, "implicit", warm=True),
}


def costs_of(count: int, regime: str) -> list[list[Tensor]]:
    """Return costs for all members but the first, layer by layer."""
    source = torch.Generator().manual_seed(0)

    def cost(size: int) -> Tensor:
        noise = torch.randn(size, size, generator=source)
        if regime == "at the start":
            return (torch.eye(size) + 0.01 * noise).requires_grad_()
        return (9 * torch.eye(size)[torch.randperm(size, generator=source)] + noise).requires_grad_()

    return [[cost(size) for size in WIDTHS] for _ in range(count)]


def doubly_stochastic(cost: Tensor) -> Tensor:
    matrix = torch.exp(cost)
    for _ in range(100):
        matrix = matrix / matrix.sum(1, keepdim=True)
        matrix = matrix / matrix.sum(0, keepdim=True)
    return matrix


def algorithm_one(networks: list[list[nn.Linear]], costs: list[list[Tensor]], inputs: Tensor, once: bool) -> Tensor:
    """Run Algorithm 1; with `once`, each matrix is computed once per step."""
    made: dict[tuple[int, int], Tensor] = {}

    def matrix(n: int, layer: int) -> Tensor:
        if not once:
            return doubly_stochastic(costs[n - 1][layer])
        if (n, layer) not in made:
            made[n, layer] = doubly_stochastic(costs[n - 1][layer])
        return made[n, layer]

    hidden, last = inputs, len(WIDTHS)
    for layer in range(last + 1):
        total = torch.zeros(())
        for n, layers in enumerate(networks):
            own = hidden @ torch.linalg.inv(matrix(n, layer - 1)).T if layer and n else hidden
            own = F.linear(own, layers[layer].weight.detach(), layers[layer].bias.detach())
            total = total + (own @ matrix(n, layer).T if layer < last and n else own)
        hidden = total / len(networks)
        hidden = torch.relu(hidden) if layer < last else hidden
    return hidden


class Case:
    """Networks, costs and a batch; steps of either kind give logits and the gradients of the costs."""

    def __init__(self, count: int, regime: str) -> None:
        self.networks = [MLP(784, WIDTHS, 10) for _ in range(count)]
        self.linears = [[part for part in net.modules() if isinstance(part, nn.Linear)] for net in self.networks]
        self.costs = costs_of(count - 1, regime)
        self.inputs, self.labels = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))

    def scores(self) -> list[Tensor]:
        """Return the costs, (members, d, d) by layer."""
        return [torch.stack([own[k].detach() for own in self.costs]) for k in range(len(WIDTHS))]

    def literal(self, once: bool) -> Step:
        """Return a function that runs a step of Algorithm 1."""

        def step() -> tuple[Tensor, list[Tensor]]:
            logits = algorithm_one(self.linears, costs, self.inputs, once)
            found = torch.autograd.grad(F.cross_entropy(logits, self.labels), leaves)
            for leaf, slope in zip(leaves, found, strict=True):
                leaf.grad = slope
            moving.step()
            return logits.detach(), [torch.stack(found[k :: len(WIDTHS)]) for k in range(len(WIDTHS))]

        costs = [[cost.detach().clone().requires_grad_() for cost in own] for own in self.costs]
        leaves = [cost for own in costs for cost in own]
        moving = torch.optim.Adam(leaves, RATE)
        return step

    def exactly(self) -> tuple[Tensor, list[Tensor]]:
        """Return the result of a step of Algorithm 1 in float64."""
        twin = copy.deepcopy(self)
        twin.linears = [[layer.double() for layer in layers] for layers in twin.linears]
        twin.costs = [[cost.detach().double() for cost in own] for own in self.costs]
        twin.inputs = self.inputs.double()
        return twin.literal(once=True)()

    def ours(self, balance: Balance) -> tuple[SoftAverage, Step]:
        """Return a step of permAVG, and the model that it trains."""
        members, count = DeepEnsemble(self.networks), len(self.networks)
        groups = symmetries(self.networks[0], self.inputs[:2]).groups
        scores = self.scores()
        none = [each[:0] for each in scores]
        states = states_of(members)
        model = SoftAverage(members, states, [1 / count] * count, groups, scores, none, balance=balance).train()

        def step() -> tuple[Tensor, list[Tensor]]:
            for parameter in model.parameters():
                parameter.grad = None
            seen: list[Tensor] = []
            hook = model.register_forward_hook(lambda _, __, logits: seen.append(logits.detach()))
            backward(model, Batch(self.inputs, self.labels, False), _Whole())
            hook.remove()
            found = [parameter.grad.clone() for parameter in model.scores if parameter.grad is not None]
            moving.step()
            return seen[0][0], found

        moving = torch.optim.Adam(model.parameters(), RATE)
        return model, step


class _Whole:
    """Cross-entropy of the model as it is."""

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy().of_outputs(model(batch.inputs), batch)


def differences(case: Case) -> dict[str, dict[str, float]]:
    """Return the errors of logits and gradients relative to Algorithm 1 in float64 and its largest value."""
    found = {}
    for name, balance in FORMS.items():
        model, step = case.ours(balance)
        for _ in range(MOVED):
            step()
        twin = copy.deepcopy(case)
        twin.costs = [[each[n].detach().clone() for each in model.scores] for n in range(len(case.costs))]
        exact = twin.exactly()
        found[name] = _apart(step(), exact)
        found.setdefault(ROUNDED, _apart(twin.literal(once=True)(), exact))
    return found


def _apart(own: tuple[Tensor, list[Tensor]], exact: tuple[Tensor, list[Tensor]]) -> dict[str, float]:
    (logits, slopes), (wanted, gradients) = own, exact
    pairs = zip(slopes, gradients, strict=True)
    return {
        "logits": float((logits - wanted).abs().max() / wanted.abs().max()),
        "gradients": max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs),
    }


def ratios(cases: dict[str, Step], rounds: int, clock: Callable[[], float]) -> Table:
    """Return medians over rounds of the time of Algorithm 1 as printed relative to each case, and milliseconds."""
    times = time_rounds(cases, rounds, warmup=1, clock=clock, shortest=0.0)
    printed, found = times[PRINTED], {}
    for name, samples in times.items():
        within = sorted(one / own for own, one in zip(samples, printed, strict=True))
        found[name] = {
            "median": statistics.median(within),
            "lower": within[0],
            "upper": within[-1],
            "milliseconds": 1e3 * statistics.median(samples),
        }
    return found


def tables(
    counts: tuple[int, ...], rounds: int, clock: Callable[[], float]
) -> tuple[dict[str, Table], dict[str, object]]:
    """Print the speed relative to Algorithm 1 as printed, and the differences."""
    times: dict[str, Table] = {}
    errors: dict[str, object] = {}
    for regime in ("at the start", "near a permutation"):
        for count in counts:
            case, title = Case(count, regime), f"N = {count}, {regime}"
            cases = {name: case.ours(balance)[1] for name, balance in FORMS.items()}
            cases["Algorithm 1, each matrix once"] = case.literal(once=True)
            cases[PRINTED] = case.literal(once=False)
            times[title], errors[title] = ratios(cases, rounds, clock), differences(case)
            show(title, times[title])
            print(errors[title], flush=True)
    return times, errors


def main() -> None:
    """Measure all tables and write the record; `--quick`: only N = 2, not written; `--cpu`: one thread, two rounds."""
    torch.manual_seed(0)
    quick, cpu = "--quick" in sys.argv, "--cpu" in sys.argv
    torch.set_num_threads(1 if cpu else 2)
    clock = time.process_time if cpu else time.perf_counter
    times, errors = tables((2,) if quick else (2, 4, 6), 2 if quick or cpu else 7, clock)
    if quick:
        return
    record = {
        "command": "python bench/merging.py" + " --cpu" * cpu,
        "ratios": "Algorithm 1 as printed / the case, within a round",
        "date": time.strftime("%Y-%m-%d"),
        "threads": torch.get_num_threads(),
        "batch": BATCH,
        "versions": versions(),
        "tables": times,
        "differences from Algorithm 1": errors,
    }
    write_json(RESULTS / "bench-merging.json", record)


if __name__ == "__main__":
    main()
