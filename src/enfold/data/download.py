"""Downloads that resume after an interruption and are complete and checked, or absent."""

from __future__ import annotations

import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, cast

from enfold.data.raw import file_md5
from enfold.errors import EnfoldError
from enfold.io.files import open_no_follow
from enfold.progress import ProgressBar, progress

CHUNK = 1 << 16
TIMEOUT = 30.0  # seconds without a byte
RECONNECTIONS = 20
MEGABYTE = 1e6
LOOPBACK = {"127.0.0.1", "::1", "localhost"}


@dataclass(frozen=True)
class Remote:
    """A file at its official address, with its published checksum."""

    url: str
    md5: str
    bytes: int

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]


def download(remote: Remote, target: Path, remedy: str) -> None:
    """Fetch a file to `target` through `target`.part, where an interrupted download goes on the next time.

    The remedy says what to do without a network: it ends the sentence of the error.
    """
    _require_secure(remote.url, remote.url)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    if part.is_symlink() or _size(part) > remote.bytes:  # no beginning of this file
        part.unlink()
    resumed = part.exists()
    _receive(remote, part, remedy)
    if resumed and file_md5(part) != remote.md5:  # the beginning may be from another file or a crash
        part.unlink()
        _receive(remote, part, remedy)
    if (md5 := file_md5(part)) != remote.md5:
        part.unlink()
        raise EnfoldError(
            f"{remote.url} must have the MD5 {remote.md5}, got {md5}, so nothing was kept: try again, or {remedy}"
        )
    with part.open("rb") as written:
        os.fsync(written.fileno())
    part.replace(target)


def _receive(remote: Remote, part: Path, remedy: str) -> None:
    """Stream into the part file, and reconnect for as long as each connection brings something."""
    with progress(f"downloading {remote.name} (MB)", remote.bytes / MEGABYTE) as bar:
        for _ in range(RECONNECTIONS):
            before = _size(part)
            try:
                _stream(remote, part, bar)
                return
            except (OSError, HTTPException) as error:
                reason = getattr(error, "reason", None) or error
                if _size(part) <= before:
                    raise EnfoldError(
                        f"{remote.url} must be downloaded to {part.parent}, got {type(error).__name__} ({reason}): "
                        f"{remedy}"
                    ) from error
    raise EnfoldError(
        f"{remote.url} must not break off {RECONNECTIONS} times, which it did: try again later, or {remedy}"
    )


def _stream(remote: Remote, part: Path, bar: ProgressBar) -> None:
    """One connection: what it brings is appended to the part file, or replaces it if the server knows no ranges."""
    have = _size(part)
    headers = {"Range": f"bytes={have}-"} if have else {}
    request = urllib.request.Request(remote.url, headers=headers)  # noqa: S310  (checked by `_require_secure`)
    try:
        response = cast(HTTPResponse, urllib.request.build_opener(_Redirects).open(request, timeout=TIMEOUT))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # nothing is left to send; the checksum decides
            return
        raise
    with response:
        have = have if response.status == HTTPStatus.PARTIAL_CONTENT else 0
        expected = min(have + (response.length or 0), remote.bytes)
        with open(part, "ab" if have else "wb", opener=open_no_follow) as file:
            while chunk := response.read(min(CHUNK, remote.bytes + 1 - file.tell())):  # one too many is seen as wrong
                file.write(chunk)
                bar.advance(len(chunk) / MEGABYTE)
                bar.say(f"{file.tell() / MEGABYTE:.1f} MB")
    if _size(part) < expected:
        raise ConnectionError(f"the connection broke off after {_size(part)} of {expected} bytes")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Followed to secure addresses only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        """What is asked for next."""
        _require_secure(newurl, req.full_url)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _require_secure(url: str, origin: str) -> None:
    """Refuse addresses without encryption, but for those of this computer."""
    asked, first = urllib.parse.urlsplit(url), urllib.parse.urlsplit(origin)
    own = asked.scheme == "http" and {asked.hostname, first.hostname} <= LOOPBACK
    if asked.scheme != "https" and not own:
        raise EnfoldError(f"data are downloaded over https only, got {url}: download the file yourself, and check it")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time downloads into a folder; where the system has no file locks, the checksum must do."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(folder / ".lock", "a", opener=open_no_follow) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
