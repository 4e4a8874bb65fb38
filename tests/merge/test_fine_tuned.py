"""What all merges of members fine-tuned from one network guarantee."""

from __future__ import annotations

import copy
import json
import sys
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import nn

from enfold import merge
from enfold.cli import main
from enfold.errors import EnfoldError
from enfold.networks.catalogue import make
from enfold.registry import methods
from fine_tuned import BASED, EVERY, IDENTITY, ZERO, family, images, merged

pytestmark = pytest.mark.filterwarnings("ignore::enfold.merge.soup.SingleModelWarning")
every = pytest.mark.parametrize("name", EVERY)
based = pytest.mark.parametrize("name", BASED)


def close(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()), **tolerance)


@every
def test_the_registry_finds_it(name):
    method = methods("merge")[name]
    assert "arXiv" in method.reference or name == "slerp"
    assert "Differs from the paper:" in method.reference


@every
def test_one_member_gives_itself(name):
    base, members = family(count=1)
    for options in ({}, IDENTITY.get(name, {})) if name != "wise_ft" else (IDENTITY[name],):
        found = merged(name, members, base, **options)
        assert all(torch.equal(found.state_dict()[key], t) for key, t in members[0].state_dict().items())
        assert type(found) is type(base)
        assert found is not members[0]


@pytest.mark.combinations
@every
@pytest.mark.parametrize("count", [2, 3])
def test_equal_members_give_the_same(name, count):
    base, members = family(count=1)
    found = merged(name, members * count, base, **IDENTITY.get(name, {}))
    torch.testing.assert_close(
        dict(found.named_parameters()), dict(members[0].named_parameters()), rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
@every
def test_the_order_of_members_does_not_matter(name):
    base, members = family()
    options = {"wise_ft": {"alpha": 0.6}, "ties": {"density": 0.5}}.get(name, {})
    first, *others = (merged(name, list(order), base, **options) for order in permutations(members))
    for other in others:
        close(first, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ZERO)
@pytest.mark.parametrize("count", [1, 3])
def test_weight_0_gives_the_base(name, count):
    base, members = family(count=count)
    close(merged(name, members, base, **ZERO[name]), base, rtol=0, atol=0)


@every
def test_ties_buffers_and_inputs_are_untouched(name):
    base, members = family()
    before = [copy.deepcopy(each.state_dict()) for each in (base, *members)]
    found = merged(name, members, base, **IDENTITY.get(name, {}))
    assert found.head.weight is found.embed.weight
    assert torch.equal(found.order, members[0].order)
    assert found.order.dtype == torch.int64
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.zero_()
    for each, state in zip((base, *members), before, strict=True):
        assert all(torch.equal(tensor, state[key]) for key, tensor in each.state_dict().items())
        assert all(parameter.grad is None for parameter in each.parameters())


@pytest.mark.slow
@every
def test_batch_norm_statistics_are_measured_on_train(name):
    base, members = family()
    found = merged(name, members, base, **IDENTITY.get(name, {}))
    outputs = found.grouped(torch.relu(found.conv(images()[0]))).detach()
    torch.testing.assert_close(found.norm.running_mean, outputs.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    stored = merged(name, members, base, repair="none", **IDENTITY.get(name, {}))
    mean = torch.stack([member.norm.running_var for member in members]).mean(0)
    torch.testing.assert_close(stored.norm.running_var, mean)


@every
def test_batch_norm_without_train_is_refused_unless_statistics_are_averaged(name):
    if name in ("fisher", "regmean"):
        pytest.skip("needs train")
    base, members = family()
    options = {**IDENTITY.get(name, {}), **({"base": base} if name in BASED else {})}
    with pytest.raises(EnfoldError, match="train"):
        getattr(merge, name)(members, **options)
    assert getattr(merge, name)(members, repair="none", **options) is not None


@pytest.mark.slow
@based
def test_the_base_may_be_a_state_dict_or_a_file(name, tmp_path):
    base, members = family()
    torch.save(base.state_dict(), tmp_path / "base.pt")
    options = IDENTITY.get(name, {})
    expected = merged(name, members, base, **options)
    state = base.state_dict()
    untied = {key: tensor for key, tensor in state.items() if key != "head.weight"}
    for given in (state, untied, str(tmp_path / "base.pt"), tmp_path / "base.pt"):
        close(merged(name, members, given, **options), expected, rtol=0, atol=0)


@pytest.mark.combinations
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("inner.bias"), "inner.bias"),
        (lambda state: state.update(more=torch.zeros(1)), "more"),
        (lambda state: state.update({"inner.bias": torch.zeros(7)}), "inner.bias"),
        (lambda state: state.update({"inner.bias": torch.full((4,), float("nan"))}), "inner.bias"),
        (lambda state: state.update({"head.weight": torch.zeros(5, 4)}), "head.weight"),
    ],
    ids=["missing", "unknown", "shape", "nan", "untied"],
)
@based
def test_another_base_is_refused_by_name(name, change, message):
    base, members = family()
    state = dict(base.state_dict())
    change(state)
    with pytest.raises(EnfoldError, match=message):
        merged(name, members, state, **IDENTITY.get(name, {}))


