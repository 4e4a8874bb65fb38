"""Checks of every network: each compares enfold with plain PyTorch.

A check returns None or a note on success, and raises `Wrong` on a difference; an `EnfoldError` is a refusal.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import enfold
from enfold import Data, DeepEnsemble, EnfoldError, Ensemble, TrainConfig, merge
from enfold.registry import methods
from enfold.symmetry import permute
from tools.zoo.case import MEMBERS, Case, Skipped, Wrong, difference, untouched
from tools.zoo.entry import seeded

Check = Callable[[Case], str | None]
Merge = Callable[..., nn.Module]
CHECKS: dict[str, Check] = {}
STEP = TrainConfig(
    epochs=2,
    batch_size=64,
    optimizer="sgd",
    lr=0.02,
    momentum=0.9,
    nesterov=False,
    weight_decay=1e-2,
    schedule="constant",
    select="last",
    order="shared",
)


def capability(name: str) -> Callable[[Check], Check]:
    """Register a check under the name of a capability."""

    def register(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return register


@contextmanager
def stored() -> Iterator[Path]:
    """Yield a temporary file for a model."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "model.safetensors"


def into_fresh(case: Case, state: dict[str, Tensor], index: int = 0, **how: bool) -> nn.Module:
    """Return a network that was built again without enfold, with these values."""
    network = case.build(index, **how)
    network.load_state_dict(state)
    return network


# Members


@capability("stacked: outputs")
@torch.no_grad()
def outputs(case: Case) -> None:
    """Compare outputs in eval mode for two batches."""
    sources = case.nets()
    with untouched(*sources):
        members = DeepEnsemble(sources).eval()
        case.compare(members(case.batch()), case.references, "outputs")
        other = case.batch(seed=7)
        expected = torch.stack([case.outputs(network, other) for network in case.nets()])
        case.compare(members(other), expected, "outputs for a second batch")


@capability("stacked: outputs in train mode")
@torch.no_grad()
def train_outputs(case: Case) -> str | None:
    """Compare outputs from the same random state, or on average if random numbers are drawn in another order."""
    if not case.drawing(calm=False):
        return _train_outputs(case, calm=False)
    _like_on_average(case)
    if case.drawing():
        return "random even without dropout: compared on average"
    return _train_outputs(case, calm=True)


def _train_outputs(case: Case, calm: bool) -> None:
    references, inputs = case.nets(calm=calm, train=True), case.batch()
    seeded(3)
    expected = torch.stack([case.outputs(network, inputs) for network in references])
    members = DeepEnsemble(case.nets(calm=calm, train=True))
    members.train()
    seeded(3)
    case.compare(members(inputs.clone()), expected, "outputs in train mode")
    for index, reference in enumerate(references):
        ours = dict(members.member(index).named_buffers())
        for name, buffer in reference.named_buffers():
            if buffer.is_floating_point():
                case.compare(ours[name], buffer, f"the buffer '{name}' of member {index} in train mode")


def _like_on_average(case: Case, draws: int = 48) -> None:
    """Compare means and standard deviations over draws, which show dropout rates of another member."""
    references, inputs = case.nets(train=True), case.batch()
    members = DeepEnsemble(case.nets(train=True)).train()
    seeded(3)
    expected = torch.stack([torch.stack([case.outputs(n, inputs) for n in references]) for _ in range(draws)])
    found = torch.stack([members(inputs.clone()) for _ in range(draws)])
    for index in range(MEMBERS):
        ours, theirs = found[:, index].flatten(1), expected[:, index].flatten(1)
        error = ((ours.var(0) + theirs.var(0)) / draws).sqrt().clamp_min(1e-3 * theirs.abs().max())
        score = ((ours.mean(0) - theirs.mean(0)) / error).pow(2).mean().sqrt()
        ratio = ours.std(0).mean() / theirs.std(0).mean().clamp_min(1e-9)
        if score > 4 or not (0.6 < ratio < 1.6 or theirs.std(0).mean() < 1e-6):
            raise Wrong(
                f"over {draws} draws in train mode the mean of member {index} is {score:.1f} standard errors away, "
                f"its spread {ratio:.2f} times"
            )


