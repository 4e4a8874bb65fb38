"""TensorBoard: metrics as scalars and settings as a table, in one folder per training."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enfold.errors import MissingExtra

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Write event files for ``tensorboard --logdir``.

    Args:
        folder: The folder of the training; a resumed training continues its curves in the same folder. None for a new
            folder in runs/tensorboard, named by date and time.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        try:
            import tensorboard  # noqa: F401 - torch.utils.tensorboard needs it
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard", "logger='tensorboard'") from error
        self._open = SummaryWriter
        self._writer: SummaryWriter | None = None
        self.folder = Path("runs/tensorboard", f"{datetime.now():%Y%m%d-%H%M%S-%f}") if folder is None else Path(folder)

    @property
    def writer(self) -> SummaryWriter:
        """The writer of the event files, for images and other records of your own."""
        if self._writer is None:
            self._writer = self._open(str(self.folder))
        return self._writer

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Write a table of the settings."""
        rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in settings.items()]
        self.writer.add_text("settings", "\n".join(["| setting | value |", "| --- | --- |", *rows]))
        self.writer.flush()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics as scalars."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # its thread would write after two minutes only

    def close(self) -> None:
        """Close the event file; further records open another one in the same folder."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _cell(value: object) -> str:
    """Return a value as the text of a cell of a Markdown table."""
    return str(value).replace("|", "\\|").replace("\n", " ")
