"""The one client of S3-compatible stores: what reads shards from a bucket and copies checkpoints into one.

Credentials and region come from where boto3 finds them, the address of stores other than Amazon's from
S3_ENDPOINT_URL. Inside an attempt botocore repeats what a store refuses for a moment (AWS_MAX_ATTEMPTS, 3 unless set);
attempts themselves are bounded and repeated by `attempts.py`. Nothing is ever deleted here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from hybridtron.requirements import missing
from hybridtron.storage.attempts import ObjectMissingError, Patience, StorageError, attempted

AT_ONCE = 8 * 2**20  # bytes that are asked of a connection at a time
_MISSING = {"404", "NoSuchBucket", "NoSuchKey"}
_FORBIDDEN = {"403", "AccessDenied"}  # also of what is missing, for those who may not list the bucket


class Bucket:
    """The place in a bucket that a URL names. Names are relative to it; threads and forked processes may share it."""

    def __init__(self, url: str, patience: Patience) -> None:
        try:
            import boto3  # noqa: F401  loaded here, so that its absence is known before anything is tried
        except ImportError as error:
            raise StorageError(f"needs what is absent: {missing('s3') or error}") from error
        parsed = urlparse(url)
        self.url, self.bucket, self.prefix = url.rstrip("/"), parsed.netloc, parsed.path.strip("/")
        self.patience = patience
        self._connected: tuple[int, Any] | None = None  # the process that made a client, and the client

    def bring(self, name: str, into: Path) -> Path:
        """Write an object into a file of this machine: one attempt, neither bounded nor repeated."""
        into.parent.mkdir(parents=True, exist_ok=True)
        with into.open("wb") as file:
            for piece in self._arriving(name):
                file.write(piece)
        return into

    def pieces(self, name: str) -> Iterator[bytes]:
        """The bytes of an object as they arrive, each piece in bounded time.

        There is no second attempt: what was given out by then can't be taken back.
        """
        once, arriving = replace(self.patience, retries=0), self._arriving(name)
        while piece := attempted(once, AT_ONCE, "read", lambda: next(arriving, b"")):
            yield piece

    def small(self, name: str, limit: int) -> bytes | None:
        """The whole of an object, None where there is none; StorageError where it has more bytes than the limit."""
        stored = bytearray()
        try:
            for piece in self.pieces(name):
                stored += piece
                if len(stored) > limit:
                    raise StorageError(f"{self.url}/{name} has more than {limit:,} bytes")
        except ObjectMissingError:
            return None
        return bytes(stored)

    def put(self, name: str, stored: bytes) -> None:
        """Write a small object."""
        place = {"Bucket": self.bucket, "Key": self._key(name)}
        self._write(name, len(stored), lambda: self._client.put_object(**place, Body=stored))

    def put_file(self, name: str, path: Path) -> None:
        """Write an object as a file of this machine; a large one is sent in parts, side by side."""
        place = (self.bucket, self._key(name))
        self._write(name, path.stat().st_size, lambda: self._client.upload_file(str(path), *place))

    def _write(self, name: str, size: int, request: Callable[[], object]) -> None:
        def attempt() -> None:
            with self._named(name):
                request()

        attempted(self.patience, size, "written", attempt)

    def _arriving(self, name: str) -> Iterator[bytes]:
        with self._named(name):
            body = self._client.get_object(Bucket=self.bucket, Key=self._key(name))["Body"]
            while piece := body.read(AT_ONCE):  # raises where fewer bytes come than the store announced
                yield piece

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}".lstrip("/")

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Turn the answers that no later attempt changes into Python's own errors, with the object's name."""
        from botocore.exceptions import ClientError

        try:
            yield
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code")
            if code in _MISSING:
                raise FileNotFoundError(f"{self.url}/{name} is not found: {code}") from error
            if code in _FORBIDDEN:
                raise PermissionError(f"{self.url}/{name}: {code}") from error
            raise

    @property
    def _client(self) -> Any:
        """This process's own: a forked one has its parent's connections, and would mix up the answers."""
        if self._connected is None or self._connected[0] != os.getpid():
            self._connected = os.getpid(), _connect(self.patience.timeout)
        return self._connected[1]


def _connect(timeout: float) -> Any:
    from boto3.session import Session  # of its own, as boto3's default one is not for several threads
    from botocore.config import Config

    needed: Any = "when_required"  # other stores than Amazon's do not know the checksums of today's clients
    config = Config(
        connect_timeout=min(20, timeout),
        read_timeout=timeout,
        retries={"mode": "standard"},
        request_checksum_calculation=needed,
        response_checksum_validation=needed,
    )
    return Session().client("s3", endpoint_url=os.environ.get("S3_ENDPOINT_URL"), config=config)