@capability("stacked: gradients")
def gradients(case: Case) -> None:
    """Compare one step of SGD on all members' parameters."""
    _stepped(case, train=False)


@capability("stacked: gradients in train mode")
def train_gradients(case: Case) -> None:
    """Compare one step of SGD with batch statistics."""
    if case.drawing():
        raise Skipped("random even without dropout")
    _stepped(case, train=True)


def _stepped(case: Case, train: bool) -> None:
    inputs = case.batch()
    alone = [_stepped_alone(case, index, train) for index in range(MEMBERS)]
    sources = case.nets(calm=True, train=train)
    with untouched(*sources):
        members = DeepEnsemble(sources)
        members.train(train)
        optimizer = torch.optim.SGD(members.parameters(), lr=1.0)
        sum(case.loss(one) for one in members(inputs.clone())).backward()
        optimizer.step()
    for index, expected in enumerate(alone):
        change = moved(expected, case.build(index, calm=True, train=train))
        case.compare_states(members.member(index), expected, change, f"member {index} after one step")


def _stepped_alone(case: Case, index: int, train: bool) -> nn.Module:
    """Return member `index` after the same step with plain PyTorch."""
    network = case.build(index, calm=True, train=train)
    outputs = case.outputs(network, case.batch())
    try:
        case.loss(outputs).backward()
    except Exception as error:
        raise Skipped(f"the network itself has no gradient in this mode ({error})") from error
    torch.optim.SGD([parameter for parameter in network.parameters() if parameter.requires_grad], lr=1.0).step()
    return network


def moved(network: nn.Module, start: nn.Module) -> float:
    """Return the largest change of a parameter."""
    pairs = zip(network.parameters(), start.parameters(), strict=True)
    return max((float((a - b).detach().abs().max()) for a, b in pairs if a.numel()), default=0.0) or 1.0


@capability("stacked: own inputs")
@torch.no_grad()
def forward_each(case: Case) -> None:
    """Compare `forward_each` with single networks."""
    batches = [case.batch(seed=20 + index) for index in range(MEMBERS)]
    expected = torch.stack([case.outputs(n, b) for n, b in zip(case.nets(), batches, strict=True)])
    case.compare(DeepEnsemble(case.nets()).eval().forward_each(torch.stack(batches)), expected, "forward_each")


@capability("stacked: member")
@torch.no_grad()
def member(case: Case) -> None:
    """Compare `member(k)` in both modes, and its values in a network that was built again."""
    members, inputs = DeepEnsemble(case.nets()).eval(), case.batch()
    for index in range(MEMBERS):
        one = members.member(index)
        if not same_class(one, case.build(index)):
            raise Wrong(f"member {index} is a {type(one).__name__}")
        case.compare(case.outputs(one.eval(), inputs), case.references[index], f"member {index}")
        fresh = into_fresh(case, one.state_dict(), index)
        case.compare(case.outputs(fresh, inputs), case.references[index], f"values of member {index}")
        found, expected = members.member(index).train(), case.build(index, train=True)
        seeded(4)
        theirs = case.outputs(expected, inputs)
        seeded(4)
        case.compare(case.outputs(found, inputs), theirs, f"member {index} in train mode")


def _engine(name: str) -> Check:
    @torch.no_grad()
    def check(case: Case) -> None:
        members = DeepEnsemble(case.nets(calm=True), engine=name).eval()
        case.compare(members(case.batch()), case.references, f"engine {name}")
        if case.drawing():
            return
        references, inputs = case.nets(calm=True, train=True), case.batch()
        expected = torch.stack([case.outputs(network, inputs) for network in references])
        case.compare(members.train()(inputs.clone()), expected, f"engine {name} in train mode")

    return check


for engine in ("loop", "stacked", "vmap", "measure"):
    capability(f"engine {engine}")(_engine(engine))


