"""Registry of methods: one file in the package of a kind is one method.

A method is a class (ensembles, distillation losses, perturbations) or a function (merges) with the name of its file:
`ensembles/batch_ensemble.py` defines `BatchEnsemble`, `merge/weight_matching.py` defines `weight_matching`. Nothing
else has to be changed to add one. Installed packages add methods with entry points in the group "enfold.methods", and
`find_method("merge", "mine.py:my_merge")` loads one from a file.

Steps of a recipe have keys of their own, and networks and data are passed by name: options must have other names.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from enfold.arguments import INPUTS, Argument, arguments_of, check_arguments
from enfold.errors import EnfoldError, closest
from enfold.io.usercode import is_reference, resolve
from enfold.method_files import method_files, method_object

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

USES: dict[str, tuple[str, str]] = {
    "ensemble": ("enfold train RUN NAME", "or a step of a recipe"),
    "distill": ("enfold distill RUN NAME", "or a step of a recipe"),
    "merge": ("enfold merge RUN NAME", "or a step of a recipe"),
    "perturb": ("perturb: NAME", "in a distillation step"),
}
"""Use of a method of each kind on the command line and in a recipe: what is written, and where else."""

STEP_KEYS = frozenset(
    ["method", "label", "family", "network", "init", "teacher", "student", "perturb", "train", "first", "seeds"]
)
"""The keys of a step of a recipe, which are not options of its method."""

GIVEN: dict[str, frozenset[str]] = {
    "ensemble": frozenset(["network", "networks"]),
    "distill": frozenset(),
    "merge": frozenset(
        [
            *("models", "network", "train", "val", "example", "unpack", "outputs"),
            *("config", "checkpoint", "cache", "on_epoch", "logger", "quiet", "title"),
        ]
    ),
    "perturb": frozenset(),
}
"""The parameters of each kind that a run fills in; see `Method.inputs`."""

GROUP = "enfold.methods"
NOT_METHODS = frozenset(["deep_ensemble", "mixed_ensemble", "align", "basin_check"])
"""Files without a method of a recipe: ensembles of separate networks, alignment without a merge, the basin check."""


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
        idea: What it does, in one sentence: the first paragraph of its file, or of its own docstring in code of users.
        reference: The rest of that text: equations, paper, and what differs from it.
    """

    name: str
    kind: str
    target: Callable[..., Any]
    arguments: dict[str, Argument]
    idea: str
    reference: str

    @property
    def inputs(self) -> frozenset[str]:
        """The parameters of the target that are networks or data, such as `train` and `example`."""
        return INPUTS & inspect.signature(self.target).parameters.keys()

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


def method_names(kind: str) -> list[str]:
    """Return the names of all methods of a kind, without importing their files."""
    package = importlib.import_module(PACKAGES[kind])
    return [name for name in method_files(package.__path__) if name not in NOT_METHODS]


@cache
def methods(kind: str) -> dict[str, Method]:
    """Return all methods of a kind by name: those of enfold, then those of installed packages.

    Raises:
        EnfoldError: If a file of the package defines no method of its name.
    """
    package = importlib.import_module(PACKAGES[kind])
    found: dict[str, Method] = {}
    for name in method_names(kind):
        target = method_object(package, name)
        if kind_of(target) != kind:
            raise EnfoldError(f"'{inspect.getfile(target)}' must define a {kind} method, but {_fault(target, kind)}")
        found[name] = make_method(name, kind, target)
    for name, target in _list_installed():
        if kind_of(target) == kind:
            if name in found:
                warnings.warn(f"the method '{name}' exists; that of a plugin is ignored", BrokenMethodWarning, 2)
            found.setdefault(name, make_method(name, kind, target, own_idea=True))
    return found


def find_method(kind: str, name: str) -> Method:
    """Return the method of a name; hyphens and underscores are equivalent.

    Args:
        kind: The kind of the method.
        name: The name of a method, or `mine.py:my_merge` or `package.module:MyEnsemble` for code of your own.

    Raises:
        EnfoldError: If there is no method of that name and kind, or the code is not trusted.
    """
    if _is_code(name):
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
    if _is_code(name):
        return [load_method(name)]
    key = name.replace("-", "_")
    found = [methods(kind)[key] for kind in kinds if key in methods(kind)]
    if not found:
        known = list(dict.fromkeys(each for kind in kinds for each in methods(kind)))
        raise EnfoldError(f"there is no method '{name}'{suggest(key, known)}: choose one of {', '.join(known)}")
    return found


def _is_code(name: str) -> bool:
    """Return whether a name is a reference to user code, or a file, which lacks the name of an object."""
    return is_reference(name) or name.endswith(".py")


def load_method(reference: str) -> Method:
    """Return the method that a reference to user code names, such as `mine.py:my_merge` or `mine.py:MyEnsemble`.

    Raises:
        EnfoldError: If the code is not trusted, cannot be imported, or is not a method.
    """
    target = resolve(reference)
    kind = kind_of(target)
    if kind is None:
        raise EnfoldError(f"'{reference}' must be a method, but {_fault(target)}")
    return make_method(reference, kind, target, own_idea=True)


