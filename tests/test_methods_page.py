"""The page of methods is made from the registry and is up to date."""

import importlib.util
from pathlib import Path

import enfold
from enfold.registry import PACKAGES, methods

ROOT = Path(__file__).parent.parent


def test_the_page_is_what_the_registry_gives():
    spec = importlib.util.spec_from_file_location("make_methods_page", ROOT / "tools" / "make_methods_page.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert maker.PAGE.read_text(encoding="utf-8") == maker.page(), "run python tools/make_methods_page.py"


def test_every_method_is_a_public_name():
    for kind in PACKAGES:
        for method in methods(kind).values():
            owner = enfold.merge if kind == "merge" else enfold
            assert getattr(owner, method.target.__name__) is method.target