@capability("stacked: copy, slice, state")
@torch.no_grad()
def copies(case: Case) -> None:
    """Compare `copy.deepcopy`, `members[:2]`, iteration, and a state dict loaded into other members."""
    members, inputs = DeepEnsemble(case.nets()).eval(), case.batch()
    case.compare(copy.deepcopy(members)(inputs.clone()), case.references, "a deep copy")
    case.compare(members[:2].eval()(inputs.clone()), case.references[:2], "members[:2]")
    case.compare(
        torch.stack([case.outputs(network.eval(), inputs) for network in members]), case.references, "iteration"
    )
    other = DeepEnsemble(case.nets()).eval()
    other(inputs.clone())
    for parameter in other.parameters():
        parameter.mul_(1.5)
    other.load_state_dict(members.state_dict())
    case.compare(other.eval()(inputs.clone()), case.references, "the state in other members")


@capability("stacked: make")
def made(case: Case) -> None:
    """Compare new members from a factory and from a network with the scale of the package's initialisation."""
    members = DeepEnsemble(lambda: case.entry.make(0), 2, seed=3)
    for index, seed in enumerate(members.seeds or ()):
        seeded(seed)
        fresh = case.entry.make(0)
        if case.dtype == torch.float32:
            case.compare_states(members.member(index), fresh, 1.0, f"member {index} of a factory")
    drawn, start = DeepEnsemble(case.build(raw=True), 2, seed=3), case.build(raw=True)
    ours = dict(drawn.member(1).named_parameters())
    for name, parameter in start.named_parameters():
        spread = float(parameter.detach().abs().pow(2).mean().sqrt()) if parameter.numel() >= 64 else 0.0
        ratio = float(ours[name].detach().abs().pow(2).mean().sqrt()) / spread if spread else 1.0
        if not 1 / 3 < ratio < 3:
            raise Wrong(f"reinitialised, '{name}' is {ratio:.2g} times as wide as the package makes it")


@capability("mixed")
@torch.no_grad()
def mixed(case: Case) -> None:
    """Compare unmodified networks behind one call."""
    case.compare(enfold.MixedEnsemble(case.nets()).eval()(case.batch()), case.references, "MixedEnsemble")


@capability("forward_mean")
@torch.no_grad()
def forward_mean(case: Case) -> None:
    """Log of the mean probability; outputs that are no (B, C) are to be refused."""
    found = DeepEnsemble(case.nets()).eval().forward_mean(case.batch())
    if len(case.shape) != 2 or case.shape[1] < 2:
        raise Wrong(f"outputs of shape {case.shape} have no class axis that is known, got {tuple(found.shape)}")
    case.compare(found, case.references.softmax(-1).mean(0).log(), "forward_mean")


@capability("save and load members")
@torch.no_grad()
def save_members(case: Case) -> None:
    """Compare members after `enfold.save` and `enfold.load` with a factory."""
    with stored() as file:
        members = DeepEnsemble(case.nets()).eval()
        members(case.batch())
        enfold.save(members, file)
        loaded = enfold.load(file, case.build)
        if loaded.training:
            raise Wrong("what was loaded is in train mode")
        case.compare(loaded(case.batch()), case.references, "loaded members")


@capability("save and load a network")
@torch.no_grad()
def save_network(case: Case) -> None:
    """Compare a network after `enfold.save` and `load_state_dict(load_file(...))` without enfold, and `enfold.load`."""
    inputs, network = case.batch(), DeepEnsemble(case.nets()).member(1)
    with stored() as file:
        enfold.save(network, file)
        fresh = case.build(1)
        try:
            fresh.load_state_dict(load_file(file))
        except RuntimeError as error:
            raise Wrong(f"plain load_state_dict(load_file()) fails: {' '.join(str(error).split())[:200]}") from error
        case.compare(case.outputs(fresh.eval(), inputs), case.references[1], "loaded without enfold")
        loaded = enfold.load(file, lambda: case.build(1))
        case.compare(case.outputs(loaded.eval(), inputs), case.references[1], "loaded by enfold")


# Training and evaluation


