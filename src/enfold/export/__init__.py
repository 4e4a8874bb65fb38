"""Export: a network or an ensemble as one ONNX, torch.export or safetensors file, compared with its source."""

import sys
import types
from typing import Any

from enfold.export.result import Artefact, ExportResult
from enfold.export.write import export

__all__ = ["Artefact", "ExportResult", "export"]


class _Callable(types.ModuleType):
    """`enfold.export(...)` is `enfold.export.write.export(...)`."""

    def __call__(self, *args: Any, **kwargs: Any) -> ExportResult:
        return export(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
