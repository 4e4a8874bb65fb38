"""Every public name has a docstring, and a place on the documentation site."""

import html
import importlib
import inspect
import re

import markdown

import enfold
from website import api, methods

NAMES = sorted(
    {(api.path_of(module, name), module, name) for module in api.MODULES for name in api.public_names(module)}
)


OBJECTS = [(path, getattr(importlib.import_module(module), name)) for path, module, name in NAMES]
CALLED = [
    (path, value)
    for path, value in OBJECTS
    if (inspect.isclass(value) or inspect.isfunction(value))
    and not getattr(value, "_is_protocol", False)
    and not (inspect.isclass(value) and issubclass(value, Exception))
]
SAME = re.compile(r"(?i)arguments (?:are those|as for|as in) (?:of )?`\w+`")


def described(value) -> set[str]:
    """Return the names in the `Args:` section of a function, or of a class and its constructor."""
    texts = [inspect.getdoc(value), inspect.getdoc(value.__init__) if inspect.isclass(value) else None]
    sections = [re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", f"{text or ''}\n", re.MULTILINE) for text in texts]
    entries = [
        each for found in sections if found for each in re.findall(r"^ {4}([*\w, ]+)(?: \(.*?\))?:", found[1], re.M)
    ]
    return {name.strip(" *") for entry in entries for name in entry.split(",")}


def undescribed(value) -> list[str]:
    """Return the arguments of a function or a class that its docstring does not describe."""
    if SAME.search(inspect.getdoc(value) or ""):
        return []
    return [name for name in inspect.signature(value).parameters if name not in {*described(value), "self"}]


def says_what_it_returns(value) -> bool:
    """Return whether a docstring names the result, if there is one."""
    text = inspect.getdoc(value) or ""
    result = inspect.signature(value).return_annotation
    first = text.split("\n\n")[0]
    return result in ("None", None, "Iterator[None]") or "return" in first.lower() or "\nReturns:\n" in text


def test_every_public_name_has_a_description():
    assert len(NAMES) > 400
    assert [path for path, module, name in NAMES if not api.summary(module, name).endswith((".", ":"))] == []


def test_all_arguments_of_public_names_are_described():
    assert {path: names for path, value in CALLED if (names := undescribed(value))} == {}


def test_public_functions_say_what_they_return():
    functions = [(path, value) for path, value in CALLED if inspect.isfunction(value)]
    assert len(functions) > 200
    assert [path for path, value in functions if not says_what_it_returns(value)] == []


def test_a_missing_argument_is_found():
    def documented(first, second):
        """Return both.

        Args:
            first: One.
        """

    assert undescribed(documented) == ["second"]


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


def test_texts_of_methods_are_shown_as_they_are():
    text = "w_m * x_n, (1 - 1/s)^M ~ a < b > c, [1] and |y|, $5 and #2, \\d, `a_b*c`"
    shown = re.sub(r"<[^>]*>", "", markdown.markdown(methods.escape(text), extensions=["tables"]))
    assert html.unescape(shown) == text.replace("`", "")