def plain_training(
    case: Case, index: int, batches: list[tuple[Tensor, Tensor]], plan: TrainConfig, *, rounded: bool = False
) -> nn.Module:
    """Return member `index` trained with plain PyTorch, from weights with rounding errors if `rounded`."""
    network = case.build(index, calm=True, train=True)
    learned = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if rounded:
        with torch.no_grad():
            for parameter in learned:
                parameter.mul_(1 + torch.finfo(parameter.dtype).eps * torch.randn_like(parameter))
    if plan.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            learned, lr=plan.lr, momentum=plan.momentum, weight_decay=plan.weight_decay
        )
    else:
        optimizer = torch.optim.AdamW(learned, lr=plan.lr, weight_decay=plan.weight_decay)
    for _ in range(plan.epochs):
        for inputs, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(case.outputs(network, inputs), labels).backward()
            optimizer.step()
    return network.eval()


def amplifies(case: Case, batches: list[tuple[Tensor, Tensor]], plan: TrainConfig) -> bool:
    """Return whether rounding errors of the initial weights change the result of training with plain PyTorch.

    Batch norms over four examples with one pixel each, and momentum, multiply an error by up to 1e10 in six steps.
    """
    alone, start = plain_training(case, 0, batches, plan), case.build(0, calm=True)
    seeded(6)
    other = plain_training(case, 0, batches, plan, rounded=True)
    try:
        case.compare_states(other, alone, moved(alone, start), "plain PyTorch")
    except Wrong:
        return True
    return False


def _fit(plan: TrainConfig, loader: bool) -> Check:
    def check(case: Case) -> str | None:
        try:
            return _compare_training(case, plan, loader)
        except Wrong as error:
            if case.dtype != torch.float64:
                raise  # it is repeated in float64
            data = case.data(loader=loader)
            batches = data.train if loader else [(data.train.inputs, data.train.labels)]
            if not amplifies(case, batches, plan):
                raise
            small = plan.replace(epochs=1, lr=plan.lr / 100, momentum=0.0)
            if amplifies(case, batches[:1], small):
                raise Skipped("plain PyTorch amplifies rounding errors in a single step") from error
            _compare_training(case, small, loader, most=1)
            return "plain PyTorch amplifies rounding errors: compared after one small step"

    return check


def _compare_training(case: Case, plan: TrainConfig, loader: bool, most: int | None = None) -> str | None:
    """Compare members after `fit` with networks that torch trained; with the first batches only if `most` is given."""
    data = case.data(loader=loader)
    if loader and most is not None:
        data = Data(data.train[:most], data.val, data.test, num_classes=data.num_classes, shape=data.shape)
    before = data.train.inputs.clone() if not loader else data.train[0][0].clone()
    members = DeepEnsemble(case.nets(calm=True))
    enfold.fit(members, data, config=plan, quiet=True)
    case.require_classes()
    now = data.train.inputs if not loader else data.train[0][0]
    if not torch.equal(before, now):
        raise Wrong("fit changed the data")
    if case.drawing():
        return "random even without dropout: not compared"
    if not loader and case.ordered():
        return "outputs depend on the order of a batch: not compared"
    batches = data.train if loader else [(data.train.inputs, data.train.labels)]
    for index in range(MEMBERS):
        alone, start = plain_training(case, index, batches, plan), case.build(index, calm=True)
        case.compare_states(members.member(index), alone, moved(alone, start), f"member {index} after training")
    return None


capability("fit, SGD, a loader")(_fit(STEP, loader=True))
ADAMW = STEP.replace(optimizer="adamw", lr=1e-3, weight_decay=0.1)
capability("fit, AdamW, in memory")(_fit(ADAMW, loader=False))


