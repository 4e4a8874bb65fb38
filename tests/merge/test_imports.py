"""What a merge imports: its helpers and `repair`, and no other merge; the package has functions, not modules."""

from __future__ import annotations

from types import FunctionType

import pytest

import enfold.merge
from enfold.method_files import method_files
from fresh import loaded_by

METHODS = method_files(enfold.merge.__path__)


@pytest.mark.parametrize(
    ("merge", "expected"), [("perm_avg", {"perm_avg", "repair"}), ("weight_matching", {"weight_matching", "repair"})]
)
def test_a_merge_imports_no_other_merge(merge, expected):
    modules = loaded_by(f"from enfold.merge import {merge}")
    loaded = {name.removeprefix("enfold.merge.") for name in modules if name.startswith("enfold.merge.")}
    assert loaded & set(METHODS) == expected
    assert "enfold.ensembles.batch_ensemble" not in modules


def test_the_package_has_the_functions_of_its_files():
    import enfold.merge.weight_matching as imported

    assert imported is enfold.merge.weight_matching
    assert set(METHODS) <= set(dir(enfold.merge))
    for name in METHODS:
        assert isinstance(getattr(enfold.merge, name), FunctionType), name
    with pytest.raises(AttributeError, match="no_such_merge"):
        enfold.merge.no_such_merge  # noqa: B018
