"""User code by reference: ``module:name`` or ``path/to/file.py:name``."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from enfold.errors import EnfoldError, UserCodeError, closest

LIBRARIES = [path for name, path in sysconfig.get_paths().items() if name.endswith("lib")]
INSTALLED = (*LIBRARIES, *(str(Path(path).resolve()) for path in LIBRARIES))  # an environment may be a symbolic link
OTHERS = ("<frozen", *INSTALLED)  # locations of code that nobody here edits
PREFIX = "enfold_usercode_"  # of the names of modules that are loaded from files
ENFOLD = f"{Path(__file__).parent.parent}{os.sep}"


_places: ContextVar[tuple[Path, ...]] = ContextVar("places", default=())
_trusted: ContextVar[bool | None] = ContextVar("trusted", default=None)
_modules: dict[str, tuple[str, ...]] = {}  # modules that were imported by reference, and the folders searched
_untrusted: set[object] = set()  # active blocks that trust no code, as threads do not inherit the context


@contextmanager
def looking_in(folders: Sequence[Path], *, trusted: bool = False) -> Iterator[None]:
    """Resolve relative paths inside the block against these folders; the first folder that has the path is used.

    Args:
        folders: The folders to search.
        trusted: Whether referenced code may be imported.
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
    """Return the folders that are searched; by default the current one."""
    return _places.get() or (Path(),)


def is_trusted() -> bool:
    """Return whether this call is inside of a block that trusts referenced code."""
    return _trusted.get() is True


def is_refused() -> bool:
    """Return whether referenced code must not be imported now; outside of blocks, programs may use their own code."""
    return _trusted.get() is False or (_trusted.get() is None and bool(_untrusted))


def is_reference(text: str) -> bool:
    """Return whether a text is a reference to code: something, a colon and a Python name."""
    where, _, name = text.rpartition(":")
    return bool(where) and all(part.isidentifier() for part in name.split("."))


def code_files(reference: str) -> list[Path]:
    """Return the files that importing a reference runs, without running any; empty if they are not found.

    For a module in a package this includes the files of the package, but not the modules that these files import.
    """
    where = reference.rpartition(":")[0]
    if where.endswith(".py"):
        path = find_path(Path(os.path.expanduser(where)))
        return [path.resolve()] if path.is_file() else []
    with _importable(_folders()):
        return [Path(spec.origin).resolve() for spec in _specs(where) if spec.has_location and spec.origin]


def code_digest(reference: str) -> str | None:
    """Return the checksum of the user's files that importing a reference runs; None if there are none.

    Installed packages and files that these files import are not included.
    """
    files = [file for file in code_files(reference) if file.is_file() and not str(file).startswith(INSTALLED)]
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return hashlib.sha256("".join(digests).encode()).hexdigest() if digests else None


def _specs(module: str) -> Iterator[ModuleSpec]:
    """Yield the specs of a module's packages and of the module itself, without importing them."""
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # not a module name, or a module without a file such as __main__
        return
    for name in (*inner, None):
        if spec is None:
            return
        yield spec
        finders = [pkgutil.get_importer(folder) for folder in spec.submodule_search_locations or ()]
        specs = [found for each in finders if name and each and (found := each.find_spec(name, None))]
        spec = min(specs, key=lambda each: each.loader is None, default=None)  # files take precedence over folders


def find_path(path: Path) -> Path:
    """Return the path in the first searched folder that has it, else the path unchanged."""
    return next((place / path for place in places() if (place / path).exists()), path)


def searched_folders() -> str:
    """Return the searched folders as text for messages."""
    return " or ".join(str(place) for place in _folders())


def _folders() -> list[Path]:
    return list(dict.fromkeys(place.resolve() for place in places()))


def resolve(reference: str) -> Any:
    """Return the object that a reference names, for example ``resolve("nets.py:make_net")``.

    Modules are also searched in the current folder, and a file may import other files of its folder.

    Args:
        reference: ``module:name`` or ``path/to/file.py:name``.

    Raises:
        EnfoldError: If the reference is malformed, not trusted or not found, or if importing it fails.
    """
    where, _, name = reference.rpartition(":")
    if reference.endswith(".py"):
        raise _no_name_error(reference)
    if not is_reference(reference):
        raise EnfoldError(
            f"a reference to user code must be module:name or path/file.py:name, got '{reference}': "
            "write the module, a colon and the function"
        )
    if is_refused():
        raise trust_error([reference])
    target: Any = _from_file(Path(os.path.expanduser(where))) if where.endswith(".py") else _from_module(where)
    for part in name.split("."):
        if not hasattr(target, part):
            known = _defined_names(target)
            near = closest(part, known)
            remedy = f"did you mean '{where}:{near}'?" if near else "correct the reference"
            raise EnfoldError(f"'{where}' must define '{name}', got {', '.join(known) or 'no names'}: {remedy}")
        target = getattr(target, part)
    return target


def _no_name_error(file: str) -> EnfoldError:
    """Return the error for a file without the name of an object; the names are read without running the file."""
    path = find_path(Path(os.path.expanduser(file)))
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError) as error:
        return EnfoldError(f"'{file}' must be a Python file, but it cannot be read ({error}): correct the path")
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]
    return EnfoldError(
        f"a reference must name one object of a file, got '{file}', which defines {', '.join(names) or 'none'}: write "
        f"{file}:{names[0] if names else 'NAME'}"
    )


