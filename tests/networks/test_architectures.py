"""What every reference network owes: its published size, logits of every example, every parameter's gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from enfold.errors import EnfoldError
from enfold.networks import MLP, FastResNet, MediumCNN, ResNet, ResNet20, SmallCNN, ViT, WideResNet

SMALL: dict[str, Callable[[tuple[int, int, int]], nn.Module]] = {
    "mlp": lambda shape: MLP(shape[0] * shape[1] * shape[2], (16, 8), 5),
    "linear": lambda shape: MLP(shape[0] * shape[1] * shape[2], (), 5),
    "medium-cnn": lambda shape: MediumCNN(shape, 5, channels=(8, 8, 8, 8)),
    "small-cnn": lambda shape: SmallCNN(shape, 5),
    "resnet": lambda shape: ResNet(shape[0], 5, depth=8, width=8),
    "resnet-pad": lambda shape: ResNet(shape[0], 5, depth=8, width=8, shortcut="pad"),
    "fast-resnet": lambda shape: FastResNet(shape[0], 5, stem=4, widths=(8, 8)),
    "wide-resnet": lambda shape: WideResNet(10, 1, 5, shape[0]),
    "vit": lambda shape: ViT(shape, 5, width=16, depth=2, heads=2),
    "vit-class": lambda shape: ViT(shape, 5, width=16, depth=2, heads=2, pooling="class"),
}
SHAPES = [(3, 32, 32), (1, 28, 28), (2, 20, 12)]


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: MLP(784, (512, 256, 128), 10), 567_434),
        (lambda: MLP(3072, (512,), 10), 3072 * 512 + 512 + 512 * 10 + 10),
        (lambda: MediumCNN((3, 32, 32), 10), 971_146),
        (lambda: SmallCNN((3, 32, 32), 10), 19_466),
        (lambda: ResNet20(), 272_474),
        (lambda: ResNet20(shortcut="pad"), 269_722),
        (lambda: ResNet(depth=56, shortcut="pad"), 853_018),
        (lambda: FastResNet(), 1_978_026),
        (lambda: WideResNet(28, 10, 10), 36_479_194),
        (lambda: WideResNet(28, 10, 100), 36_536_884),
        (lambda: WideResNet(28, 5, 100), 9_161_524),
        (lambda: WideResNet(28, 4, 100), 5_872_180),
        (lambda: ViT((3, 32, 32)), 207_690),
        (lambda: ViT((1, 28, 28)), 204_682),
    ],
)
def test_parameter_counts(make: Callable[[], nn.Module], expected: int) -> None:
    with torch.device("meta"):
        assert count(make()) == expected


def test_wide_resnet_28_10_has_28_convolutions_and_25_norms_over_8976_channels() -> None:
    with torch.device("meta"):
        modules = list(WideResNet(28, 10).modules())
    norms = [module for module in modules if isinstance(module, nn.BatchNorm2d)]
    assert sum(isinstance(module, nn.Conv2d) for module in modules) == 28
    assert len(norms) == 25
    assert sum(norm.num_features for norm in norms) == 8_976


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_logits_and_gradients(name: str, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    network = SMALL[name](shape)
    logits = network(torch.randn(4, *shape))
    assert logits.shape == (4, 5)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3])).backward()
    without = [key for key, p in network.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize("name", SMALL)
def test_examples_do_not_depend_on_each_other_in_eval_mode(name: str) -> None:
    network = SMALL[name]((3, 16, 16)).eval()
    inputs = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(network(inputs)[1:2], network(inputs[1:2]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_graph_can_be_traced(name: str) -> None:
    network = SMALL[name]((3, 16, 16)).eval()
    inputs = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(torch.fx.symbolic_trace(network)(inputs), network(inputs))


@pytest.mark.parametrize("name", SMALL)
def test_the_seed_decides_the_initial_weights(name: str) -> None:
    def state(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return SMALL[name]((1, 8, 8)).state_dict()

    first, again, other = state(1), state(1), state(2)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MLP(784, 512, 10), "widths must be a list"),  # type: ignore[arg-type]
        (lambda: MLP(784, (512, 0), 10), "widths"),
        (lambda: MLP(0), "in_features .*got 0"),
        (lambda: MLP(dropout=1.0), "dropout must be at least 0 and below 1, got 1.0"),
        (lambda: MLP(num_classes=True), "num_classes"),
        (lambda: MediumCNN((32, 32)), "shape"),
        (lambda: MediumCNN(channels=()), "channels must have at least 1 entry"),
        (lambda: ResNet(depth=21), "depth .*got 21"),
        (lambda: ResNet(depth=2), "depth .*got 2"),
        (lambda: ResNet(shortcut="none"), "shortcut must be one of projection, pad, got 'none'"),
        (lambda: WideResNet(27), "depth .*got 27"),
        (lambda: WideResNet(28, 0), "widen_factor must be"),
        (lambda: ViT((3, 30, 32)), "patch"),
        (lambda: ViT(heads=3), "heads"),
        (lambda: ViT(pooling="max"), "pooling must be one of mean, class"),
    ],
)
def test_wrong_arguments_are_named(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(EnfoldError, match=message):
        make()