@capability("evaluate")
def evaluate(case: Case) -> None:
    """Compare NLL and accuracy of the mean prediction, twice, and check that data are unchanged."""
    members, data = DeepEnsemble(case.nets(train=True)), case.data()
    kept = data.test.inputs.clone()
    found = [enfold.evaluate(members, data).scores for _ in range(2)]
    case.require_classes()
    if not torch.equal(kept, data.test.inputs):
        raise Wrong("evaluate changed the data")
    with torch.no_grad():
        logits = torch.stack([case.outputs(network, kept) for network in case.nets()])
    mean, labels = logits.double().softmax(-1).mean(0), data.test.labels
    expected = {
        "nll": -float(mean.log().gather(1, labels[:, None]).mean()),
        "accuracy": float((mean.argmax(1) == labels).double().mean()),
    }
    for scores in found:
        for name, value in expected.items():
            if not abs(scores[name] - value) <= 1e-3 * max(1.0, abs(value)):
                raise Wrong(f"evaluate says {name} {scores[name]:.5f}, plain torch {value:.5f}")


@capability("cost")
def cost(case: Case) -> None:
    """Check the numbers of parameters and that operations are counted."""
    models = {"one": case.build(), "members": DeepEnsemble(case.nets())}
    found = enfold.measure(models, "one", case.batch()[0], batch_sizes=(1, 4), rounds=1, warmup=1)
    count = sum(parameter.numel() for parameter in case.build().parameters())
    for name, times in (("one", 1), ("members", MEMBERS)):
        if found[name].parameters != times * count:
            raise Wrong(f"cost counts {found[name].parameters} parameters of '{name}', there are {times * count}")


# Efficient ensembles

LONG = STEP.replace(epochs=8, lr=1e-3)


def small_ensembles() -> dict[str, tuple[Callable[[nn.Module], Ensemble], TrainConfig]]:
    """Return a function that makes a small ensemble of each method from a network, and how it is trained."""
    short = STEP.replace(epochs=1, lr=1e-3)
    options = {
        "HyperDeepEnsemble": {"candidates": 3, "chunk": 3},
        "SubspaceSampling": {"threshold": None},
        "SWAG": {"rank": 2},
        "Masksembles": {"min_features": 2},
    }
    epochs = {"FGE": 6, "SnapshotEnsemble": 3, "SWA": 4, "SWAG": 4, "SubspaceSampling": 4, "MultiSWA": 4}
    found: dict[str, tuple[Callable[[nn.Module], Ensemble], TrainConfig]] = {}
    for method in methods("ensemble").values():
        name = method.target.__name__
        given = options.get(name, {}) | ({} if name == "SWA" else {"num_members": MEMBERS})
        found[name] = (partial(method.target, **given), short.replace(epochs=epochs.get(name, 1)))
    return found


def _ensemble(name: str, make: Callable[..., Ensemble], plan: TrainConfig) -> Check:
    def check(case: Case) -> str | None:
        network, inputs = case.build(), case.batch()
        own = {"inject": 0.1} if name == "MCDropout" and not _drops(network) else {}
        with untouched(network):
            if name not in TRAINED_FIRST:
                model = make(network, **own)
                _finite(case, model, inputs, MEMBERS)
                _members_alone(case, model, inputs, "before training")
                _one_step(case, model, inputs)
            model = make(network, **own)
            enfold.fit(model, case.data(), config=plan, quiet=True)
        case.require_classes()
        several = int(model.num_members) if name in VARIABLE else MEMBERS
        _finite(case, model, inputs, several)
        _members_alone(case, model, inputs, "after training")
        return None

    return check


VARIABLE = ("SWA", "HyperDeepEnsemble", "Boosting")  # methods whose number of members is a result of the training
TRAINED_FIRST = ("FGE", "SnapshotEnsemble", "SWA", "SWAG", "SubspaceSampling", "HyperDeepEnsemble", "MultiSWA")


def _drops(network: nn.Module) -> bool:
    return any("Dropout" in type(module).__name__ and getattr(module, "p", 0) > 0 for module in network.modules())


@torch.no_grad()
def _finite(case: Case, model: nn.Module, inputs: Tensor, members: int) -> None:
    model.eval()
    found = model(inputs.clone())
    if tuple(found.shape) != (members, *case.shape):
        raise Wrong(f"outputs have the shape {tuple(found.shape)}, not {(members, *case.shape)}")
    if not bool(found.isfinite().all()) and bool(case.references.isfinite().all()):
        raise Wrong("outputs are not finite")


