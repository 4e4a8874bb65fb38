"""Networks of torchvision: a factory for ensembles, and the normalization that their weights were trained with."""

from __future__ import annotations

from typing import Any

from torch import nn

from enfold.errors import EnfoldError, MissingExtra
from enfold.integrations.named_factory import NamedFactory

try:
    from torchvision import models
except ImportError as missing:
    raise MissingExtra("torchvision", "torchvision", "enfold.integrations.torchvision") from missing


class ModelFactory(NamedFactory):
    """A function that makes a network of torchvision, ``DeepEnsemble(ModelFactory("resnet18", num_classes=10), 4)``.

    Args:
        name: The name of the network, as in `torchvision.models.list_models`.
        weights: Trained weights, such as "DEFAULT" or "IMAGENET1K_V2"; None for random ones.
        **options: Options of the network, such as `num_classes`.

    Raises:
        EnfoldError: If there is no such network, or no such weights.
    """

    def __init__(self, name: str, weights: str | None = None, **options: Any) -> None:
        shown = {} if weights is None else {"weights": weights}
        super().__init__("torchvision", name, models.list_models(), shown | options)
        known = models.get_model_weights(name).__members__
        if weights is not None and weights not in known:
            raise EnfoldError(f"weights must be one of {', '.join(known)} or None, got {weights!r}: change weights")
        self.weights = weights

    def __call__(self) -> nn.Module:
        """Return a network."""
        made: nn.Module = models.get_model(self.name, **self.options)
        return made

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of the channels for which the weights were trained, as `export` takes them."""
        transforms = models.get_model_weights(self.name)[self.weights or "DEFAULT"].transforms()
        return tuple(transforms.mean), tuple(transforms.std)
