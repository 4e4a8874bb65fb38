"""torch.export of members: it gives what they give, and leaves them as they were."""

from functools import partial

import pytest
import torch

import enfold
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.tree_net import TreeNet
from enfold.networks import MLP
from zoo import CLASSES

MAKERS = {
    "stacked": lambda network: enfold.DeepEnsemble(network, 3),
    "batch ensemble": partial(BatchEnsemble, num_members=3),
    "tree": partial(TreeNet, num_members=3),
}


@pytest.mark.combinations
@pytest.mark.parametrize(("called_before", "grad"), [(True, False), (False, True)])
@pytest.mark.parametrize("kind", MAKERS)
def test_exported_members_are_equal_and_remain_usable(kind, called_before, grad):
    torch.manual_seed(0)
    network, inputs = MLP(12, [8], CLASSES), torch.randn(4, 12)
    members, twin = (MAKERS[kind](network).eval() for _ in range(2))
    with torch.set_grad_enabled(grad):
        expected = twin(inputs)
        if called_before:
            members(inputs)
        exported = torch.export.export(members, (inputs,))
        found = members(inputs)
    assert type(found) is torch.Tensor, "nothing without values is left behind"
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(exported.module()(inputs), expected)
    torch.testing.assert_close(members.member(1)(inputs), expected[1])
