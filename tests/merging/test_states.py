"""Networks that can be looked at in part: merged there, and the user is told; not at all: refused."""

import pytest
import torch
from torch import Tensor, nn

from enfold import EnfoldError, Stacked
from enfold.data import Data, Split
from enfold.fold import WeightMatching
from enfold.merging.states import Unaligned


class Deciding(nn.Module):
    """What follows the first part depends on its values."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.head = first, nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.head(hidden if float(hidden.sum()) > 0 else -hidden)


@pytest.fixture
def data() -> Data:
    rows = Split(torch.randn(8, 4), torch.arange(8) % 3)
    return Data(rows, rows, rows, 3, (4,))


def test_units_inside_a_part_that_is_known_are_matched_and_the_rest_is_told_of(data: Data) -> None:
    network = Deciding(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6)))
    turned = Deciding(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6)))
    order = torch.tensor([3, 0, 4, 1, 2])
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    for name, axis in (("first.0.weight", 0), ("first.0.bias", 0), ("first.2.weight", 1)):
        state[name] = state[name].index_select(axis, order)
    turned.load_state_dict(state)
    with pytest.warns(Unaligned, match=r"some units are averaged as they are, because .* decides by a value") as told:
        merged = WeightMatching(repair="none")(Stacked([network, turned]), data)
    assert told[0].filename == __file__, "the warning points at the user's line"
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], tensor)


def test_a_network_of_which_nothing_is_known_is_refused(data: Data) -> None:
    members = Stacked.make(lambda: Deciding(nn.Linear(4, 6)), 2)
    with pytest.raises(EnfoldError, match="decides by a value: use average or a distillation for it"):
        WeightMatching()(members, data)
