"""Downloads of published files: a URL, or the files of a repository on the Hugging Face Hub.

    https://host/path/part.jsonl.zst            one file
    hf:OWNER/NAME                               all files of a data set with a wanted suffix
    hf:OWNER/NAME@REVISION:train/*.parquet      files of a branch, tag or commit whose paths match a pattern

A file is received under a temporary name, verified, and renamed. An interrupted download continues where it stopped, if
the server confirms that the file is the same. The folder's record, `published.json`, has the URL, size and SHA-256 of
each finished file. If the Hub's index gives a file's SHA-256, the file must have it. Otherwise the SHA-256 is recorded
at the first download, and required afterwards. The record also keeps the commit of a repository, so later downloads
into the folder give the same files. HF_ENDPOINT is the address of another server than the Hub, and HF_TOKEN is a token
for the server.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote, urlparse

from hybridtron.nested import NotParsed, json_of
from hybridtron.problems import Unusable
from hybridtron.storage.durable import put, sync, temporary_of
from hybridtron.storage.remote import inside
from hybridtron.storage.retry import StorageError

RECORD = "published.json"
HUB = "hf:"
DATA_SETS = "/datasets"  # kinds of repositories on the Hub, by their place in its URLs
MODELS = "/models"
TIMEOUT = 60.0  # seconds without data after which an attempt fails
ATTEMPTS = 5  # attempts in a row without new bytes, after which a download fails
PAUSE = 0.5  # seconds before another attempt; doubled for each attempt that receives nothing
PASSING = (408, 416, 429)  # HTTP status codes after which another attempt may succeed
PIECE = 2**20  # bytes per read
MAX_INDEX_BYTES = 2**26

Moved = Callable[[str, int, int | None], object]
"""Function for progress: called with a file's name, the bytes received, and the file's size if it is known."""


class DownloadError(Unusable):
    """Raised if a published file can't be downloaded, or is not the file that was expected."""


@dataclass(frozen=True)
class RemoteFile:
    """A file to download: its path in the folder, its URL, and its size and SHA-256 if an index gives them."""

    name: str
    url: str
    size: int | None = None
    sha256: str | None = None


def is_published(source: str) -> bool:
    """Return True for a source that must be downloaded, and False for a local path."""
    return source.startswith((HUB, "https://", "http://"))


def download(source: str, folder: Path, kind: str, suffixes: Sequence[str], moved: Moved) -> list[Path]:
    """Download a source's files into a folder, unless they are there, and return their paths.

    kind: the kind of a repository on the Hub, DATA_SETS or MODELS
    suffixes: file names end in one of these, unless the source has a pattern

    Raises DownloadError if a file can't be downloaded, or if it differs from the record or from the Hub's index.
    """
    record = _read_record(folder)
    if source.startswith(HUB):
        files = _of_repository(source, record, kind, suffixes)
    else:
        files = [RemoteFile(unquote(urlparse(source).path).rpartition("/")[2], source)]
    if not files or not files[0].name:
        raise DownloadError(f"{source} has no file that can be downloaded: name a file, or a pattern", code="no-file")
    return _all_fetched(files, folder, record, moved)


def download_file(file: RemoteFile, folder: Path, moved: Moved) -> Path:
    """Download a known file into a folder, unless it is there, and return its path.

    Raises DownloadError if the file can't be downloaded, or if its size or SHA-256 differs from the expected value.
    """
    return _all_fetched([file], folder, _read_record(folder), moved)[0]


def _all_fetched(files: Sequence[RemoteFile], folder: Path, record: dict[str, Any], moved: Moved) -> list[Path]:
    """Fetch files into the folder, verify and record them, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for published in files:
        paths.append(_fetched(published, folder, record, moved))
        put(folder / RECORD, (json.dumps(record, indent=1) + "\n").encode())
    return paths


def _read_record(folder: Path) -> dict[str, Any]:
    """Return the folder's record: finished files by name, and the commits of repositories."""
    path = folder / RECORD
    if not path.exists():
        return {"commits": {}, "files": {}}
    try:
        return json_of(path.read_bytes())
    except NotParsed as error:
        raise DownloadError(f"{path} {error}: move the folder away and download again", code="malformed") from error


def _of_repository(source: str, record: dict[str, Any], kind: str, suffixes: Sequence[str]) -> list[RemoteFile]:
    """Return a repository's files from the Hub's index, sorted by path; at the recorded commit if there is one."""
    repository, _, pattern = source.removeprefix(HUB).partition(":")
    name, _, revision = repository.partition("@")
    server = _server()
    commit = record["commits"].get(repository) or revision or "main"
    place = f"{server}/api{kind}/{quote(name)}/revision/{quote(commit, safe='')}?blobs=true"
    try:
        with _request(place, {}) as answer:
            index = json_of(answer.read(MAX_INDEX_BYTES))
        record["commits"][repository] = commit = index["sha"]
        entries = sorted(index["siblings"], key=lambda entry: entry["rfilename"])
    except (OSError, HTTPException) as error:
        cure = "check the name, HF_TOKEN and the network"
        raise DownloadError(f"{place} can't be read: {error}; {cure}", code="unavailable") from error
    except (NotParsed, KeyError, TypeError) as error:
        raise DownloadError(
            f"{place} is not an index of the Hub: {error!r}; check HF_ENDPOINT", code="malformed"
        ) from error
    prefix = "" if kind == MODELS else kind
    files = []
    for entry in entries:
        path = entry["rfilename"]
        matches = fnmatchcase(path, pattern) if pattern else path.lower().endswith(tuple(suffixes))
        if matches:
            url = f"{server}{prefix}/{quote(name)}/resolve/{quote(commit, safe='')}/{quote(path)}"
            files.append(RemoteFile(path, url, entry.get("size"), (entry.get("lfs") or {}).get("sha256")))
    return files


