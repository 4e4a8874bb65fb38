"""Every public name has a docstring, and a place on the documentation site."""

import importlib
import inspect

import enfold
from website import api, methods

NAMES = sorted(
    {(api.path_of(module, name), module, name) for module in api.MODULES for name in api.public_names(module)}
)


def test_every_public_name_has_a_docstring():
    assert len(NAMES) > 400
    assert [path for path, module, name in NAMES if not is_documented(module, name)] == []


def is_documented(module, name):
    owner = importlib.import_module(module)
    value = getattr(owner, name)
    if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
        return bool((value.__doc__ or "").strip())
    return name in vars(owner) or any(line.startswith(name) for line in inspect.getsource(owner).splitlines())


def test_the_names_of_enfold_are_on_its_page():
    text = api.pages()["docs/api/enfold.md"]
    assert all(f"| [`{name}`](" in text for name in enfold.__all__)


def test_every_method_has_a_page_with_its_idea_and_options():
    from enfold.registry import PACKAGES
    from enfold.registry import methods as registered

    pages = methods.pages()
    for kind in PACKAGES:
        for method in registered(kind).values():
            text = pages[f"docs/methods/{methods.page_of(method)}.md"]
            assert text.startswith(f"# {method.target.__name__}\n")
            assert f"::: {method.target.__module__}.{method.target.__qualname__}" in text
            assert "## Method" in text


def test_advice_is_about_methods_that_exist():
    from enfold.registry import PACKAGES, method_names

    known = {name for kind in PACKAGES for name in method_names(kind)}
    assert methods.when_to_use().keys() <= known
    assert all(text.endswith(".") for text in methods.when_to_use().values())
