"""Teachers and students of the classroom, and a way to see that they were left as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from classroom import STUDENTS, TEACHERS, make_pictures
from enfold.data import Data

PAIRS = [("cnn", "joint"), ("mlp", "share"), ("mixed", "stacked"), ("together", "share"), ("share", "together")]


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Who teaches whom."""
    return request.param


@pytest.fixture
def teachers(pair: tuple[str, str]) -> nn.Module:
    """Three teachers, in eval mode as while a distillation trains."""
    return TEACHERS[pair[0]]().eval()


@pytest.fixture
def student(pair: tuple[str, str]) -> nn.Module:
    """A student of three members, in train mode."""
    return STUDENTS[pair[1]]().train()


@pytest.fixture
def pictures() -> Data:
    """Normalised pictures."""
    return make_pictures()


@pytest.fixture
def snapshot() -> Callable[[nn.Module], Callable[[], bool]]:
    """Record a model; the returned function checks that values, gradients, requires_grad and modes are unchanged."""

    def remember(model: nn.Module) -> Callable[[], bool]:
        hidden = [code for part in model.modules() for code in getattr(part, "codes", [])]
        parts = [*model.modules(), *(one for code in hidden for one in code.network.modules())]
        values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        gradients = [parameter.grad for parameter in model.parameters()]
        modes, wants = [part.training for part in parts], [one.requires_grad for one in model.parameters()]

        def unchanged() -> bool:
            now = model.state_dict()
            pairs = zip(gradients, model.parameters(), strict=True)
            return (
                all(torch.equal(values[name], now[name]) for name in now)
                and all(before is one.grad and bool((before == 1).all()) for before, one in pairs)
                and modes == [part.training for part in parts]
                and wants == [one.requires_grad for one in model.parameters()]
            )

        return unchanged

    return remember
