"""Equations of docstrings as text, TeX and MathML."""

import xml.etree.ElementTree as ElementTree

import pytest

from enfold.registry import PACKAGES, methods
from website.notation import runs, tex


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("W_m", r"W_{m}"),
        ("θ̄_m", r"\bar{\theta}_{m}"),
        ("r_mj^T", r"r_{mj}^{\top}"),
        ("x_mᵀ", r"x_{m}^{\top}"),
        ("σ²_n", r"\sigma ^{2}_{n}"),
        ("T_{l-1}^-1", r"T_{l-1}^{-1}"),
        ("S_xx^-½", r"S_{xx}^{-1/2}"),
        ("P_(l-1)n", r"P_{(l-1)n}"),
        ("θ_π(m)[i]", r"\theta _{\pi (m)}[i]"),
        ("√(1 - λ)", r"\sqrt{1 - \lambda } "),
        ("<a, b>", r"\langle a, b\rangle "),
        ("a < b", r"a < b"),
        ("μ*", r"\mu ^{*}"),
        ("i ≠ j", r"i \neq  j"),
        ("softmax(z)", r"\operatorname{softmax}(z)"),
        ("E_(x, y)", r"E_{x, y}"),
    ],
)
def test_the_notation_of_docstrings_becomes_tex(text, expected):
    assert tex(text) == expected


def test_prose_and_formulas_are_told_apart():
    found = [(run.text, run.is_prose) for run in runs("w_n = 1/N at the start; then for m = 1")]
    assert found == [("w_{n} = 1/N ", False), ("at the start; then for ", True), ("m = 1", False)]
    assert [run.is_prose for run in runs("(the same for rank 1)")] == [True]
    assert runs("`repair` of y")[0].text == "<code>repair</code> of "


@pytest.mark.parametrize("kind", PACKAGES)
def test_the_equations_of_every_method_are_rendered(kind):
    pytest.importorskip("latex2mathml")
    import sys

    from website.equations import block

    for method in methods(kind).values():
        lines = [line for line in sys.modules[method.target.__module__].__doc__.splitlines() if line.startswith("    ")]
        html = block("\n".join(lines))
        tree = ElementTree.fromstring(html)  # noqa: S314 - our own
        assert len(tree.findall(".//tr")) == len([line for line in lines if line.strip()]), method.name
        assert "merror" not in html
