"""Outputs that are not the logits of classes are refused by name, not averaged over some axis."""

from __future__ import annotations

import warnings
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from enfold import Data, DeepEnsemble, MixedEnsemble, Split, TrainConfig, distill, evaluate, fit, predict
from enfold.errors import DroppedOutputWarning, EnfoldError
from enfold.train.objective import batch_outputs

NETWORKS = {
    "dense": (lambda: nn.Conv2d(1, 3, 3, padding=1), (1, 8, 8)),
    "tokens": (lambda: nn.Linear(4, 3), (5, 4)),
    "one output": (lambda: nn.Linear(4, 1), (4,)),
    "no axis of classes": (lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), (4,)),
}


def data_of(shape: tuple[int, ...]) -> Data:
    inputs, labels = torch.randn(12, *shape), torch.arange(12) % 3
    return Data(Split(inputs, labels), Split(inputs + 1, labels), Split(inputs + 2, labels), None, shape)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", [DeepEnsemble, MixedEnsemble])
def test_forward_mean_and_evaluation_refuse_them(name, kind):
    make, shape = NETWORKS[name]
    members = kind([make() for _ in range(3)])
    with pytest.raises(EnfoldError, match="classes"):
        members.forward_mean(torch.randn(4, *shape))
    with pytest.raises(EnfoldError, match="task"):
        evaluate(members, data_of(shape))
    assert members(torch.randn(4, *shape)).shape[:2] == (3, 4), "the members' own outputs are there"


@pytest.mark.parametrize("name", NETWORKS)
def test_training_by_cross_entropy_refuses_them(name):
    make, shape = NETWORKS[name]
    members = DeepEnsemble([make() for _ in range(2)])
    with pytest.raises(EnfoldError, match="task"):
        fit(members, data_of(shape).replace(val=[]), config=TrainConfig(epochs=1), quiet=True)


def test_a_user_objective_may_use_one_output():
    make, shape = NETWORKS["one output"]
    members = DeepEnsemble([make() for _ in range(2)])
    history = fit(
        members,
        data_of(shape).replace(val=[]),
        config=TrainConfig(epochs=1),
        objective=lambda model, batch: batch_outputs(model, batch).square().mean((1, 2)),
        quiet=True,
    )
    assert len(history.epochs) == 1


class More(nn.Module):
    """A network that returns more than its logits, as a dictionary, an object or a named tuple."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 3), kind

    def forward(self, inputs: torch.Tensor) -> object:
        fields = {"logits": self.layer(inputs), f"aux_{self.kind}": inputs, "loss": None}
        if self.kind == "dictionary":
            return fields
        return SimpleNamespace(**fields) if self.kind == "object" else namedtuple("Output", fields)(**fields)


@pytest.mark.filterwarnings("error:a network returns")
@pytest.mark.parametrize("kind", ["dictionary", "object", "tuple"])
def test_dropped_outputs_give_one_warning(kind):
    network = More(kind)
    with pytest.warns(DroppedOutputWarning, match=f"aux_{kind} beside"):
        predict(network, data_of((4,)).test)
    predict(network, data_of((4,)).test)


def test_an_object_with_logits_only_gives_no_warning():
    network, inputs = nn.Sequential(More("dictionary"), Only()), data_of((4,)).test
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = predict(network, inputs)
    expected = network(inputs.inputs)["logits"].detach().log_softmax(-1)
    torch.testing.assert_close(found.log_probs[0], expected.to(found.log_probs.dtype))


class Only(nn.Module):
    """The logits and None."""

    def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        return {"logits": given["logits"], "aux": None}


def test_a_new_student_of_the_members_class_has_their_output():
    class Half(nn.Linear):
        """Logits for every second column, which a function repeats."""

        def forward(self, inputs):
            return {"halves": super().forward(inputs)}

    def full(found):
        return found["halves"].repeat_interleave(2, 1)

    rows, labels = torch.randn(12, 4), torch.arange(12) % 6
    ensemble = DeepEnsemble(lambda: Half(4, 3), 2)
    fit(ensemble, (rows, labels), epochs=1, outputs=full, quiet=True)
    student = distill(ensemble, (rows, labels), student=lambda: Half(4, 3), epochs=1, quiet=True)
    assert evaluate(student, (rows, labels)).scores.keys() >= {"nll"}


def test_members_that_note_the_size_of_a_batch_are_equal():
    """Each call sets the attribute to the same value, in train mode, too."""

    class Noting(nn.Linear):
        def forward(self, inputs):
            self.rows = len(inputs)
            return super().forward(inputs)

    ensemble = DeepEnsemble(lambda: Noting(3, 2), 2)
    ensemble(torch.ones(4, 3))
    assert ensemble.mismatch is None
