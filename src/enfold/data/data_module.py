"""Data modules of Lightning as data, recognised by their methods, so that no package is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from enfold.errors import EnfoldError

LOADERS = {"train": "train_dataloader", "val": "val_dataloader", "test": "test_dataloader"}
STAGES = {"train": "fit", "val": "fit", "test": "test"}
BASES = ("lightning.", "pytorch_lightning.")  # modules whose methods raise an error until they are overridden
_PREPARED: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # the stages that were set up


def is_data_module(examples: object) -> bool:
    """Return whether this is a data module: an object with loaders by method, and no network."""
    has_loaders = all(callable(getattr(examples, name, None)) for name in LOADERS.values())
    return has_loaders and callable(getattr(examples, "setup", None)) and not hasattr(examples, "parameters")


def read_loader(module: Any, name: str) -> Any:
    """Return a loader of a data module after its `prepare_data` and `setup`; None if it has none.

    Args:
        module: The data module.
        name: The split: "train", "val" or "test".

    Raises:
        EnfoldError: If there are several loaders for the split.
    """
    method = getattr(module, LOADERS[name])
    if not _is_overridden(method):
        return None
    _set_up(module, STAGES[name])
    loader = method()
    several = isinstance(loader, list | tuple | dict) and not _is_batches(loader)
    if several and len(loader) == 1:
        return next(iter(loader.values() if isinstance(loader, dict) else loader))
    if several and len(loader) > 1:
        raise EnfoldError(
            f"{LOADERS[name]} must return one loader, got {len(loader)}: pass the loaders of one of them as {name}"
        )
    return None if several else loader


def require_loader(module: Any, name: str) -> Any:
    """Return a loader of a data module.

    Raises:
        EnfoldError: If it has none for this split.
    """
    loader = read_loader(module, name)
    if loader is None:
        raise EnfoldError(
            f"{name} must have a loader, but {type(module).__name__} has no {LOADERS[name]}: define it, or pass "
            f"another loader as {name}"
        )
    return loader


def _set_up(module: Any, stage: str) -> None:
    """Prepare a module once for each stage: a second `setup` may split the examples differently."""
    done = _PREPARED.setdefault(module, set())
    if not done:
        module.prepare_data()
    if stage not in done:
        module.setup(stage)
        done.add(stage)


def _is_overridden(method: Callable[[], Any]) -> bool:
    where = getattr(getattr(method, "__func__", method), "__module__", "")
    return not str(where).startswith(BASES) or "from_datasets" in getattr(method, "__qualname__", "")


def _is_batches(loader: Any) -> bool:
    """Return whether a list is one of batches, and not of loaders."""
    first = next(iter(loader.values() if isinstance(loader, dict) else loader), None)
    return isinstance(first, list | tuple | dict)
