"""The user's own code by reference: ``module:name`` or ``path/to/file.py:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from enfold.errors import EnfoldError

INSTALLED = [path for name, path in sysconfig.get_paths().items() if name.endswith("lib")]
OTHERS = ("<frozen", str(Path(__file__).parent), *INSTALLED)  # code that is not the user's own lies there


_places: ContextVar[tuple[Path, ...]] = ContextVar("places", default=())
_trusted: ContextVar[bool | None] = ContextVar("trusted", default=None)
_untrusted: set[object] = set()  # blocks of this process that trust no code; threads begun in them have no context


@contextmanager
def looking_in(folders: Sequence[Path], *, trusted: bool = False) -> Iterator[None]:
    """Inside the block, what a file names by a relative path is looked for in these folders, the first that has it.

    Code that it names is imported only if it is `trusted`.
    """
    before, block = (_places.set(tuple(folders)), _trusted.set(trusted)), object()
    _untrusted.update(() if trusted else (block,))
    try:
        yield
    finally:
        _untrusted.discard(block)
        _places.reset(before[0])
        _trusted.reset(before[1])


def places() -> tuple[Path, ...]:
    """The folders that are looked in, of which the current one is the only one unless others are asked for."""
    return _places.get() or (Path(),)


def is_reference(text: str) -> bool:
    """Whether a text names code: what is behind its last colon is a Python name, and something is before it."""
    where, _, name = text.rpartition(":")
    return bool(where) and all(part.isidentifier() for part in name.split("."))


def code_files(reference: str) -> list[Path]:
    """Return the files that importing a reference runs, without running any; empty if they are not found.

    Of a module in a package these are also the package's own files. What they import in turn is not known before.
    """
    where = reference.rpartition(":")[0]
    if where.endswith(".py"):
        path = found(Path(os.path.expanduser(where)))
        return [path.resolve()] if path.is_file() else []
    with _importable(_folders()):
        return [Path(spec.origin).resolve() for spec in _specs(where) if spec.has_location and spec.origin]


def _specs(module: str) -> Iterator[ModuleSpec]:
    """The packages around a module and the module itself, as far as they are found; none is imported."""
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # no module's name, or one without a file, as __main__
        return
    for name in (*inner, None):
        if spec is None:
            return
        yield spec
        finders = [pkgutil.get_importer(folder) for folder in spec.submodule_search_locations or ()]
        specs = [found for each in finders if name and each and (found := each.find_spec(name, None))]
        spec = min(specs, key=lambda each: each.loader is None, default=None)  # a folder counts where there is no file


def found(path: Path) -> Path:
    """The file or folder where it is; the path as it is given where there is none."""
    return next((place / path for place in places() if (place / path).exists()), path)


def searched() -> str:
    """The folders that are looked in, as words."""
    return " or ".join(str(place) for place in _folders())


def _folders() -> list[Path]:
    return list(dict.fromkeys(place.resolve() for place in places()))


def resolve(reference: str) -> Any:
    """The object that a reference names, for example ``resolve("nets.py:make_net")`` or ``resolve("math:sqrt")``.

    Modules are looked for in the current folder too, and a file may import its neighbours, as if it were run there.
    """
    where, _, name = reference.rpartition(":")
    if not is_reference(reference):
        raise EnfoldError(
            f"a reference to your own code must read module:name or path/file.py:name, got '{reference}': "
            "name the module, a colon and the function"
        )
    is_trusted = _trusted.get()
    if is_trusted is False or (is_trusted is None and _untrusted):  # else a Python program names its own code
        raise untrusted([reference])
    found: Any = _from_file(Path(os.path.expanduser(where))) if where.endswith(".py") else _from_module(where)
    for part in name.split("."):
        if not hasattr(found, part):
            raise EnfoldError(f"'{where}' must define '{name}', got {_public_names(found)}: correct the reference")
        found = getattr(found, part)
    return found


def untrusted(references: Iterable[str]) -> EnfoldError:
    """The refusal of code that a file names, with every Python file that would run."""
    named = ", ".join(f"{each} ({code_words(each)})" for each in references)
    return EnfoldError(f"code runs only if it is trusted, got {named}: add --trust-code if you know it")


def code_words(reference: str) -> str:
    """The files that a reference runs, as words."""
    return ", ".join(map(str, code_files(reference))) or f"no such file in {searched()}"


def _from_module(name: str) -> ModuleType:
    with _importable(_folders()):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                raise EnfoldError(
                    f"there must be a module '{name}' that is installed or lies in {searched()}, got none: "
                    "correct its name, or give the path of its file as path/file.py:name"
                ) from error
            raise _failure(name, error) from error
        except Exception as error:
            raise _failure(name, error) from error


def _from_file(path: Path) -> ModuleType:
    path = found(path)
    if not path.is_file():
        raise EnfoldError(f"there must be a Python file at '{path}', got none in {searched()}: correct the path")
    path = path.resolve()
    # The name holds path and content: the same file gives the same classes again, an edited one gives new ones.
    digest = hashlib.sha256(str(path).encode() + b"\0" + path.read_bytes()).hexdigest()[:12]
    name = f"enfold_usercode_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EnfoldError(f"'{path}' must be a Python file that can be imported, which it is not: rename it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it is being executed
    try:
        with _importable([path.parent]):
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _failure(str(path), error) from error
    return module


@contextmanager
def _importable(folders: Sequence[Path]) -> Iterator[None]:
    entries = [str(folder) for folder in folders]
    sys.path[:0] = entries
    try:
        yield
    finally:
        for entry in entries:
            sys.path.remove(entry)


def call(reference: str, function: Callable[[], Any]) -> Any:
    """What the user's own function gives; where it fails is said in one sentence."""
    try:
        return function()
    except EnfoldError:
        raise
    except Exception as error:
        raise EnfoldError(f"'{reference}' must run without an error, got {told(error)}: mend it there") from error


def told(error: Exception) -> str:
    """An error, and the last line of the user's own code that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if not frame.filename.startswith(OTHERS)), frames[-1])
    line = error.lineno if isinstance(error, SyntaxError) else last.lineno
    file = error.filename if isinstance(error, SyntaxError) else last.filename
    message = next(iter(str(error).splitlines()), "no message")
    return f"{type(error).__name__}: {message} (line {line} of {file})"


def _failure(where: str, error: Exception) -> EnfoldError:
    return EnfoldError(f"importing '{where}' must succeed, got {told(error)}: mend it there")


def _public_names(owner: Any) -> str:
    names = [name for name in vars(owner) if not name.startswith("_")] if hasattr(owner, "__dict__") else []
    return ", ".join(names) or "no public names"
