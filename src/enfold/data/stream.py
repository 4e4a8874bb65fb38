"""Streams: batches from shards on disk, parquet or tar files, without ever holding all examples.

Shards are read one after the other, in a new order in each epoch, and pass through a buffer from which examples are
drawn at random. The order follows the random seed of torch at the start of an epoch, which `fit` sets: a resumed
training sees the same batches.
"""

from __future__ import annotations

import io
import tarfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from enfold.arguments import checked
from enfold.errors import EnfoldError, MissingExtra
from enfold.io.files import parsing

Row = Mapping[str, Any]
CHUNK = 1024  # rows of a parquet file that are read at a time
END = 1024  # bytes of zeros at the end of a tar archive
LARGEST = 1 << 28  # bytes of one file in a tar archive
TEXTS = ("cls", "txt", "id")  # endings of files in tar archives that contain an integer


@checked
class Stream:
    """Batches (inputs, targets) from shards, for `fit`, `distill` and everything else that takes a loader.

    >>> rows = [{"x": [1.0, 2.0], "y": 0}, {"x": [3.0, 4.0], "y": 1}]
    >>> [targets.tolist() for _, targets in Stream(rows, inputs="x", target="y", batch_size=2)]
    [[0, 1]]

    Args:
        source: Files as a path, a glob pattern or a list: `.parquet`, or `.tar` with the files of an example under one
            name (`0001.png`, `0001.cls`), as WebDataset writes them; or an iterable of dictionaries, such as a
            streaming dataset of Hugging Face, which is iterated again in every epoch.
        inputs: The column, or the ending of the file in an archive, of the inputs. Bytes are decoded as images
            (C, H, W).
        target: The column, or the ending, of the target.
        batch_size: Examples of a batch; the last one may be smaller.
        shuffle: Examples in the buffer that a random one is taken from; 0 to keep the order of shards and examples.
        transform: Function of the inputs of one example, a tensor, such as a crop; None for none.
    """

    def __init__(
        self,
        source: str | Path | Sequence[str | Path] | Iterable[Row],
        *,
        inputs: str,
        target: str,
        batch_size: PositiveInt = 128,
        shuffle: NonNegativeInt = 0,
        transform: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.inputs, self.target, self.batch_size, self.shuffle = inputs, target, batch_size, shuffle
        self.transform = transform
        self.files = _find(source)
        self.rows: Iterable[Row] = () if self.files else source  # type: ignore[assignment]
        if any(file.suffix == ".parquet" for file in self.files):
            _parquet()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draws = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        batch: list[tuple[Tensor, Tensor]] = []
        for row in _shuffled(self._rows(draws), self.shuffle, draws):
            batch.append(self._example(row))
            if len(batch) == self.batch_size:
                yield _stack(batch)
                batch = []
        if batch:
            yield _stack(batch)

    def _rows(self, draws: torch.Generator) -> Iterator[Row]:
        if not self.files:
            yield from self.rows
            return
        order = torch.randperm(len(self.files), generator=draws).tolist() if self.shuffle else range(len(self.files))
        for index in order:
            yield from _read(self.files[index], (self.inputs, self.target))

    def _example(self, row: Row) -> tuple[Tensor, Tensor]:
        missing = [name for name in (self.inputs, self.target) if name not in row]
        if missing:
            raise EnfoldError(
                f"every example must have '{missing[0]}', got one with {', '.join(map(str, row)) or 'nothing'}: change "
                "inputs or target"
            )
        inputs = _as_tensor(row[self.inputs])
        return inputs if self.transform is None else self.transform(inputs), _as_tensor(row[self.target])


def _find(source: Any) -> list[Path]:
    """Return the files of a source, sorted; empty for rows."""
    if isinstance(source, str | Path):
        path = Path(source)
        found = [path] if path.is_file() else sorted(path.parent.glob(path.name))
    elif isinstance(source, Sequence) and all(isinstance(each, str | Path) for each in source):
        found = [Path(each) for each in source]
    else:
        return []
    wrong = [file for file in found if file.suffix not in (".parquet", ".tar") or not file.is_file()]
    if wrong or not found:
        got = f"'{wrong[0]}'" if wrong else f"'{source}', which matches none"
        raise EnfoldError(f"source must be existing .parquet or .tar files, got {got}: correct the path or the pattern")
    return found


def _read(file: Path, names: tuple[str, str]) -> Iterator[Row]:
    remedy = "write it again, or leave it out"
    rows = _read_parquet(file, names) if file.suffix == ".parquet" else _read_tar(file)
    what = "a parquet file" if file.suffix == ".parquet" else "an uncompressed tar archive"
    while True:
        with parsing(file, what, remedy):
            row = next(rows, None)
        if row is None:
            return
        yield row


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "data", "a stream of parquet files") from error
    return parquet


