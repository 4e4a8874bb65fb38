"""What the files of distillation import: KD needs neither efficient ensembles nor merging."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import enfold.distill
from fresh import loaded_by

FOLDER = Path(enfold.distill.__file__).parent
BUILDERS = {"one_to_one.py", "hydra.py", "latent_be.py"}  # losses that build their student


def test_kd_imports_no_other_family():
    loaded = [name for name in loaded_by("import enfold.distill.losses.kd") if name.startswith("enfold.")]
    assert "enfold.distill.losses.kd" in loaded
    for family in ("enfold.ensembles.batch_ensemble", "enfold.ensembles.mimo", "enfold.merge", "enfold.symmetry"):
        assert not [name for name in loaded if name == family or name.startswith(f"{family}.")]
    losses = {name for name in loaded if name.startswith("enfold.distill.losses.") and ".common" not in name}
    assert losses == {"enfold.distill.losses.kd"}


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")), ids=lambda file: file.relative_to(FOLDER).as_posix())
def test_files_import_no_merge_and_no_efficient_ensemble(file):
    for node in ast.walk(ast.parse(file.read_text())):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            assert not module.startswith(("enfold.merge", "enfold.run", "enfold.registry")), module
            if module.startswith("enfold.ensembles") and module != "enfold.ensembles.deep_ensemble":
                assert file.name in BUILDERS, module


def test_the_package_is_callable():
    assert enfold.distill.distill is not None
    assert callable(enfold.distill)
    with pytest.raises(enfold.EnfoldError, match="train"):
        enfold.distill(None, None)
