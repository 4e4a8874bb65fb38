"""The plain notation of equations in docstrings, read as text and TeX: `θ̄_m = (1/M) Σ_m W_m r_m^T`.

A symbol is one letter; what follows `_` or `^` is its index: letters, a group in braces or parentheses, or a negative
number. Words of two letters and more are prose, except names of functions, words with an index or an argument, and
abbreviations in capitals.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

FUNCTIONS = frozenset(
    ["arccos", "argmax", "argmin", "blockdiag", "cos", "exp", "ln", "log", "max", "min", "mod", "sin", "softmax"]
)
ACCENTS = {"\u0304": r"\bar", "\u0303": r"\tilde", "\u0302": r"\hat"}
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ᵀ", [*"0123456789-", r"\top"], strict=True))
LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
SIGNS = {
    "<-": r"\leftarrow ",
    "←": r"\leftarrow ",
    "->": r"\to ",
    "→": r"\to ",
    "<=": r"\le ",
    ">=": r"\ge ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\neq ",
    "≈": r"\approx ",
    "±": r"\pm ",
    "||": r"\| ",
    "‖": r"\| ",
    "|": r"| ",
    "...": r"\ldots ",
    "..": r"\ldots ",
    "·": r"\cdot ",
    "∘": r"\circ ",
    "⊕": r"\oplus ",
    "×": r"\times ",
    "∈": r"\in ",
    "∇": r"\nabla ",
    "∂": r"\partial ",
    "∧": r"\wedge ",
    "~": r"\sim ",
    "{": r"\{ ",
    "}": r"\} ",
    "½": r"\tfrac{1}{2} ",
    "ℓ": r"\ell ",
    "Σ": r"\sum\limits",
    ":": ": ",
}
TOKEN = re.compile(
    r"(?P<code>`[^`]+`|\"[^\"]+\")"
    r"|(?P<name>[A-Za-z]{2,}(?:_[A-Za-z]{2,})+)"
    r"|(?P<word>[A-Za-z]{2,}(?:['-][a-z]+|')?)"
    r"|(?P<number>\d+(?:\.\d+)?)"
    r"|(?P<raised>[⁰¹²³⁴⁵⁶⁷⁸⁹⁻ᵀ]+)"
    r"|(?P<lowered>[₀-₉]+)"
    r"|(?P<index>[_^])"
    r"|(?P<sign><-|->|<=|>=|\|\||\.\.\.|\.\.|.)",
    re.DOTALL,
)
REMARK = re.compile(r"\(([A-Za-z]{2,})(?:[ ,'-][A-Za-z0-9 ,'-]*)?\)")
ARTICLE = re.compile(r" a (?!step|in)[a-z]{3,}")


@dataclass
class Run:
    """A part of a line: prose, or TeX."""

    text: str
    is_prose: bool


def runs(text: str) -> list[Run]:
    """Return the prose and the formulas of a piece of a line, in order."""
    found: list[Run] = []
    for part in _Reader(unicodedata.normalize("NFD", text).replace("=\u0338", "≠")).read():
        if (found and found[-1].is_prose == part.is_prose) or (found and part.text in (", ", "; ", ". ", ": ", " ")):
            found[-1].text += part.text
        else:
            found.append(part)
    return found


def tex(text: str) -> str:
    """Return a formula as TeX; prose in it is text."""
    return "".join(rf"\text{{{run.text}}}" if run.is_prose else run.text for run in runs(text))


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def read(self) -> list[Run]:
        """Return the runs of the whole text."""
        found = []
        while self.at < len(self.text):
            found.append(self.take())
        return found

    def take(self) -> Run:
        """Return the run of the next token."""
        token = TOKEN.match(self.text, self.at)
        assert token is not None  # noqa: S101 - any character is a sign
        self.at = token.end()
        kind, value = str(token.lastgroup), token.group()
        return getattr(self, f"_{kind}")(value)

    def _code(self, value: str) -> Run:
        return Run(f"<code>{value.strip('`')}</code>{self._space()}", True)

    def _name(self, value: str) -> Run:
        return Run(f"<code>{value}</code>{self._space()}", True)

    def _word(self, value: str) -> Run:
        follows = self.text[self.at : self.at + 1]
        function = value in FUNCTIONS or follows in ("_", "^", "[") or (follows == "(" and value != "in")
        if value == "mod":
            return Run(r"\bmod ", False)
        if function:
            command = "text" if "-" in value else "operatorname"
            return Run(rf"\{command}{{{value}}}{self._gap()}", False)
        return Run(value + self._space(), True)

    def _number(self, value: str) -> Run:
        return Run(value, False)

    def _raised(self, value: str) -> Run:
        return Run(f"^{{{''.join(RAISED[each] for each in value)}}}", False)

    def _lowered(self, value: str) -> Run:
        return Run(f"_{{{''.join(LOWERED[each] for each in value)}}}", False)

    def _index(self, value: str) -> Run:
        return Run(f"{value}{{{self._indexed()}}}", False)

    def _indexed(self) -> str:
        """Return the index at this place."""
        if self.text[self.at : self.at + 1] == "{":
            return tex(self._group("{", "}"))
        inside = tex(self._group("(", ")")) if self.text[self.at : self.at + 1] == "(" else ""
        if inside:
            inside = f"({inside})" if re.match(r"\w", self.text[self.at :]) else inside
        found = re.compile(r"-?(?:(?![ᵀ²³⁻¹])[^\W_]|[½\u0302-\u0304])*").match(self.text, self.at)
        assert found is not None  # noqa: S101 - it may be empty
        self.at = found.end()
        rest = found.group()
        if rest == "T":
            return r"\top"
        if rest.isupper() and len(rest) > 1:
            return rf"\mathrm{{{rest}}}"
        letters = "".join("1/2" if each == "½" else symbol(each) for each in rest)
        if rest.endswith("π") and self.text[self.at : self.at + 1] == "(":
            letters += f"({tex(self._group('(', ')'))})"
        return inside + letters

    def _group(self, opening: str, closing: str) -> str:
        """Return what is between the bracket at this place and its partner."""
        depth, start = 0, self.at
        while self.at < len(self.text):
            depth += {opening: 1, closing: -1}.get(self.text[self.at], 0)
            self.at += 1
            if depth == 0:
                return self.text[start + 1 : self.at - 1]
        return self.text[start + 1 :]

    def _sign(self, value: str) -> Run:
        after = self.text[self.at : self.at + 1]
        if value == "√":
            return Run(rf"\sqrt{{{self._rooted()}}} ", False)
        if remark := self._remark(value):
            return Run(remark + self._space(), True)
        if value in ",;." and after in (" ", ""):
            self.at += len(after)
            return Run(f"{value} ", False)
        if value == " " or value in SIGNS:
            return Run(SIGNS.get(value, " "), False)
        return Run(self._bracket(value) or self._accented(value), False)

    def _remark(self, value: str) -> str:
        """Return prose that begins with a sign: words in parentheses, or the article; else an empty string."""
        if value == "(" and (found := REMARK.match(self.text, self.at - 1)) and found[1] not in FUNCTIONS:
            self.at = found.end()
            return found.group()
        return value if value == "a" and ARTICLE.match(self.text, self.at - 2) else ""

    def _bracket(self, value: str) -> str:
        """Return an angle bracket, or an asterisk after a symbol; an empty string for other signs."""
        before, after = self.text[: self.at - 1][-1:], self.text[self.at : self.at + 1]
        if value == "<" and after.strip() and not before.isalnum():
            return r"\langle "
        if value == ">" and before.strip() and not after.isalnum():
            return r"\rangle "
        return "^{*}" if value == "*" and before.strip() else ""

    def _accented(self, value: str) -> str:
        letter = symbol(value)
        for mark in self._marks():
            letter = f"{ACCENTS[mark]}{{{letter.strip()}}}"
        return letter

    def _rooted(self) -> str:
        """Return what is under a root: a group, a call, or one symbol."""
        if self.text[self.at] == "(":
            return tex(self._group("(", ")"))
        word = re.compile(r"[A-Za-z]{2,}").match(self.text, self.at)
        if word is None:
            return self.take().text
        self.at = word.end()
        called = f"({tex(self._group('(', ')'))})" if self.text[self.at : self.at + 1] == "(" else ""
        return rf"\operatorname{{{word.group()}}}{called}"

    def _marks(self) -> str:
        start = self.at
        while self.text[self.at : self.at + 1] in ACCENTS and self.at < len(self.text):
            self.at += 1
        return self.text[start : self.at]

    def _space(self) -> str:
        """Return the space after a word, and go past it."""
        if self.text[self.at : self.at + 1] == " ":
            self.at += 1
            return " "
        return ""

    def _gap(self) -> str:
        return r"\, " if self.text[self.at : self.at + 1] == " " else ""


def symbol(letter: str) -> str:
    """Return the TeX of one character."""
    name = unicodedata.name(letter, "")
    if letter == "½":
        return r"\tfrac{1}{2}"
    if name.startswith("GREEK SMALL LETTER "):
        return f"\\{name.rpartition(' ')[2].lower().replace('lamda', 'lambda')} "
    if name.startswith("GREEK CAPITAL LETTER "):
        return f"\\{name.rpartition(' ')[2].capitalize().replace('Lamda', 'Lambda')} "
    return letter
