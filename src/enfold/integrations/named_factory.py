"""What the factories of packages with named networks have in common."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from enfold.errors import EnfoldError, closest


class NamedFactory:
    """A function that makes a network by its name.

    Args:
        package: The name of the package, for messages.
        name: The name of the network.
        known: The names of all networks.
        options: Arguments of the network.

    Raises:
        EnfoldError: If there is no such network.
    """

    def __init__(self, package: str, name: str, known: Collection[str], options: dict[str, Any]) -> None:
        plain = name.partition(".")[0]  # timm appends the name of the weights
        if plain not in known:
            near = closest(plain, known)
            suggestion = f", did you mean '{near}'?" if near else ""
            raise EnfoldError(f"name must be a network of {package}, got '{name}'{suggestion}: see its list_models()")
        self.name, self.options = name, options

    def __repr__(self) -> str:
        return f"ModelFactory({', '.join([repr(self.name), *(f'{k}={v!r}' for k, v in self.options.items())])})"
