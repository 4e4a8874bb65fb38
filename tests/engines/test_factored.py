"""Weights that are shared except for two vectors, applied without expanding them."""

import pytest
import torch

from enfold.engines.factored import Factored
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.networks import MLP

M, B, IN, OUT = 3, 5, 4, 6
MANY = 2 * OUT  # rows, beside which the weight is small and is scaled in place of the inputs


def factors(inputs_shape, bias_members=M, requires_grad=True):
    torch.manual_seed(0)
    shapes = (inputs_shape, (OUT, IN), (M, IN), (M, OUT), (bias_members, OUT))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad) for shape in shapes]


def by_hand(inputs, weight, r, s, bias):
    members = [weight * torch.outer(s[m], r[m]) for m in range(M)]
    rows = [inputs if inputs.ndim == 2 else inputs[m] for m in range(M)]
    return torch.stack([rows[m] @ members[m].t() + bias[m % len(bias)] for m in range(M)])


@pytest.mark.parametrize("rows", [B, MANY - 1, MANY])
@pytest.mark.parametrize("own", [False, True], ids=["shared inputs", "own inputs"])
@pytest.mark.parametrize("bias_members", [1, M])
@pytest.mark.parametrize("wants", [True, False])
def test_product_and_gradients_are_those_of_the_members_weights(rows, own, bias_members, wants):
    tensors = factors((M, rows, IN) if own else (rows, IN), bias_members)
    tensors[0].requires_grad_(wants)
    inputs, weight, r, s, bias = tensors
    found = Factored(weight, r, s).product(inputs, bias)
    expected = by_hand(*tensors)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    asked = tensors if wants else tensors[1:]
    for ours, theirs in zip(
        torch.autograd.grad(found, asked, grad), torch.autograd.grad(expected, asked, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rows", [B, MANY])
def test_gradients_may_be_taken_twice_and_of_a_product_without_bias(rows):
    inputs, weight, r, s, _ = factors((rows, IN))
    found = Factored(weight, r, s).product(inputs, None).sum()
    expected = by_hand(inputs, weight, r, s, torch.zeros(1, OUT, dtype=torch.float64)).sum()
    asked = inputs, weight, r, s
    once, twice = (torch.autograd.grad(found, asked, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(once, torch.autograd.grad(expected, asked))
    torch.testing.assert_close(twice, once, rtol=0, atol=0)


def test_no_bias_and_no_gradient():
    inputs, weight, r, s, _ = factors((B, IN), requires_grad=False)
    with torch.no_grad():
        found = Factored(weight, r, s).product(inputs, None)
    torch.testing.assert_close(found, by_hand(inputs, weight, r, s, torch.zeros(1, OUT, dtype=torch.float64)))
    assert len(Factored(weight, r, s)) == M


@pytest.mark.parametrize("rows", [B, 16])
@pytest.mark.parametrize("bias", ["member", "shared_post", "shared_pre"])
def test_training_by_factors_gives_the_gradients_of_expand(bias, rows):
    torch.manual_seed(0)
    members = BatchEnsemble(MLP(IN, [8, 8], 3), num_members=M, bias=bias).double().train()
    inputs = torch.randn(rows, IN, dtype=torch.float64)
    gradients = []
    for engine in ("stacked", "loop"):
        members.zero_grad()
        members.set_engine(engine)(inputs).square().sum().backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in members.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1])


def test_eval_mode_caches_the_weights_and_detects_changes():
    members = BatchEnsemble(MLP(IN, [8], 3), num_members=M).eval()
    made = []
    expand = members.expand
    members.expand = lambda: made.append(1) or expand()  # type: ignore[method-assign]
    inputs = torch.randn(B, IN)
    with torch.no_grad():
        first = members(inputs)
        before = len(made)
        torch.testing.assert_close(members(inputs), first, rtol=0, atol=0)
        assert len(made) == before
        next(members.parameters()).add_(1.0)
        changed = members(inputs)
        assert not torch.equal(changed, first)
        members.load_state_dict({name: torch.zeros_like(value) for name, value in members.state_dict().items()})
        assert not members(inputs).any()
    members(inputs).sum().backward()
    assert next(members.parameters()).grad is not None
