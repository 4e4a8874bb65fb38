"""Downloads that resume after interruptions and are verified by checksum."""

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
TIMEOUT = 30.0  # seconds without data
RECONNECTIONS = 20
MEGABYTE = 1e6
LOOPBACK = {"127.0.0.1", "::1", "localhost"}


@dataclass(frozen=True)
class Remote:
    """The official URL of a file with its published checksum."""

    url: str
    md5: str
    bytes: int

    @property
    def name(self) -> str:
        """The last component of the URL."""
        return self.url.rpartition("/")[2]


def download(remote: Remote, target: Path, remedy: str) -> None:
    """Download a file via `target`.part, from which an interrupted download is resumed.

    Args:
        remote: The file to download.
        target: Path of the result.
        remedy: End of the error messages: what to do without a network.

    Raises:
        EnfoldError: If the download fails or the checksum is wrong.
    """
    _require_secure(remote.url, remote.url)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    if part.is_symlink() or _size(part) > remote.bytes:  # not a part of this file
        part.unlink()
    resumed = part.exists()
    _receive(remote, part, remedy)
    if resumed and file_md5(part) != remote.md5:  # the resumed part may be damaged or of another file
        part.unlink()
        _receive(remote, part, remedy)
    if (md5 := file_md5(part)) != remote.md5:
        part.unlink()
        raise EnfoldError(f"{remote.url} must have the MD5 {remote.md5}, got {md5}: try again, or {remedy}")
    with part.open("rb") as written:
        os.fsync(written.fileno())
    part.replace(target)


def _receive(remote: Remote, part: Path, remedy: str) -> None:
    """Stream into the part file, and reconnect as long as each connection makes progress."""
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
        f"{remote.url} must download in {RECONNECTIONS} connections, but all of them were interrupted: try again "
        f"later, or {remedy}"
    )


def _stream(remote: Remote, part: Path, bar: ProgressBar) -> None:
    """Receive one connection: append to the part file, or replace it if the server does not support ranges."""
    have = _size(part)
    headers = {"Range": f"bytes={have}-"} if have else {}
    request = urllib.request.Request(remote.url, headers=headers)  # noqa: S310  (checked by `_require_secure`)
    try:
        response = cast(HTTPResponse, urllib.request.build_opener(_Redirects).open(request, timeout=TIMEOUT))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # nothing left to send; the checksum decides
            return
        raise
    with response:
        have = have if response.status == HTTPStatus.PARTIAL_CONTENT else 0
        expected = min(have + (response.length or 0), remote.bytes)
        with open(part, "ab" if have else "wb", opener=open_no_follow) as file:
            while chunk := response.read(min(CHUNK, remote.bytes + 1 - file.tell())):
                file.write(chunk)
                bar.advance(len(chunk) / MEGABYTE)
                bar.say(f"{file.tell() / MEGABYTE:.1f} MB")
    if _size(part) < expected:
        raise ConnectionError(f"the connection was interrupted after {_size(part)} of {expected} bytes")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects to https URLs only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        """Return the redirected request.

        Args:
            req: The request.
            fp: The response.
            code: HTTP status.
            msg: HTTP reason.
            headers: Headers of the response.
            newurl: The new address.
        """
        _require_secure(newurl, req.full_url)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _require_secure(url: str, origin: str) -> None:
    """Refuse URLs without encryption, except those of this computer."""
    target, first = urllib.parse.urlsplit(url), urllib.parse.urlsplit(origin)
    is_local = target.scheme == "http" and {target.hostname, first.hostname} <= LOOPBACK
    if target.scheme != "https" and not is_local:
        raise EnfoldError(f"data are downloaded over https only, got {url}: download and verify the file manually")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def download_lock(folder: Path) -> Iterator[None]:
    """Let only one process at a time download into a folder, on systems with file locks."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(folder / ".lock", "a", opener=open_no_follow) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
