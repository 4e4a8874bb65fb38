"""`import enfold` is cheap: it costs little more than torch, and needs no optional package."""

import json
import statistics
import subprocess
import sys

import pytest

from fresh import run_python

OPTIONAL = (
    "PIL",
    "hypothesis",
    "matplotlib",
    "onnx",
    "pandas",
    "pytest",
    "ray",
    "sklearn",
    "torchmetrics",
    "torchvision",
)

LATER = ("rich", "scipy", "typer", "yaml")  # installed, but not needed by all: imported where they are used

MEASURE = """
import json, sys, time
import torch
before = time.process_time()
import enfold
print(json.dumps({"torch": before, "enfold": time.process_time(), "modules": sorted(sys.modules)}))
"""


@pytest.mark.slow
def test_importing_costs_little_more_than_torch():
    """Processor seconds of fresh processes: the clock would measure how busy the machine is."""
    found = [json.loads(subprocess.check_output([sys.executable, "-c", MEASURE], text=True)) for _ in range(3)]
    assert statistics.median(one["enfold"] / one["torch"] for one in found) <= 1.3


def test_enfold_works_without_optional_packages_and_imports_none():
    code = (
        "import json, sys\n"
        "import enfold\n"
        "modules = sorted(sys.modules)\n"
        f"sys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"  # None makes an import fail
        "missing = [name for name in enfold.__all__ if getattr(enfold, name) is None]\n"
        "print(json.dumps({'modules': modules, 'missing': missing}))"
    )
    found = json.loads(run_python(code, check=True).stdout)
    assert "enfold.engines" in found["modules"]
    assert [name for name in (*OPTIONAL, *LATER) if name in found["modules"]] == []
    assert found["missing"] == []


def test_every_public_name_exists():
    import enfold

    missing = [name for name in enfold.__all__ if not hasattr(enfold, name)]
    assert missing == []
    assert set(enfold.__all__) <= set(dir(enfold))
    assert not hasattr(enfold, "nothing_of_this_name")


def test_user_data_can_be_built_from_public_names():
    """As an error says that asks for it."""
    import torch

    import enfold

    part = enfold.Split(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))
    data = enfold.Data(part, part, part, num_classes=2, shape=(3,))
    assert isinstance(data, enfold.data.Data)
    assert {"Data", "Split"} <= set(enfold.__all__)