@based
@pytest.mark.parametrize("given", [3, [1], "nowhere.pt"], ids=str)
def test_what_is_no_base_is_refused(name, given):
    _, members = family()
    with pytest.raises(EnfoldError, match=r"base|nowhere"):
        merged(name, members, given, **IDENTITY.get(name, {}))


@pytest.mark.parametrize("name", [name for name in BASED if name != "lora"])
def test_a_base_is_needed(name):
    _, members = family()
    with pytest.raises(EnfoldError, match="base"):
        merged(name, members, None, **IDENTITY.get(name, {}))


@pytest.mark.slow
def test_all_are_steps_of_a_recipe_and_commands(tmp_path, monkeypatch, capsys):
    source = torch.Generator().manual_seed(0)
    images_, labels = torch.randint(256, (120, 1, 4, 4), generator=source), torch.arange(120) % 3
    arrays = {
        "x_train": images_[:90].byte(),
        "y_train": labels[:90],
        "x_test": images_[90:].byte(),
        "y_test": labels[90:],
    }
    np.savez(tmp_path / "d.npz", **{name: tensor.numpy() for name, tensor in arrays.items()})
    torch.save(make({"name": "mlp", "widths": [4]}, (1, 4, 4), 3).state_dict(), tmp_path / "base.pt")
    steps = [f"{{method: {name}{', base: base.pt' if name in BASED else ''}}}" for name in EVERY]
    (tmp_path / "recipe.yaml").write_text(
        "data: {source: d.npz, val_size: 30}\nnetwork: {name: mlp, widths: [4]}\nmembers: 2\ncost: false\n"
        "train: {epochs: 1}\nsteps:\n" + "".join(f"  - {step}\n" for step in steps)
    )
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "run", "recipe.yaml", "out", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows.keys() >= set(EVERY)
    more = ("merge", "out", "wise_ft", "--label", "half", "--set", "base=base.pt", "--set", "alpha=0.5")
    assert call(monkeypatch, *more) == 0
    assert call(monkeypatch, "merge", "out", "ties", "--label", "without") == 2
    assert "base" in capsys.readouterr().err


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["enfold", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


class TwoInputs(nn.Module):
    """A network with two inputs, which get names or places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layer(first + second)))


@pytest.mark.parametrize("name", [*EVERY, "average", "soup"])
def test_batches_may_have_several_inputs(name):
    base, *members = [TwoInputs() for _ in range(3)]
    inputs, labels = torch.randn(32, 3), torch.arange(32) % 3
    options = {**IDENTITY.get(name, {}), **({"base": base} if name in BASED else {})}
    named, placed = [{"first": inputs, "second": 2 * inputs, "labels": labels}], [(inputs, 2 * inputs, labels)]
    one, other = (
        getattr(merge, name)(members, train=batches, **options, **({"val": batches} if name == "soup" else {}))
        for batches in (named, placed)
    )
    close(one, other)