def make_method(name: str, kind: str, target: Callable[..., Any], *, own_idea: bool = False) -> Method:
    """Return the entry of the registry for a class or function.

    Args:
        name: Its name.
        kind: Its kind.
        target: The class or function.
        own_idea: Describe it by its own docstring, as its file may define others; else by that of the file.

    Raises:
        EnfoldError: If an option has a reserved name.
    """
    taken = [each for each in inspect.signature(target).parameters if each in reserved_names(kind)]
    if taken:
        raise EnfoldError(
            f"an option must have a name of its own, but '{taken[0]}' of '{name}' is reserved in {kind} methods: "
            "rename this parameter"
        )
    document = _header(target, own_idea)
    idea, _, rest = document.partition("\n\n")
    return Method(name, kind, target, arguments_of(target), " ".join(idea.split()), rest.strip("\n"))


def reserved_names(kind: str) -> frozenset[str]:
    """Return the names that options of a kind must not have, as a step has keys of these names or a run fills them in.

    Args:
        kind: The kind of method.
    """
    allowed = {"ensemble": frozenset(["init"]), "perturb": STEP_KEYS - {"method"}}  # perturbations have a mapping
    return (STEP_KEYS - allowed.get(kind, frozenset()) | INPUTS) - GIVEN[kind] - {"self"}


def _fault(target: Any, kind: str | None = None) -> str:
    """Return why an object is not a method, and the remedy."""
    bases = {each: base.rpartition(":")[2] for each, base in BASES.items() if kind in (None, each)}
    name = getattr(target, "__name__", repr(target))
    if isinstance(target, type):
        abstract = sorted(getattr(target, "__abstractmethods__", ()))
        if abstract and issubclass(target, tuple(_base(BASES[each]) for each in bases)):
            return f"'{name}' does not define {', '.join(abstract)}: define it"
        return f"'{name}' is not a subclass of {' or '.join(bases.values()) or 'any kind'}: " + (
            f"derive it from {' or '.join(bases.values())}" if bases else f"write a function {name}(models, ...)"
        )
    if inspect.isfunction(target) and kind in (None, "merge"):
        parameters = list(inspect.signature(target).parameters)
        if "models" in parameters:
            return f"'models' is parameter {parameters.index('models') + 1} of '{name}': make it the first"
        instead = f"'{parameters[0]}'" if parameters else "no parameter"
        return f"the first parameter of a merge function is models, and '{name}' has {instead}: rename it to models"
    classes = f"a subclass of {', '.join(bases.values())}" if bases else ""
    function = "a function whose first parameter is models" if kind in (None, "merge") else ""
    return f"'{name}' is neither a class nor a function: name {' or '.join(filter(None, (classes, function)))}"


def kind_of(target: Any) -> str | None:
    """Return the kind of method that an object is; None if it is none."""
    if inspect.isfunction(target):
        parameters = list(inspect.signature(target).parameters)
        return "merge" if "models" in parameters[:2] else None
    for kind, base in BASES.items():
        if isinstance(target, type) and issubclass(target, _base(base)) and not inspect.isabstract(target):
            return kind
    return None


def use_of(method: Method, quote: str = "") -> str:
    """Return how a method is used; what is written literally is between quotes of this kind."""
    literal, where = USES[method.kind]
    return f"{quote}{literal.replace('NAME', method.name)}{quote}{',' if where.startswith('or') else ''} {where}"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean '...'?" if a known name is close; else an empty string."""
    near = closest(name, known)
    return f", did you mean '{near}'?" if near else ""


def _list_installed() -> Iterator[tuple[str, Any]]:
    for entry in entry_points(group=GROUP):
        try:
            target = entry.load()
        except Exception as error:  # any code may be installed; the methods of enfold work without it
            warnings.warn(
                f"the method '{entry.name}' ({entry.value}) cannot be imported: {error}", BrokenMethodWarning, 3
            )
            continue
        if kind_of(target) is None:
            warnings.warn(f"'{entry.name}' ({entry.value}) is not a method of enfold", BrokenMethodWarning, 3)
        yield entry.name.replace("-", "_"), target


def _header(target: Any, own: bool) -> str:
    """Return the docstring of a method's file, or its own, without the section of arguments."""
    module = inspect.getmodule(inspect.unwrap(target))
    generated = f"{target.__name__}("  # by dataclasses
    documents = [
        module.__doc__ if module else None,
        None if str(target.__doc__).startswith(generated) else target.__doc__,
    ]
    document = inspect.cleandoc(next(filter(None, documents[::-1] if own else documents), ""))
    return re.split(r"\n\s*(?:Args|Returns|Raises):", document)[0]


@cache
def _base(reference: str) -> type[Any]:
    module, _, name = reference.partition(":")
    base: type[Any] = getattr(importlib.import_module(module), name)
    return base
