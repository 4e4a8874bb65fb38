"""What the bits of a training depend on beside its inputs: threads, processor, PyTorch."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

REMEDIES = {
    "threads": "set OMP_NUM_THREADS={old}",
    "torch": "install torch=={old}",
    "engine": "use set_engine('{old}')",
    "matmul precision": "use torch.set_float32_matmul_precision('{old}')",
}


def environment() -> dict[str, str]:
    """Return what a resumed training must share with the interrupted one to end with the same bits."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    processor = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
    return {
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "processor": processor,
        "matmul precision": torch.get_float32_matmul_precision(),
        **({} if accelerator is None else {"accelerator": _accelerator(str(accelerator))}),
    }


def changed_environment(before: object, now: Mapping[str, str]) -> str:
    """Return what differs from a stored environment, with what to do; an empty string if nothing does.

    Args:
        before: What was stored, of any form: a file may have been written by another version, or damaged.
        now: The current environment.
    """
    old = before if isinstance(before, Mapping) else {}
    changed = [name for name in old if name in now and old[name] != now[name]]
    if not changed:
        return ""
    what = ", ".join(f"{name} ({str(old[name])[:60]}, now {now[name]})" for name in changed)
    remedies = [REMEDIES[name].format(old=str(old[name])[:60]) for name in changed if name in REMEDIES]
    return f"{what}: {', '.join(remedies) or 'continue on the same machine'} for the same bits"


@cache
def _processor() -> str:
    """Return the model of the processor; libraries select their kernels by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor() or platform.machine() or os.name)


def _accelerator(name: str) -> str:
    import torch

    return torch.cuda.get_device_name() if name.startswith("cuda") else name
