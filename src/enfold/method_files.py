"""Method files: one file of a package is one method, and its class or function has the name of the file.

A function has exactly the name of its file (`merge/perm_avg.py`: `perm_avg`). A class has the same letters and digits,
in any case and without underscores (`ensembles/batch_ensemble.py`: `BatchEnsemble`). Subpackages and files whose names
begin with an underscore are helpers.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from enfold.errors import EnfoldError

CLASS = re.compile(r"^class (\w+)", re.MULTILINE)


def method_files(paths: Iterable[str]) -> list[str]:
    """Return the names of the method files in the folders of a package, without importing them."""
    return [info.name for info in pkgutil.iter_modules(paths) if not info.ispkg and not info.name.startswith("_")]


def class_names(folder: Path) -> list[str]:
    """Return the names of the classes of all method files in a folder, from their text, without importing them."""
    return [
        name
        for file in method_files([str(folder)])
        for name in CLASS.findall((folder / f"{file}.py").read_text(encoding="utf-8"))
        if is_name_of(file, name)
    ]


def is_name_of(file: str, name: str) -> bool:
    """Return whether a class or function has the name of a file."""
    return name.replace("_", "").lower() == file.replace("_", "").lower()


def find_class(package: ModuleType, name: str) -> Any:
    """Return the class of this name from its file in a package, which is imported now; None if there is none.

    Raises:
        EnfoldError: If a file has this name, and no class or function in it has.
    """
    for file in method_files(package.__path__) if name[:1].isupper() else ():
        if is_name_of(file, name) and (found := method_object(package, file)).__name__ == name:
            return found
    return None


def method_object(package: ModuleType, file: str) -> Any:
    """Return the class or function of a method file.

    Raises:
        EnfoldError: If nothing that the file defines has its name; the message has the file, the expected name and the
            names that were found.
    """
    module = import_module(f"{package.__name__}.{file}")
    own = {
        name: value
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__
    }
    for name, value in own.items():
        if is_name_of(file, name):
            return value
    found = ", ".join(name for name in own if not name.startswith("_")) or "no class or function"
    camel = "".join(part[:1].upper() + part[1:] for part in file.split("_"))
    raise EnfoldError(
        f"'{module.__file__}' must define a class {camel} or a function {file}, the name of its file, got {found}: "
        "rename one of these or the file; a file of helpers has a name that begins with _"
    )


class FunctionPackage(ModuleType):
    """A package whose method files have functions, each imported when it is first used.

    Importing a file sets the attribute of its name in the package to the module; here it is the function.
    """

    def __getattr__(self, name: str) -> Any:
        if name in method_files(self.__path__):
            return method_object(self, name)
        raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in method_files(self.__path__):
            value = method_object(self, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *method_files(self.__path__)})
