"""The divergence is torch's own, and so is its gradient."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from enfold.distill.losses.common.divergence import as_target, divergence


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), temperature=st.sampled_from([0.5, 1.0, 4.0]), own=st.booleans())
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_value_and_gradient_are_those_of_torch(dtype, close, seed, temperature, own):
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 5, 4, generator=source, dtype=dtype).mul_(3).requires_grad_()
    target = torch.randn(*((3, 5, 4) if own else (5, 4)), generator=source, dtype=dtype).log_softmax(-1)
    weights = torch.rand(3, generator=source, dtype=dtype)
    soft = (logits / temperature).log_softmax(-1)
    apart = F.kl_div(soft, target.expand_as(soft), reduction="none", log_target=True)
    expected = temperature**2 * apart.sum(-1).mean(-1)
    (wanted,) = torch.autograd.grad((weights * expected).sum(), logits)
    found = divergence(logits, as_target(target), temperature)
    (gradient,) = torch.autograd.grad((weights * found).sum(), logits)
    torch.testing.assert_close(found / temperature**2, expected / temperature**2, rtol=close, atol=close)
    torch.testing.assert_close(gradient, wanted, rtol=close, atol=close)


def test_classes_of_probability_zero_have_finite_gradients():
    target = as_target(torch.tensor([[0.0, -200.0, -torch.inf]]).log_softmax(-1).nan_to_num(neginf=-1e4))
    logits = torch.zeros(1, 1, 3, requires_grad=True)
    loss = divergence(logits, target, 1.0)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([3.0]).log())
    torch.testing.assert_close(logits.grad[0, 0], torch.tensor([-2 / 3, 1 / 3, 1 / 3]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_have_the_type_of_the_logits(dtype):
    logits = torch.randn(1, 6, 3).to(dtype).requires_grad_()
    loss = divergence(logits, as_target(torch.randn(6, 3).log_softmax(-1)), 2.0)
    loss.sum().backward()
    assert logits.grad.dtype == dtype
    assert torch.isfinite(logits.grad).all()