def trust_error(references: Iterable[str]) -> EnfoldError:
    """Return the error for references to untrusted code, with all Python files that they would run."""
    named = ", ".join(f"{each} ({describe_code(each)})" for each in references)
    return EnfoldError(f"code runs only if it is trusted, got {named}: add --trust-code if you trust it")


class LoadedCode:
    """The user's code that this process has imported by reference; another process imports it when it unpickles this.

    Args:
        files: Files that were loaded.
        modules: Names of modules, and the folders in which they were searched.
    """

    def __init__(self, files: Sequence[str] = (), modules: Sequence[tuple[str, tuple[str, ...]]] = ()) -> None:
        self.files, self.modules = tuple(files), tuple(modules)

    @classmethod
    def current(cls) -> LoadedCode:
        """Return the code that is loaded now."""
        files = [str(module.__file__) for name, module in list(sys.modules.items()) if name.startswith(PREFIX)]
        return cls(files, list(_modules.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Import the code when this is unpickled, before what refers to it."""
        return _load_code, (self.files, self.modules)


def _load_code(files: Sequence[str], modules: Sequence[tuple[str, tuple[str, ...]]]) -> LoadedCode:
    for file in files:
        if Path(file).is_file():  # else what refers to it cannot be unpickled
            _from_file(Path(file))
    for name, folders in modules:
        with _importable([Path(folder) for folder in folders]), suppress(ImportError):
            importlib.import_module(name)
    return LoadedCode(files, modules)


def describe_code(reference: str) -> str:
    """Return the files that a reference runs as text for messages."""
    return ", ".join(map(str, code_files(reference))) or f"no such file in {searched_folders()}"


def _from_module(name: str) -> ModuleType:
    with _importable(_folders()):
        try:
            found = importlib.import_module(name)
            _modules[name] = tuple(map(str, _folders()))
            return found
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                raise EnfoldError(
                    f"the module '{name}' must be installed or in {searched_folders()}, but it is not found: "
                    "correct its name, or write the path of its file as path/file.py:name"
                ) from error
            raise _failure(name, error) from error
        except Exception as error:
            raise _failure(name, error) from error


def _from_file(path: Path) -> ModuleType:
    path = find_path(path)
    if not path.is_file():
        raise EnfoldError(
            f"'{path}' must be a Python file in {searched_folders()}, but it is not found: correct the path"
        )
    path = path.resolve()
    # The name depends on path and content, so that the same file gives the same classes and an edited one new classes.
    digest = hashlib.sha256(str(path).encode() + b"\0" + path.read_bytes()).hexdigest()[:12]
    name = f"{PREFIX}{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EnfoldError(f"'{path}' must be an importable Python file, but it is not: rename it")
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
    """Return the result of a user's function.

    Args:
        reference: Its name in error messages.
        function: The function.

    Raises:
        EnfoldError: If it fails; the message names the line.
    """
    try:
        return function()
    except EnfoldError:
        raise
    except Exception as error:
        message = f"'{reference}' must run without an error, got {describe_error(error)}: fix the error there"
        raise EnfoldError(message) from error


@contextmanager
def reporting(what: str, *, always: bool = False) -> Iterator[None]:
    """Report exceptions of user code inside the block in one sentence.

    Args:
        what: What runs, for the message.
        always: Report other exceptions too, as those that follow from what user code returns.

    Raises:
        UserCodeError: In place of an exception whose traceback contains a line of the user; errors of enfold and a lack
            of memory are left.
    """
    try:
        yield
    except (EnfoldError, MemoryError):
        raise
    except Exception as error:
        is_users = any(not frame.filename.startswith((*OTHERS, ENFOLD)) for frame in _frames(error))
        if "memory" in str(error) or not (always or is_users):
            raise
        message = f"{what} must run without an error, got {describe_error(error)}: fix the error there"
        raise UserCodeError(message) from error


def _frames(error: Exception) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def describe_error(error: Exception) -> str:
    """Return the message of an error with the last line of user code in its traceback, else of enfold."""
    frames = _frames(error)
    candidates = [frame for frame in frames if not frame.filename.startswith(OTHERS)]
    own = [frame for frame in candidates if not frame.filename.startswith(ENFOLD)]
    last = (own or candidates or frames)[-1]
    line = error.lineno if isinstance(error, SyntaxError) else last.lineno
    file = error.filename if isinstance(error, SyntaxError) else last.filename
    message = next(iter(str(error).splitlines()), "no message")
    return f"{type(error).__name__}: {message} (line {line} of {file})"


def _failure(where: str, error: Exception) -> EnfoldError:
    return EnfoldError(f"importing '{where}' must succeed, got {describe_error(error)}: fix the error there")


def _defined_names(owner: Any) -> list[str]:
    """Return the public names that a module or class defines itself; of installed modules also what it imports."""
    names = [name for name in getattr(owner, "__dict__", {}) if not name.startswith("_")]
    if not isinstance(owner, ModuleType) or str(getattr(owner, "__file__", INSTALLED[0])).startswith(INSTALLED):
        return names
    return [name for name in names if getattr(vars(owner)[name], "__module__", None) == owner.__name__]
