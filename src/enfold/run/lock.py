"""One writer per run directory: a lock of the operating system on a file that names its holder.

The kernel releases the lock of a process when it ends, and distinguishes processes with equal ids, such as those of
containers that share a folder. The file names the holder and shows whether it is alive on file systems that have no
locks, or locks of one machine only: its modification time is the holder's last sign of life, by the clock of the file
system, which all machines share. There the holder also reads the file again after a moment: of several processes that
began at once, the one that the file names goes on. Readers do not lock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shlex
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from enfold.errors import EnfoldError, LockWarning, level_outside

if sys.platform != "win32":
    import fcntl

FILE = ".lock"
BEAT = 10.0  # seconds between two signs of life
GONE = 60.0  # seconds without a sign of life after which a process on another machine is considered ended
SETTLE = 1.0  # seconds after which a holder reads its name again, on file systems of several machines
LOCAL = {  # file systems of one machine, whose kernel knows all locks
    *(
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "tmpfs",
        "ramfs",
        "overlay",
        "f2fs",
        "bcachefs",
        "jfs",
        "reiserfs",
    ),
    *("vfat", "exfat", "ntfs", "ntfs3", "squashfs", "aufs", "rootfs", "devtmpfs"),
}
HELD_BY_OTHERS = (errno.EWOULDBLOCK, errno.EACCES)


class FolderInUse(EnfoldError):
    """Another process writes to the folder."""


@dataclass(frozen=True)
class Holder:
    """A process that writes."""

    host: str
    boot: str  # id of the machine's boot
    namespace: str  # of process ids; each container has its own
    pid: int
    started: str  # in clock ticks since the boot
    command: str

    @classmethod
    def current(cls) -> Holder:
        """Return the current process."""
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200]
        boot = _read(Path("/proc/sys/kernel/random/boot_id")) or platform.node()
        return cls(platform.node(), boot, _namespace(), os.getpid(), _start_time(os.getpid()), command)

    def is_gone(self, age: float, kernel: bool) -> bool:
        """Return whether the process has ended.

        On this machine the result is exact; of another machine only the age of the last sign of life is known.

        Args:
            age: Seconds since the last sign of life.
            kernel: Whether the kernel has just granted the lock.
        """
        here = Holder.current()
        if self.boot == here.boot and kernel:
            return True
        if self.boot == here.boot and self.namespace == here.namespace and self.started:
            return _start_time(self.pid) != self.started
        return age > GONE


class _Held:
    """A lock that this process holds."""

    def __init__(self, file: Path, descriptor: int) -> None:
        self.file, self.descriptor, self.released = file, descriptor, threading.Event()
        self.thread = threading.Thread(target=self._beat, name="enfold lock", daemon=True)
        self._write(json.dumps(asdict(Holder.current())))
        self.thread.start()
        _held.add(self)

    def _write(self, text: str) -> None:
        os.ftruncate(self.descriptor, 0)
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        os.write(self.descriptor, text.encode())

    def _beat(self) -> None:
        while not self.released.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self.file)

    def release(self, *, named: bool = True) -> None:
        """Let others write.

        Args:
            named: Whether the file names this process; else it is another's.
        """
        _held.discard(self)
        self.released.set()
        self.thread.join()
        with contextlib.suppress(OSError):  # the folder may be gone
            if named:
                self._write("")
                self.file.unlink()
        os.close(self.descriptor)

    def require_named(self, folder: Path) -> None:
        """Refuse if the file names another process, which began at the same moment on another machine."""
        time.sleep(SETTLE)
        own = found = Holder.current()
        with contextlib.suppress(OSError, ValueError, TypeError):
            found = Holder(**json.loads(self.file.read_bytes()))  # opened again: a network file system asks its server
        if found != own:
            self.release(named=False)
            raise _refusal(folder, found, "wait until it ends, or choose another folder")


_held: set[_Held] = set()  # by this process
_depths = threading.local()  # how many contexts of a folder this thread has entered


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Hold the right of this thread to write to the folder, which is created; the context is reentrant.

    Raises:
        EnfoldError: If another process or thread writes to the folder.
    """
    depths, key = vars(_depths), str(folder.resolve())
    held = None if depths.get(key) else _acquire(folder)
    depths[key] = depths.get(key, 0) + 1
    try:
        yield
    finally:
        depths[key] -= 1
        if held is not None:
            held.release()


def _acquire(folder: Path) -> _Held:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
            try:
                kernel, held = _try_lock(descriptor), None
                if _is_same(descriptor, folder / FILE):  # not removed by its holder after it was opened here
                    _require_free(folder, descriptor, kernel)
                    held = _Held(folder / FILE, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            if held is not None:
                if kernel is None or not _is_local(folder):
                    held.require_named(folder)
                    _warn(folder, kernel)
                return held
            os.close(descriptor)
    except OSError as error:
        raise EnfoldError(
            f"a run needs a writable folder, got '{folder}' ({error.strerror}): choose another"
        ) from error


def _warn(folder: Path, kernel: bool | None) -> None:
    """Say that other machines are recognized by their signs of life only, once for each folder."""
    what = "has no locks" if kernel is None else "may be shared by machines that do not share its locks"
    warnings.warn(
        f"the file system of '{folder}' {what}: another process is recognized by its last sign of life, every "
        f"{BEAT:.0f} s; start one process at a time there",
        LockWarning,
        stacklevel=level_outside(),
    )


def _try_lock(descriptor: int) -> bool | None:
    """Return whether the kernel granted the lock; None if the file system supports no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        return False if error.errno in HELD_BY_OTHERS else None


def _is_same(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _require_free(folder: Path, descriptor: int, kernel: bool | None) -> None:
    try:
        holder = Holder(**json.loads(os.read(descriptor, 1 << 16)))
    except (ValueError, TypeError):  # just made, or cut off by a kill
        holder = None
    age = _now(folder) - os.fstat(descriptor).st_mtime
    if kernel is not False and (holder is None or holder.is_gone(age, kernel is True)):
        return
    away = holder is not None and kernel is not False
    remedy = f"wait until it ends, or {GONE:.0f} s after its last sign of life, which was {age:.0f} s ago"
    raise _refusal(folder, holder, remedy if away else "wait until it ends, or choose another folder")


def _refusal(folder: Path, holder: Holder | None, remedy: str) -> FolderInUse:
    who = f"process {holder.pid} on {holder.host} ({holder.command})" if holder else "another process"
    return FolderInUse(f"one process at a time writes to a run, but {who} is writing to '{folder}': {remedy}")


def _now(folder: Path) -> float:
    """Return the time by the clock of the file system: the clocks of two machines may differ."""
    try:
        with tempfile.TemporaryFile(dir=folder) as made:
            return os.fstat(made.fileno()).st_mtime
    except OSError:
        return time.time()


def _is_local(folder: Path) -> bool:
    """Return whether the folder is on a file system of this machine only; what is unknown is not."""
    found, where = "", folder.resolve()
    for line in _read(Path("/proc/self/mounts")).splitlines():
        fields = line.split(" ")
        place = Path(fields[1].replace("\\040", " ")) if len(fields) > 2 else None
        if place is not None and where.is_relative_to(place) and len(str(place)) >= len(found.partition(" ")[2]):
            found = f"{fields[2]} {place}"
    return not found or found.partition(" ")[0] in LOCAL


def _close_all() -> None:
    """Close the lock in a forked child: it belongs to the parent and ends with it."""
    for held in _held:
        os.close(held.descriptor)
    _held.clear()
    vars(_depths).clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Return when a process started; empty if it has ended."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()  # the name before may hold anything
    return fields[19] if len(fields) > 19 else ""
