"""Networks and data sets of Hugging Face: a factory of networks for ensembles, and loaders for `fit`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, default_collate

from enfold.data.unpack import TARGETS
from enfold.errors import EnfoldError, MissingExtra, closest

Collate = Callable[[list[Any]], Any]


class ModelFactory:
    """A function that makes networks from a configuration, for ``DeepEnsemble(factory, 4)``.

    Args:
        auto: A class with `from_config`, such as `transformers.AutoModelForSequenceClassification`.
        config: The configuration. It is copied for each network.
        **options: Options of `from_config`.

    Raises:
        EnfoldError: If the class has no `from_config`, or the configuration is none of transformers.
    """

    def __init__(self, auto: Any, config: Any, **options: Any) -> None:
        if not callable(getattr(auto, "from_config", None)):
            raise EnfoldError(
                f"auto must be a class with from_config, got {auto!r}: pass for example "
                "AutoModelForSequenceClassification"
            )
        if not hasattr(config, "model_type") or not hasattr(config, "to_dict"):
            raise EnfoldError(
                f"config must be a configuration of transformers, got a {type(config).__name__}: pass for example "
                "AutoConfig.from_pretrained(name)"
            )
        self.auto, self.config, self.options = auto, config, options

    def __call__(self) -> nn.Module:
        """Return a network with random weights."""
        made: nn.Module = self.auto.from_config(copy.deepcopy(self.config), **self.options)
        return made

    def __repr__(self) -> str:
        return f"ModelFactory({self.auto.__name__}, {type(self.config).__name__})"


def make_loader(
    dataset: Any,
    batch_size: int = 32,
    *,
    columns: Sequence[str] | None = None,
    label: str | None = None,
    shuffle: bool = False,
    collate: Collate | None = None,
) -> DataLoader[Any]:
    """Return the batches of a `datasets.Dataset` for `fit`, `distill` and `evaluate`: dictionaries with `labels`.

    Rows are read as tensors, from any format, and images (the features `Image` and `Array3D` of bytes) as numbers from
    0 to 1, (C, H, W). A dataset with a transform of its own (`with_transform`) is read as it is.

    Args:
        dataset: A `datasets.Dataset`, or an `IterableDataset`, which is read in its own order.
        batch_size: Examples per batch.
        columns: The columns that are inputs of the network, by keyword; None for all but the label.
        label: The column of the targets; None for the one named labels, label, targets, target or y.
        shuffle: Whether to draw a new order in each epoch.
        collate: A function from a list of rows to a batch, such as `DataCollatorWithPadding(tokenizer)`.

    Raises:
        EnfoldError: If there is no such column, or a column has text.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra("datasets", "hf", "make_loader") from error
    if isinstance(dataset, dict):
        raise EnfoldError(
            f"dataset must be one split, got a dictionary of {', '.join(map(str, dataset))}: pass dataset['train']"
        )
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        raise EnfoldError(
            f"dataset must be a datasets.Dataset, got a {type(dataset).__name__}: pass it to fit itself, or use "
            "datasets.Dataset.from_dict"
        )
    is_stream = isinstance(dataset, datasets.IterableDataset)
    if is_stream and shuffle:
        raise EnfoldError(
            "shuffle must be False for an IterableDataset, got True: pass dataset.shuffle(buffer_size=1000)"
        )
    target, images = label, frozenset[str]()
    if not _has_transform(dataset):
        names = list(dataset.column_names or [])
        target = _find_label(names, label)
        chosen = [name for name in names if name != target] if columns is None else list(columns)
        _check_columns(dataset, names, chosen, target, has_collate=collate is not None)
        if collate is None:
            images = _find_images(dataset.features)
        dataset = dataset.select_columns([*chosen, target]).with_format(None if collate is not None else "torch")
    options: dict[str, Any] = {} if is_stream else {"shuffle": shuffle}
    joined = _Joined(collate or default_collate, target, images)
    return DataLoader(dataset, batch_size=batch_size, collate_fn=joined, **options)


class _Joined:
    """A collate function whose batches have the target as `labels`."""

    def __init__(self, collate: Collate, target: str | None, images: frozenset[str]) -> None:
        self.collate, self.target, self.images = collate, target, images

    def __call__(self, rows: list[Any]) -> Any:
        try:
            batch = self.collate(rows)
        except RuntimeError as error:
            if "stack expects" not in str(error) and "equal size" not in str(error):
                raise
            raise EnfoldError(
                f"the rows of each column must have one size, got several ({error}): pass collate=, such as "
                "DataCollatorWithPadding(tokenizer)"
            ) from error
        if not hasattr(batch, "items"):
            return batch
        found = {name: value.float() / 255 if name in self.images else value for name, value in batch.items()}
        if self.target is not None and self.target in found and self.target not in TARGETS:
            found["labels"] = found.pop(self.target)
        return found


def _find_images(features: Any) -> frozenset[str]:
    """Return the names of the columns with images of bytes."""
    kinds = {name: type(feature).__name__ for name, feature in (features or {}).items()}
    return frozenset(
        name
        for name, kind in kinds.items()
        if kind == "Image" or (kind == "Array3D" and getattr(features[name], "dtype", "") == "uint8")
    )


def _has_transform(dataset: Any) -> bool:
    return (getattr(dataset, "format", None) or {}).get("type") == "custom"


def _find_label(names: list[str], label: str | None) -> str:
    found = label or next((name for name in TARGETS if name in names), None)
    if found is None or (names and found not in names):
        near = closest(str(label), names) if label else None
        raise EnfoldError(
            f"label must be the column of the targets, one of {', '.join(names)}, got {label!r}: "
            + (f"did you mean {near!r}?" if near else "pass label=")
        )
    return found


def _check_columns(dataset: Any, names: list[str], chosen: list[str], target: str, *, has_collate: bool) -> None:
    missing = [name for name in chosen if name not in names] if names else []
    if missing or not chosen:
        raise EnfoldError(
            f"columns must be columns of the dataset, {', '.join(names)}, got {missing[0] if missing else 'none'!r}: "
            "change columns"
        )
    texts = [name for name, feature in (dataset.features or {}).items() if "string" in str(feature)]
    if target in texts:
        raise EnfoldError(
            f"label must be a column of numbers, got '{target}' with text: pass dataset.class_encode_column('{target}')"
        )
    given = [name for name in chosen if name in texts]
    if given and not has_collate:
        others = [name for name in chosen if name not in texts]
        raise EnfoldError(
            f"columns must be numbers, got '{given[0]}' with text: tokenize it, or pass columns={others!r}"
        )
