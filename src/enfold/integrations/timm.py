"""Networks of timm: a factory for ensembles, and the normalization that their weights were trained with."""

from __future__ import annotations

from typing import Any

from torch import nn

from enfold.errors import MissingExtra
from enfold.integrations.named_factory import NamedFactory

try:
    import timm
except ImportError as missing:
    raise MissingExtra("timm", "timm", "enfold.integrations.timm") from missing


class ModelFactory(NamedFactory):
    """A function that makes a network of timm, for ``DeepEnsemble(ModelFactory("resnet18", num_classes=10), 4)``.

    With ``pretrained=True``, members have the same weights, except for the head if `num_classes` is not that of the
    weights.

    Args:
        name: The name of the network, as in `timm.list_models`.
        **options: Options of `timm.create_model`, such as `num_classes`, `in_chans` and `pretrained`.

    Raises:
        EnfoldError: If there is no such network.
    """

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__("timm", name, timm.list_models(), options)

    def __call__(self) -> nn.Module:
        """Return a network."""
        made: nn.Module = timm.create_model(self.name, **self.options)
        return made

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of the channels for which the weights were trained, as `export` takes them."""
        about = timm.get_pretrained_cfg(self.name)
        return tuple(about.mean), tuple(about.std)
