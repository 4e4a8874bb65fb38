"""Small data that a small network can learn."""

import torch

from enfold.data import Data, Split


def three_clouds(*counts: int) -> Data:
    """Three noisy classes in four dimensions, with given numbers of training, validation and test examples."""
    generator = torch.Generator().manual_seed(0)

    def part(count: int) -> Split:
        labels = torch.randint(3, (count,), generator=generator)
        return Split(torch.eye(4)[labels] + 0.6 * torch.randn(count, 4, generator=generator), labels)

    return Data(*(part(count) for count in counts), 3, (4,))
