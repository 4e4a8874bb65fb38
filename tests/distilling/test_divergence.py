"""The divergence is torch's own, and so is its gradient."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from enfold.distilling.divergence import divergence


@given(seed=st.integers(0, 10**6), temperature=st.sampled_from([0.5, 1.0, 4.0]), own=st.booleans())
def test_value_and_gradient_are_those_of_autograd(seed, temperature, own):
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 5, 4, generator=source, dtype=torch.float64).mul_(3).requires_grad_()
    target = torch.randn(*((3, 5, 4) if own else (5, 4)), generator=source, dtype=torch.float64).log_softmax(-1)
    weights = torch.rand(3, generator=source, dtype=torch.float64)
    soft = (logits / temperature).log_softmax(-1)
    apart = F.kl_div(soft, target.expand_as(soft), reduction="none", log_target=True)
    expected = temperature**2 * apart.sum(-1).mean(-1)
    (wanted,) = torch.autograd.grad((weights * expected).sum(), logits)
    found = divergence(logits, target, temperature)
    (gradient,) = torch.autograd.grad((weights * found).sum(), logits)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_have_the_type_of_the_logits(dtype):
    logits = torch.randn(1, 6, 3).to(dtype).requires_grad_()
    loss = divergence(logits, torch.randn(6, 3).log_softmax(-1), 2.0)
    loss.sum().backward()
    assert logits.grad.dtype == dtype
    assert torch.isfinite(logits.grad).all()