@torch.no_grad()
def _members_alone(case: Case, model: nn.Module, inputs: Tensor, when: str) -> None:
    """Compare every member with the network that `member` returns, also with its values in a network built again."""
    if not has_members(model):
        return
    model.eval()
    together = model(inputs.clone())
    for index in range(model.num_members):
        one = model.member(index).eval()
        case.compare(case.outputs(one, inputs), together[index], f"member {index} run alone {when}")
        if same_shapes(one, case.build()):
            found = [case.outputs(into_fresh(case, one.state_dict(), k), inputs) for k in range(MEMBERS)]
            nearest = min(found, key=lambda own: difference(own, together[index]))  # each network has its own code
            case.compare(nearest, together[index], f"values of member {index} in a new network {when}")


def has_members(model: nn.Module) -> bool:
    """Return whether members exist as networks, which those of MIMO and MC dropout do not."""
    try:
        model.member(0)
    except (AttributeError, EnfoldError):
        return False
    return True


def same_class(one: nn.Module, other: nn.Module) -> bool:
    """Return whether both have one class name: a class may be created again for every network."""
    ours, theirs = type(one), type(other)
    return (ours.__module__, ours.__qualname__) == (theirs.__module__, theirs.__qualname__)


def same_shapes(one: nn.Module, other: nn.Module) -> bool:
    """Return whether the state of one fits into the other."""
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        getattr(ours[name], "shape", None) == getattr(theirs[name], "shape", None) for name in ours
    )


def _one_step(case: Case, model: nn.Module, inputs: Tensor) -> None:
    """Check that a training step changes parameters and gives finite values."""
    model.train()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in learned]
    found = model(inputs.clone())
    loss = sum(case.loss(one) for one in found)
    loss.backward()
    torch.optim.SGD(learned, lr=1e-3).step()
    if all(torch.equal(a, b) for a, b in zip(before, learned, strict=True)):
        raise Wrong("a training step changed no parameter")
    model.eval()


for ensemble_name, (ensemble_method, ensemble_plan) in small_ensembles().items():
    capability(f"ensemble: {ensemble_name}")(_ensemble(ensemble_name, ensemble_method, ensemble_plan))


@capability("MC dropout on average")
@torch.no_grad()
def dropout_on_average(case: Case, draws: int = 48) -> None:
    """Compare the mean over samples with the network that has only its dropout in train mode."""
    network = case.build()
    if not _drops(network):
        raise Skipped("it has no dropout")
    model = enfold.MCDropout(network, draws).eval()
    found = model(case.batch())
    reference = case.build()
    for module in reference.modules():
        if "Dropout" in type(module).__name__:
            module.train()
    inputs = case.batch()
    seeded(8)
    expected = torch.stack([case.outputs(reference, inputs) for _ in range(draws)])
    error = ((found.var(0) + expected.var(0)) / draws).sqrt().clamp_min(1e-3 * expected.abs().max())
    score = ((found.mean(0) - expected.mean(0)) / error).pow(2).mean().sqrt()
    ratio = found.std(0).mean() / expected.std(0).mean().clamp_min(1e-9)
    if score > 4 or not 0.6 < ratio < 1.6:
        raise Wrong(f"over {draws} samples the mean is {score:.1f} standard errors away, the spread {ratio:.2f} times")


# Symmetries and merging


@capability("symmetries")
def symmetry(case: Case) -> str | None:
    """Check that outputs are unchanged by random orders of all groups."""
    network, inputs = case.build(), case.batch()
    with untouched(network):
        found = enfold.symmetries(network, inputs)
    before = case.references[0]
    fresh = permuted(case, found)
    with torch.no_grad():
        case.compare(case.outputs(fresh, inputs), before, "outputs after random orders")
    return f"{len(found.groups)} groups"


