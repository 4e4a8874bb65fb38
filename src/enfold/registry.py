"""Registry of methods: one file in the package of a kind is one method.

A method is a class (ensembles, distillation losses, perturbations) or a function (merges) with the name of its file:
`ensembles/batch_ensemble.py` defines `BatchEnsemble`, `merge/weight_matching.py` defines `weight_matching`. Nothing
else has to be changed to add one. Installed packages add methods with entry points in the group "enfold.methods", and
`find_method("merge", "mine.py:my_merge")` loads one from a file.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from enfold.arguments import INPUTS, Argument, arguments_of, check_arguments
from enfold.errors import EnfoldError, closest
from enfold.io.usercode import is_reference, resolve

PACKAGES: dict[str, str] = {
    "ensemble": "enfold.ensembles",
    "distill": "enfold.distill.losses",
    "merge": "enfold.merge",
    "perturb": "enfold.distill.perturb",
}
"""The package of each kind of method."""

BASES: dict[str, str] = {
    "ensemble": "enfold.ensemble:Ensemble",
    "distill": "enfold.distill.loss:DistillationLoss",
    "perturb": "enfold.distill.perturbation:Perturbation",
}
"""The base class of methods that are classes; merges are functions."""

USES: dict[str, str] = {
    "ensemble": "enfold train RUN NAME, or a step of a recipe",
    "distill": "enfold distill RUN NAME, or a step of a recipe",
    "merge": "enfold merge RUN NAME, or a step of a recipe",
    "perturb": "perturb: NAME in a distillation step",
}
"""Use of a method of each kind on the command line and in a recipe."""

GROUP = "enfold.methods"
NOT_METHODS = frozenset(["deep_ensemble", "mixed_ensemble", "align", "basin"])
"""Files that are no methods of a recipe: ensembles of separate networks, alignment without a merge, the basin check."""


class BrokenMethodWarning(UserWarning):
    """An installed package names a method that cannot be imported or is none."""


@dataclass(frozen=True)
class Method:
    """One method as the command line, recipes and the documentation see it.

    Args:
        name: The name of its file, or the reference to user code.
        kind: "ensemble", "distill", "merge" or "perturb".
        target: The class or function.
        arguments: Its options by name, with type, default and help.
        idea: The first sentence of its file.
    """

    name: str
    kind: str
    target: Callable[..., Any]
    arguments: dict[str, Argument]
    idea: str

    @property
    def inputs(self) -> frozenset[str]:
        """The parameters of the target that are networks or data, such as `train` and `example`."""
        return INPUTS & inspect.signature(self.target).parameters.keys()

    @property
    def reference(self) -> str:
        """The rest of the file's header: equations, paper, and what differs from it."""
        return _header(self.target).partition("\n")[2].strip("\n")

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options after checking their names, types and limits.

        Raises:
            EnfoldError: If a name is unknown or a value does not fit.
        """
        for name in options:
            if name not in self.arguments:
                known = f"choose from {', '.join(self.arguments)}" if self.arguments else "it has none"
                raise EnfoldError(f"'{self.name}' has no option '{name}'{suggest(name, self.arguments)}: {known}")
        return check_arguments(self.target, options)


@cache
def methods(kind: str) -> dict[str, Method]:
    """Return all methods of a kind by name: those of enfold, then those of installed packages."""
    package = importlib.import_module(PACKAGES[kind])
    found: dict[str, Method] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if not info.ispkg and info.name not in NOT_METHODS:
            target = _target_of(importlib.import_module(f"{package.__name__}.{info.name}"), kind, info.name)
            if target is not None:
                found[info.name] = make_method(info.name, kind, target)
    for name, target in _installed():
        if kind_of(target) == kind:
            if name in found:
                warnings.warn(f"the method '{name}' exists; that of a plugin is ignored", BrokenMethodWarning, 2)
            found.setdefault(name, make_method(name, kind, target))
    return found


def find_method(kind: str, name: str) -> Method:
    """Return the method of a name; hyphens and underscores are equivalent.

    Args:
        kind: The kind of the method.
        name: The name of a method, or `mine.py:MyMethod` or `package.module:MyMethod` for code of your own.

    Raises:
        EnfoldError: If there is no method of that name and kind, or the code is not trusted.
    """
    if is_reference(name):
        method = load_method(name)
        if method.kind != kind:
            raise EnfoldError(
                f"{kind} methods are needed here, but '{name}' is of the kind {method.kind}: use {use_of(method)}"
            )
        return method
    known, key = methods(kind), name.replace("-", "_")
    if key not in known:
        other = next((methods(each)[key] for each in PACKAGES if key in methods(each)), None)
        if other is not None:
            near = [each for each in known if set(key.split("_")) & set(each.split("_"))]
            instead = f"; similar names of the kind {kind}: {', '.join(near)}" if near else ""
            raise EnfoldError(
                f"{kind} methods are needed, but '{name}' is of the kind {other.kind}: use {use_of(other)}{instead}"
            )
        raise EnfoldError(f"there is no {kind} method '{name}'{suggest(key, known)}: choose one of {', '.join(known)}")
    return known[key]


def find_any(name: str, kinds: Iterable[str] = PACKAGES) -> list[Method]:
    """Return the methods of a name, whatever their kind; two kinds may have a method of one name.

    Raises:
        EnfoldError: If there is none.
    """
    if is_reference(name):
        return [load_method(name)]
    key = name.replace("-", "_")
    found = [methods(kind)[key] for kind in kinds if key in methods(kind)]
    if not found:
        known = list(dict.fromkeys(each for kind in kinds for each in methods(kind)))
        raise EnfoldError(f"there is no method '{name}'{suggest(key, known)}: choose one of {', '.join(known)}")
    return found


def load_method(reference: str) -> Method:
    """Return the method that a reference to user code names, such as `mine.py:MyMerge`.

    Raises:
        EnfoldError: If the code is not trusted, cannot be imported, or is no method.
    """
    target = resolve(reference)
    kind = kind_of(target)
    if kind is None:
        raise EnfoldError(
            f"'{reference}' must be a subclass of Ensemble, DistillationLoss or Perturbation, or a function whose "
            f"first parameters include models, got {target!r}: correct the reference"
        )
    return make_method(reference, kind, target)


def make_method(name: str, kind: str, target: Callable[..., Any]) -> Method:
    """Return the entry of the registry for a class or function."""
    idea = _header(target).split("\n\n")[0].replace("\n", " ").strip()
    return Method(name, kind, target, arguments_of(target), idea)


def kind_of(target: Any) -> str | None:
    """Return the kind of method that an object is; None if it is none."""
    if inspect.isfunction(target):
        parameters = list(inspect.signature(target).parameters)
        return "merge" if "models" in parameters[:2] else None
    for kind, base in BASES.items():
        if isinstance(target, type) and issubclass(target, _base(base)) and not inspect.isabstract(target):
            return kind
    return None


def use_of(method: Method) -> str:
    """Return how a method is used."""
    return USES[method.kind].replace("NAME", method.name)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean '...'?" if a known name is close; else an empty string."""
    near = closest(name, known)
    return f", did you mean '{near}'?" if near else ""


def _target_of(module: ModuleType, kind: str, name: str) -> Any:
    """Return the class or function that has the name of its file, without regard to underscores and case."""
    wanted = name.replace("_", "")
    for public, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__
        if own and public.replace("_", "").lower() == wanted and kind_of(value) == kind:
            return value
    return None


def _installed() -> Iterator[tuple[str, Any]]:
    for entry in entry_points(group=GROUP):
        try:
            target = entry.load()
        except Exception as error:  # any code may be installed; the methods of enfold work without it
            warnings.warn(
                f"the method '{entry.name}' ({entry.value}) cannot be imported: {error}", BrokenMethodWarning, 3
            )
            continue
        if kind_of(target) is None:
            warnings.warn(f"'{entry.name}' ({entry.value}) is no method of enfold", BrokenMethodWarning, 3)
        yield entry.name.replace("-", "_"), target


def _header(target: Any) -> str:
    """Return the docstring of a method's file; its own docstring if the file has none."""
    module = inspect.getmodule(target)
    return inspect.cleandoc((module.__doc__ if module else None) or inspect.getdoc(target) or "")


@cache
def _base(reference: str) -> type[Any]:
    module, _, name = reference.partition(":")
    base: type[Any] = getattr(importlib.import_module(module), name)
    return base
