"""The folder is the registry: one file of a room is one method, a frozen dataclass that its package exports."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import Any

from enfold.arguments import arguments_of
from enfold.errors import EnfoldError, closest

ROOMS: dict[str, tuple[str, ...]] = {
    "share": ("enfold.ensembles",),
    "fold": ("enfold.merge", "enfold.distill.losses"),
    "perturb": ("enfold.distill.perturb",),
}
VERBS = ("share", "fold")  # of the command line, and lists of a recipe


@dataclass(frozen=True)
class Method:
    """One method as the command line, the docs and the contract tests see it."""

    name: str  # the file's
    room: str
    kind: type[Any]  # a frozen dataclass whose fields are the hyper-parameters

    @property
    def idea(self) -> str:
        """The first line of the method's file."""
        module = importlib.import_module(self.kind.__module__)
        return (module.__doc__ or "").strip().splitlines()[0]

    @property
    def fields(self) -> dict[str, Any]:
        """The hyper-parameters by name."""
        if not dataclasses.is_dataclass(self.kind):
            return arguments_of(self.kind)
        return {field.name: field for field in dataclasses.fields(self.kind)}

    def make(self, **settings: Any) -> Any:
        """The method with these settings; an unknown one names the nearest right one."""
        for name in settings:
            if name not in self.fields:
                known = f"choose from {', '.join(self.fields)}" if self.fields else "it takes none"
                raise EnfoldError(f"'{self.name}' has no setting '{name}'{nearest(name, self.fields)}: {known}")
        return self.kind(**settings)


@cache
def methods(room: str) -> dict[str, Method]:
    """All methods of a room by name."""
    found = {}
    for package in map(importlib.import_module, ROOMS[room]):
        for info in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{info.name}")
            for name, kind in vars(module).items():
                own = isinstance(kind, type) and kind.__module__ == module.__name__
                own = own and (
                    dataclasses.is_dataclass(kind) or (room == "share" and "num_members" in arguments_of(kind))
                )
                if own and name in getattr(package, "__all__", ()) and name not in ("Repair", "DeepEnsemble"):
                    found[info.name] = Method(info.name, room, kind)
    return found


def method(room: str, name: str) -> Method:
    """The method of that name; hyphens and underscores are the same."""
    known = methods(room)
    key = name.replace("-", "_")
    if key not in known:
        other = next((each for each in ROOMS if key in methods(each)), None)
        if other is not None:
            use = f"enfold {other} RUN {name}, or {other}s: in a recipe" if other in VERBS else f"{other}: of a fold"
            near = related(key, known)
            instead = f"; {room}s near to it are {', '.join(near)}" if near else ""
            raise EnfoldError(f"a {room} is asked for, but '{name}' is a {other}: use {use}{instead}")
        raise EnfoldError(f"there is no {room} '{name}'{nearest(key, known)}: choose one of {', '.join(known)}")
    return known[key]


def related(name: str, known: dict[str, Method]) -> list[str]:
    """Methods of another room that may be meant: with that name in theirs, and folds that end in a share."""
    words = {word for word in name.split("_") if len(word) > 2}
    ends_in_share = [each for each in known.values() if not getattr(each.kind, "one_network", True)]
    return [
        key
        for key, each in known.items()
        if name in key or key in name or words & set(key.split("_")) or each in ends_in_share
    ]


def method_name(kind: type[Any]) -> str:
    """The name of a method's class: its file's."""
    return kind.__module__.rsplit(".", 1)[-1]


def nearest(name: str, known: Any) -> str:
    """', did you mean ...?' if something known is close."""
    close = closest(name, known)
    return f", did you mean '{close}'?" if close else ""