def permuted(case: Case, found: enfold.Symmetry) -> nn.Module:
    """Return member 0 with its units in random orders."""
    network = case.build()
    tensors = {
        **dict(network.named_parameters(remove_duplicate=False)),
        **dict(network.named_buffers(remove_duplicate=False)),
    }
    seeded(6)
    orders = {group.name: torch.randperm(group.size) for group in found.groups}
    changed = permute({name: tensor.detach().clone() for name, tensor in tensors.items()}, found, orders)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(changed[name])
    return network


@capability("weight matching of a permuted copy")
def matched_copy(case: Case) -> str | None:
    """Check that matched members compute the same function; a note tells whether the copy was found."""
    data = case.data()
    found = enfold.symmetries(case.build(), case.batch())
    if not found.groups:
        raise Skipped("no units may change places")
    pair = DeepEnsemble([case.build(), permuted(case, found)])
    matched = merge.align(pair, data).eval()
    with torch.no_grad():
        expected = case.references[:1].expand(2, *case.references.shape[1:])
        case.compare(matched(case.batch()), expected, "members in their new orders")
        one = merge.weight_matching(pair, data, repair="none").eval()
        off = difference(case.outputs(one, case.batch()), case.references[0])
    return "found" if off < 1e-2 else f"not found, {off:.0e} off"


QUICK = STEP.replace(epochs=1, lr=1e-3)
MERGES: dict[str, tuple[Merge, bool]] = {  # and whether equal members must give the same function
    "average": (partial(merge.average, repair="none"), True),
    "weight_matching": (partial(merge.weight_matching, repair="none"), True),
    "activation_matching": (partial(merge.activation_matching, repair="none"), True),
    "merge_many": (partial(merge.merge_many, repair="none"), True),
    "c2m3": (partial(merge.c2m3, repair="none", iterations=5), True),
    "straight_through": (partial(merge.straight_through, repair="none", epochs=1), True),
    "ot_fusion": (partial(merge.ot_fusion, repair="none"), True),
    "ot_fusion by weights": (partial(merge.ot_fusion, repair="none", cost="weights"), True),
    "cca_merge": (partial(merge.cca_merge, repair="none"), False),
    "zipit": (partial(merge.zipit, repair="none"), False),
    "soup": (partial(merge.soup, repair="none", kind="uniform"), True),
    "perm_avg": (partial(merge.perm_avg, config=QUICK, repair="none", quiet=True), False),
    "weight_matching, repair": (lambda models, data: _repair(merge.weight_matching, models, data), False),
    "average, closed-form repair": (lambda models, data: _repair(merge.average, models, data, "closed_form"), False),
}
ALIGNMENTS = ("weight_matching", "activation_matching", "merge_many", "c2m3", "straight_through")


def _repair(method: Merge, models: Ensemble, data: Data, kind: str = "repair") -> nn.Module:
    """Return the result of a merge with corrected activation statistics."""
    return merge.repair(method(models, data, repair="none"), models, data, kind=kind)


def _merge(name: str, method: Merge, same: bool) -> Check:
    def check(case: Case) -> str | None:
        data, inputs = case.data(), case.batch()
        if same:
            one = method(DeepEnsemble([case.build(), case.build()]), data)
            with torch.no_grad():
                case.compare(case.outputs(one.eval(), inputs), case.references[0], "the merge of two equal members", 5)
        sources = case.nets(2)
        with untouched(*sources):
            members = DeepEnsemble(sources)
            if name in ALIGNMENTS:
                options = {key: value for key, value in method.keywords.items() if key != "repair"}
                ordered = merge.align(members, data, method=name, **options).eval()
                with torch.no_grad():
                    case.compare(ordered(inputs.clone()), case.references[:2], "aligned members", 5)
            one = method(members, data)
        if not same_class(one, sources[0]):
            raise Wrong(f"a merge of {type(sources[0]).__name__} is a {type(one).__name__}")
        with torch.no_grad():
            found = case.outputs(one.eval(), inputs)
            case.compare(members.eval()(inputs.clone()), case.references[:2], "members after the merge")
        if not bool(found.isfinite().all()):
            raise Wrong("outputs of the merge are not finite")
        fresh = into_fresh(case, one.state_dict())
        with torch.no_grad():
            case.compare(case.outputs(fresh, inputs), found, "the values of the merge in a new network")
        return None

    return check