def _fetched(published: RemoteFile, folder: Path, record: dict[str, Any], moved: Moved) -> Path:
    """Return the path of a file that is in the folder, complete and verified."""
    try:
        path = inside(folder, published.name)
    except StorageError as error:
        raise DownloadError(f"{published.url} {error}", code="unsupported") from error
    if published.name == RECORD:
        raise DownloadError(f"{published.url} has the name of the record {RECORD}: rename it", code="conflict")
    record_of_file = record["files"].get(published.name)
    address = published.url.partition("?")[0]  # without the query, which may hold a signature that is renewed
    if record_of_file is not None and record_of_file["url"] != address and published.sha256 != record_of_file["sha256"]:
        raise DownloadError(
            f"{path} was downloaded from {record_of_file['url']}, not from {address}: use another folder",
            code="conflict",
        )
    expected = published.sha256 or (record_of_file or {}).get("sha256")
    if path.exists():
        if expected is None:
            raise DownloadError(
                f"{path} exists, but {RECORD} does not have it: move it away and download again", code="conflict"
            )
        _check(path, expected, f"{path} has changed", "move it away and download again")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = temporary_of(path)
        _receive(published, partial, moved)
        try:
            if published.size is not None:
                _check_size(published.url, partial.stat().st_size, published.size)
            _check(partial, expected, f"{published.url} has changed", "compare with the publisher")
        except DownloadError:
            partial.unlink()
            raise
        finally:
            _tag_of(partial).unlink(missing_ok=True)
        sync(partial)
        partial.replace(path)
    entry = RemoteFile(published.name, address, path.stat().st_size, expected or digest_of_file(path))
    record["files"][published.name] = asdict(entry)
    return path


def _check_size(url: str, received: int, expected: int) -> None:
    """Raise DownloadError if a file has another size than expected. A file that is too long was not read to its end."""
    if received > expected:
        raise DownloadError(f"{url} has more than {expected} bytes: compare with the publisher", code="changed")
    if received < expected:
        cure = "repeat the command, or compare with the publisher if the size stays"
        raise DownloadError(f"{url} has {received} bytes, not {expected}: {cure}", code="changed")


def _check(path: Path, expected: str | None, what: str, cure: str) -> None:
    """Raise DownloadError if a file has another SHA-256 than expected. With None, every file passes."""
    if expected is not None and (digest := digest_of_file(path)) != expected:
        raise DownloadError(f"{what}: its SHA-256 is {digest}, not {expected}; {cure}", code="changed")


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _receive(published: RemoteFile, partial: Path, moved: Moved) -> None:
    """Write a file from the server to `partial`, in several attempts; each continues where the last one stopped."""
    failures = 0
    while True:
        before = partial.stat().st_size if partial.exists() else 0
        try:
            _continue(published, partial, moved)
            return
        except (OSError, HTTPException) as error:
            gained = partial.exists() and partial.stat().st_size > before
            failures = 0 if gained else failures + 1
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in PASSING
            if failures == ATTEMPTS or refused:
                is_of_hub = published.url.startswith(f"{_server()}/")
                places = "the address and HF_TOKEN" if is_of_hub else "the address"
                raise DownloadError(
                    f"{published.url} can't be downloaded: {error}; check {places}, or repeat the command to continue",
                    code="unavailable",
                ) from error
            time.sleep(PAUSE * 2**failures)


def _continue(published: RemoteFile, partial: Path, moved: Moved) -> None:
    """Receive the rest of a file in one attempt. Raises OSError or HTTPException if the connection ends early.

    The server sends the rest only if the file has the tag (ETag) of the first attempt, and otherwise all of the file.
    A file that is longer than expected is not read to its end.
    """
    tag = _tag_of(partial)
    start = partial.stat().st_size if partial.exists() and tag.exists() else 0
    headers = {"Range": f"bytes={start}-", "If-Range": tag.read_text()} if start else {}
    try:
        answer = _request(published.url, headers)
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:
            if error.headers.get("Content-Range") == f"bytes */{start}":  # all of the file was received before
                return
            partial.unlink()
        raise
    continues = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {start}-")
    if answer.status == 206 and not continues:
        answer.close()
        tag.unlink()
        raise ConnectionError("the server sent another part of the file than the rest")
    with answer, partial.open("ab" if continues else "wb") as file:
        if not continues:
            start = 0
            tag.unlink(missing_ok=True)
            if name := answer.headers.get("ETag"):
                tag.write_text(name)
        rest = answer.headers.get("Content-Length")
        size = None if rest is None else start + int(rest)
        while piece := answer.read(PIECE):
            file.write(piece)
            start += len(piece)
            moved(published.name, start, size)
            if published.size is not None and start > published.size:
                return
        if size is not None and start < size:
            raise ConnectionError(f"received {start} of {size} bytes")


def _tag_of(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.etag")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but does not send a token to another server."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlparse(req.full_url), urlparse(newurl)
        if old.scheme == "https" and new.scheme != "https":
            raise urllib.error.URLError(f"is redirected from https to {new.scheme}")
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and (new.scheme, new.netloc) != (old.scheme, old.netloc):
            following.remove_header("Authorization")
        return following


def _server() -> str:
    """Return the address of the Hub, or of another server with the same interface."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _request(url: str, headers: dict[str, str]) -> HTTPResponse:
    token = os.environ.get("HF_TOKEN")
    if token and url.startswith(f"{_server()}/"):
        headers = {**headers, "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, headers={"User-Agent": "hybridtron", **headers})
    return urllib.request.build_opener(_Redirects).open(request, timeout=TIMEOUT)
