"""Statistics measured again are those of the training part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from enfold.data import Data, Split
from enfold.errors import EnfoldError
from enfold.train.batch_norm import reestimate


def numbers(*shape: int) -> Data:
    inputs = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 1
    return Data(Split(inputs, torch.zeros(shape[0], dtype=torch.long)), [], [], 2, shape[1:])


def test_one_batch_gives_the_moments_of_the_split():
    data = numbers(100, 4)
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    with torch.no_grad():
        hidden = network[0](data.train.inputs)
    reestimate(network, data)
    torch.testing.assert_close(network[1].running_mean, hidden.mean(0))
    torch.testing.assert_close(network[1].running_var, hidden.var(0))


def test_images_are_averaged_over_batch_and_positions():
    data = numbers(20, 2, 3, 3)
    network = nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(18, 2)).double()
    reestimate(network, data)
    torch.testing.assert_close(network[0].running_mean, data.train.inputs.mean((0, 2, 3)))
    flat = data.train.inputs.transpose(0, 1).flatten(1)
    torch.testing.assert_close(network[0].running_var, flat.var(1))


def test_a_batch_counts_by_its_examples():
    """The mean over batches of 8, 8 and 4 is the mean over all 20; the variance is the weighted one of the batches."""
    data = numbers(20, 3)
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    reestimate(network, data, batch_size=8)
    torch.testing.assert_close(network[0].running_mean, data.train.inputs.mean(0))
    rough = data.train.inputs.var(0)
    torch.testing.assert_close(network[0].running_var, rough, rtol=0.3, atol=0)
    assert not torch.allclose(network[0].running_var, rough)


def test_a_loaders_batches_in_closed_form():
    first, second = numbers(6, 3).train.inputs, numbers(2, 3).train.inputs
    loader = [(x, torch.zeros(len(x), dtype=torch.long)) for x in (first, second)]
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    reestimate(network, Data(loader, [], [], 2, (3,)))
    torch.testing.assert_close(network[0].running_mean, (6 * first.mean(0) + 2 * second.mean(0)) / 8)
    torch.testing.assert_close(network[0].running_var, (6 * first.var(0) + 2 * second.var(0)) / 8)


def test_a_norm_that_is_called_twice_averages_both_calls():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(10 + self.norm(inputs)))

    data = numbers(50, 3)
    network = Twice().double()
    reestimate(network, data)
    torch.testing.assert_close(network.norm.running_mean, (data.train.inputs.mean(0) + 10) / 2)


@pytest.mark.parametrize("size", [1, 8])
def test_instance_norms_with_statistics_are_measured(size):
    """Means over examples of each one's own mean and variance, also from batches of one."""
    data = numbers(20, 2, 3, 3)
    inputs, labels = data.train.inputs, data.train.labels
    network = nn.Sequential(nn.InstanceNorm2d(2, momentum=0.3, track_running_stats=True), nn.Flatten()).double()
    network.append(nn.Linear(18, 2).double())
    loader = list(zip(inputs.split(size), labels.split(size), strict=True))
    reestimate(network.eval(), data.replace(train=loader))
    torch.testing.assert_close(network[0].running_mean, inputs.mean((0, 2, 3)))
    torch.testing.assert_close(network[0].running_var, inputs.var((2, 3)).mean(0))
    assert network[0].momentum == 0.3
    assert not network[0].training


def test_other_tensors_are_not_changed():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=0.3), nn.Dropout(0.9), nn.Linear(3, 2)).double()
    network.train()
    network[2].eval()
    before = {name: tensor.clone() for name, tensor in network.named_parameters()}
    noise = torch.random.get_rng_state()
    reestimate(network, numbers(300, 4))
    assert all(torch.equal(before[name], tensor) for name, tensor in network.named_parameters())
    assert [part.training for part in network] == [True, True, False, True]
    assert network[1].momentum == 0.3
    assert not network[1]._forward_pre_hooks
    assert torch.equal(noise, torch.random.get_rng_state())
    assert int(network[1].num_batches_tracked) == 2  # 256 and 44


def test_momentum_is_restored_after_an_exception():
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    with pytest.raises(EnfoldError, match="must yield batches"):
        reestimate(network, Data(iter(()), [], [], 2, (3,)))
    assert network[0].momentum == 0.1
    assert not network[0]._forward_pre_hooks


def test_a_network_without_statistics_is_unchanged():
    for network in (nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)):
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        reestimate(network, numbers(5, 2))  # nothing to do, also not a forward in another precision
        torch.testing.assert_close(dict(network.state_dict()), before, rtol=0, atol=0)