for merge_name, (merge_method, merge_same) in MERGES.items():
    capability(f"merge: {merge_name}")(_merge(merge_name, merge_method, merge_same))


# Distillation


@capability("distill: one step by hand")
def distill_step(case: Case) -> str | None:
    """Compare one step from the best member towards the mean probability with plain PyTorch."""
    data, plan = case.data(), STEP.replace(epochs=1, batch_size=12, momentum=0.0)
    sources = case.nets(calm=True)
    with untouched(*sources):
        one = enfold.distill(DeepEnsemble(sources), data, config=plan, quiet=True)
    case.require_classes()
    if case.drawing() or case.ordered():
        return "random even without dropout, or dependent on the order of a batch: not compared"
    with torch.no_grad():
        said = [case.outputs(network, data.train.inputs) for network in case.nets(calm=True)]
        kept = [case.outputs(network, data.val.inputs) for network in case.nets(calm=True)]
        target = torch.stack(said).softmax(-1).mean(0)
    best = int(torch.stack([F.cross_entropy(logits, data.val.labels) for logits in kept]).argmin())
    student = case.build(best, calm=True)
    with torch.no_grad():
        case.outputs(student, data.val.inputs)  # an embedding with max_norm is changed by what it looks up
    student.train()
    learned = [parameter for parameter in student.parameters() if parameter.requires_grad]
    F.cross_entropy(case.outputs(student, data.train.inputs), target).backward()
    torch.optim.SGD(learned, lr=plan.lr, weight_decay=plan.weight_decay).step()
    start = case.build(best, calm=True)
    case.compare_states(one, student, moved(student, start), "the student after one step")
    return None


def _distill(**options: object) -> Check:
    def check(case: Case) -> None:
        data, inputs, sources = case.data(), case.batch(), case.nets()
        paired = type(options.get("loss")) is enfold.OneToOne
        student = {"student": enfold.BatchEnsemble(case.build(), MEMBERS)} if paired else {}
        with untouched(*sources):
            members = DeepEnsemble(sources)
            one = enfold.distill(members, data, config=QUICK, quiet=True, **options, **student)
        case.require_classes()
        with torch.no_grad():
            found = one.eval()(inputs.clone()) if isinstance(one, Ensemble) else case.outputs(one.eval(), inputs)
            case.compare(members.eval()(inputs.clone()), case.references, "members after distillation")
        if not bool(found.isfinite().all()):
            raise Wrong("outputs of the student are not finite")
        _members_alone(case, one, inputs, "after distillation")

    return check


for loss in (enfold.AEKD, enfold.EnD2, enfold.ProxyEnD2, enfold.Hydra, enfold.LatentBE, enfold.OneToOne):
    capability(f"distill: {loss.__name__}")(_distill(loss=loss()))
capability("distill: ConfODS")(_distill(perturb=enfold.ConfODS()))


# Last, because tracing in several threads at the same time has broken processes


@capability("stacked: threads")
@torch.no_grad()
def threads(case: Case) -> None:
    """Compare outputs in four threads with separate inputs, twenty calls each."""
    batches = [case.batch(seed=30 + index) for index in range(4)]
    networks = case.nets()
    expected = [torch.stack([case.outputs(n, b) for n in networks]) for b in batches]

    def off(model: Callable[[Tensor], Tensor], thread: int, reference: Tensor) -> float:
        with torch.no_grad():
            return max(difference(model(batches[thread].clone()), reference) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        plain = [pool.submit(off, lambda x: case.outputs(networks[0], x), k, expected[k][0]) for k in range(4)]
        if max(one.result() for one in plain) > 1e-3:
            raise Skipped("the network itself cannot be called from several threads")
        members = DeepEnsemble(case.nets()).eval()
        found = [pool.submit(off, members, k, expected[k]) for k in range(4)]
        worst = max(one.result() for one in found)
    if not worst <= 1e-3:
        raise Wrong(f"called from four threads: {worst:.1e} off")
