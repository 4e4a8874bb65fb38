"""Run many inputs in one process, and judge each: an EnfoldError, success, or a finding."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis import strategies as st

from enfold.errors import EnfoldError
from tools.fuzz import draws
from tools.fuzz.draws import Draws
from tools.fuzz.mutations import MUTATIONS, SENTINEL
from tools.fuzz.readers import Reader

PER_PLAN = 20  # inputs of one plan: hypothesis takes as long for a plan as a reader for an input
SECONDS = 5  # of processor time for an input
ROOM = 2 << 30  # bytes of address space beyond what the process has
GROWTH = 256 << 10  # kilobytes by which the peak of memory may grow at an input
LONGEST = 4000  # characters of a message
RUNS = (
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn"),
    *("socket.connect", "socket.getaddrinfo", "pickle.find_class", "os.kill"),
)


class Hang(BaseException):
    """An input that takes too long; no reader catches it."""


class CodeRan(BaseException):
    """An input that runs code, or writes outside of its folder."""


@dataclass
class Outcome:
    """Counts of one reader."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    findings: dict[str, list[Any]] = field(default_factory=dict)  # number and example

    def add(self, other: dict[str, Any]) -> None:
        """Add the counts of another process."""
        self.inputs += other["inputs"]
        self.accepted += other["accepted"]
        self.refused += other["refused"]
        for key, (number, example) in other["findings"].items():
            self.found(key, example, number)

    def found(self, key: str, example: str, number: int = 1) -> bool:
        """Count a finding; return whether it is a new one."""
        known = self.findings.setdefault(key, [0, example])
        known[0] += number
        return bool(known[0] == number)


class Sentry:
    """An audit hook that ends an input which starts a process, connects, unpickles, or writes elsewhere."""

    def __init__(self) -> None:
        self.folder, self.is_active = "", False
        sys.addaudithook(self)

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        """Judge an event."""
        if not self.is_active:
            return
        if event in RUNS:
            raise CodeRan(f"{event} {given!r:.200}")
        if event == "open" and isinstance(given[0], str | bytes) and isinstance(given[2], int):
            writes = given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            path = os.path.realpath(os.fsdecode(given[0]))
            if (writes and not path.startswith((self.folder, "/dev/null"))) or path in ("/etc/passwd", "/etc/x"):
                raise CodeRan(f"opens {path}")


sentry = Sentry()


@contextmanager
def limits(folder: Path) -> Iterator[None]:
    """Limit the processor time of an input, and watch what it does."""

    def stop(*given: object) -> None:
        raise Hang

    signal.signal(signal.SIGPROF, stop)
    sentry.folder = os.path.realpath(folder)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    sentry.is_active = True
    try:
        yield
    finally:
        sentry.is_active = False
        signal.setitimer(signal.ITIMER_PROF, 0)


def judge(reader: Reader, folder: Path, outcome: Outcome) -> str | None:
    """Read a folder, count the outcome, and return the kind of a finding that is new."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome.inputs += 1
    key, example = "", ""
    try:
        with limits(folder):
            reader.read(folder)
        outcome.accepted += 1
    except EnfoldError as error:
        outcome.refused += 1
        key, example = _refusal(error)
    except Hang:
        key, example = "hang", traceback.format_exc()[-600:]
    except CodeRan as error:
        key, example = "code", str(error)
    except MemoryError as error:
        key, example = "memory", str(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        key, example = _raw(error), traceback.format_exc()[-900:]
    if (folder / SENTINEL).exists() or Path(SENTINEL).exists():
        key, example = "code", "the sentinel was written"
        (folder / SENTINEL).unlink(missing_ok=True)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    if not key and grown > GROWTH:
        key, example = "memory", f"{grown >> 10} MB more"
    return key if key and outcome.found(key, example) else None


def _refusal(error: EnfoldError) -> tuple[str, str]:
    """Return what is wrong with a message, if anything."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
            return "allocated before it was refused", str(error)[:300]
        cause = cause.__cause__
    if len(str(error)) > LONGEST or "Traceback" in str(error):
        return "long message", str(error)[:300]
    return "", ""


def _raw(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/enfold/" in frame.filename and "site-packages" not in frame.filename]
    place = f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "?"
    return f"{type(error).__name__} in {place}"


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
INSTEAD = ("missing", "folder", "empty", "loop")  # of a file


def plans(kinds: dict[str, tuple[str, ...]]) -> st.SearchStrategy[tuple[str, str, Any]]:
    """Return a strategy of a file, the kind of its mutations, and a tree of values for them."""
    pairs = [(name, kind) for name, each in sorted(kinds.items()) for kind in each]
    return st.tuples(st.sampled_from(pairs), TREES).map(lambda drawn: (*drawn[0], drawn[1]))


def mutated(draw: Draws, kind: str, content: bytes) -> bytes | str:
    """Return the new content of a file, or rarely what is there instead of it."""
    if draw(draws.integers(0, 60)) == 0:
        return str(draw(draws.sampled_from(INSTEAD)))
    return MUTATIONS[kind](draw, content)


def put(folder: Path, name: str, content: bytes | str) -> None:
    """Write a file, or what is there instead of it."""
    path = folder / name
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    if content == "folder":
        path.mkdir()
    elif content == "loop":
        path.symlink_to(path)
    elif content != "missing":
        path.write_bytes(b"" if isinstance(content, str) else content)


def run(reader: Reader, template: Path, folder: Path, number: int, seed: int, kept: Path) -> dict[str, Any]:
    """Draw and judge inputs, and return the counts; the first input of each finding is copied to `kept`.

    Args:
        reader: The reader.
        template: Its valid files.
        folder: Where they are changed.
        number: The number of inputs.
        seed: The seed of all draws.
        kept: The folder of inputs that are findings.
    """
    warnings.simplefilter("ignore")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    shutil.copytree(template, folder, dirs_exist_ok=True)
    kinds = {name: each for name, each in reader.kinds.items() if (folder / name).is_file()}
    valid = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    outcome, progress = Outcome(), folder.with_name("progress")
    os.chdir(folder)

    def read_one(name: str, content: bytes | str, repaired: bool) -> None:
        put(folder, name, content)
        if repaired and reader.repair is not None:
            reader.repair(folder)
        found = judge(reader, folder, outcome)
        if found:
            place = kept / f"{reader.name}-{found[:60].replace('/', '_')}-{seed}"
            shutil.copytree(folder, place, symlinks=True, dirs_exist_ok=True)
        _restore(folder, valid)

    def each(plan: tuple[str, str, Any]) -> None:
        name, kind, tree = plan
        for _ in range(min(PER_PLAN, number - outcome.inputs)):
            progress.write_text(f"{reader.name} {seed} {outcome.inputs}")
            draw = Draws(seed * 1_000_003 + outcome.inputs, tree)
            read_one(name, mutated(draw, kind, valid[name]), draw(draws.integers(0, 3)) > 0)

    settings = hypothesis.settings(
        max_examples=-(-number // PER_PLAN),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    with suppress(hypothesis.errors.Flaky):  # a strategy that its author takes for flaky: another seed continues
        hypothesis.seed(seed)(settings(hypothesis.given(plans(kinds))(each)))()
    return vars(outcome)


def _restore(folder: Path, valid: dict[str, bytes]) -> None:
    """Write what an input or its reader has changed as it was."""
    for place, _, files in os.walk(folder):
        for file in files:
            if os.path.relpath(os.path.join(place, file), folder) not in valid:
                os.unlink(os.path.join(place, file))
    for name, content in valid.items():
        path = folder / name
        if path.is_symlink() or not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            put(folder, name, content)