def _read_parquet(file: Path, names: tuple[str, str]) -> Iterator[Row]:
    with _parquet().ParquetFile(file) as opened:
        known = set(opened.schema_arrow.names)
        if not known.issuperset(names):
            missing = next(name for name in names if name not in known)
            raise EnfoldError(f"'{file}' must have the column '{missing}', got {', '.join(sorted(known))}: change it")
        for chunk in opened.iter_batches(CHUNK, columns=list(names)):
            columns = [_values(chunk.column(name)) for name in names]
            for values in zip(*columns, strict=True):
                yield dict(zip(names, values, strict=True))


def _values(column: Any) -> Sequence[Any]:
    """Return the values of a column of pyarrow; lists of numbers of one length are rows of an array."""
    from pyarrow import types

    if column.null_count == 0 and (types.is_integer(column.type) or types.is_floating(column.type)):
        return column.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
    if types.is_fixed_size_list(column.type) and column.null_count == 0:
        flat = column.flatten()
        if flat.null_count == 0 and (types.is_integer(flat.type) or types.is_floating(flat.type)):
            rows = flat.to_numpy(zero_copy_only=False).reshape(len(column), -1)
            return [row.copy() for row in rows]  # a view would keep the complete chunk in the buffer
    return column.to_pylist()  # type: ignore[no-any-return]


def _read_tar(file: Path) -> Iterator[Row]:
    """Yield the files of each example; they follow one another in the archive."""
    _require_complete(file)
    with tarfile.open(file, "r:") as archive:
        key, row = "", dict[str, Any]()
        for entry in archive:
            if not entry.isfile():
                continue
            name, _, ending = Path(entry.name).name.partition(".")
            stem = str(Path(entry.name).parent / name)
            if row and stem != key:
                yield row
                row = {}
            if entry.size > LARGEST:
                raise ValueError(f"'{entry.name}' has {entry.size:,} bytes")
            opened = archive.extractfile(entry)
            content = b"" if opened is None else opened.read()
            key, row[ending] = stem, int(content) if ending in TEXTS else content
            archive.members = []  # type: ignore[attr-defined] # which would grow with the archive
        if row:
            yield row


def _require_complete(file: Path) -> None:
    """Refuse an archive without the zeros at its end, which tarfile would read as a shorter one."""
    with file.open("rb") as content:
        content.seek(-min(END, file.stat().st_size), io.SEEK_END)
        end = content.read()
    if len(end) < END or any(end):
        raise ValueError("it ends early")


def _shuffled(rows: Iterator[Row], size: int, draws: torch.Generator) -> Iterator[Row]:
    """Yield rows from a buffer of this size at random."""
    buffer: list[Row] = []
    for row in rows:
        if len(buffer) < size:
            buffer.append(row)
            continue
        if not size:
            yield row
            continue
        index = int(torch.randint(size, (), generator=draws))
        yield buffer[index]
        buffer[index] = row
    for index in torch.randperm(len(buffer), generator=draws).tolist():
        yield buffer[index]


def _as_tensor(value: Any) -> Tensor:
    """Return a value as a tensor; bytes, also in a dictionary of Hugging Face, are an image."""
    content = value.get("bytes") if isinstance(value, Mapping) else value
    if isinstance(content, bytes):
        return _decode(content)
    found = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    return found.float() if found.dtype == torch.float64 else found


def _decode(content: bytes) -> Tensor:
    """Return an image as bytes (C, H, W)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("pillow", "data", "a stream of images") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            pixels = np.array(Image.open(io.BytesIO(content)))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise EnfoldError(
            f"inputs in bytes must be an image, got {len(content):,} bytes that cannot be read ({error}): choose "
            "another column, or write numbers"
        ) from error
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())


def _stack(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    shapes = list(dict.fromkeys(tuple(inputs.shape) for inputs, _ in batch))
    if len(shapes) > 1:
        raise EnfoldError(
            f"inputs of a stream must have one shape, got {shapes[0]} and {shapes[1]}: pass transform, such as a crop"
        )
    inputs, targets = (torch.stack(part) for part in zip(*batch, strict=True))
    return inputs.float().div_(255) if inputs.dtype == torch.uint8 else inputs, targets
