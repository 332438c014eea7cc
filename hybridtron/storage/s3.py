"""The only client of S3-compatible stores. It reads shards from a bucket, and copies checkpoints into one.

Credentials and region come from boto3's usual places, the address of a store other than Amazon's from S3_ENDPOINT_URL.
Within an attempt, botocore retries requests that the store refuses for a moment (AWS_MAX_ATTEMPTS, 3 unless set).
Attempts themselves are bounded and retried by `attempts.py`. This module never deletes anything.
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

AT_ONCE = 8 * 2**20  # bytes per read from a connection
_MISSING = {"404", "NoSuchBucket", "NoSuchKey"}
_FORBIDDEN = {"403", "AccessDenied"}  # also the answer for a missing object, to users who may not list the bucket


class Bucket:
    """A folder in a bucket, by its URL. Names are relative to it; threads and forked processes may share it."""

    def __init__(self, url: str, patience: Patience) -> None:
        try:
            import boto3  # noqa: F401  imported early, so that its absence is reported before the first attempt
        except ImportError as error:
            raise StorageError(f"needs what is absent: {missing('s3') or error}") from error
        parsed = urlparse(url)
        self.url, self.bucket, self.prefix = url.rstrip("/"), parsed.netloc, parsed.path.strip("/")
        self.patience = patience
        self._connected: tuple[int, Any] | None = None  # process id and its client

    def bring(self, name: str, into: Path) -> Path:
        """Download an object to a local file: one attempt, without time limit or retry."""
        into.parent.mkdir(parents=True, exist_ok=True)
        with into.open("wb") as file:
            for piece in self._arriving(name):
                file.write(piece)
        return into

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield an object's bytes as they arrive, each read in bounded time.

        There is no retry, because bytes that were already yielded cannot be withdrawn.
        """
        single_attempt = replace(self.patience, retries=0)
        arriving = self._arriving(name)
        while piece := attempted(single_attempt, AT_ONCE, "read", lambda: next(arriving, b"")):
            yield piece

    def small(self, name: str, limit: int) -> bytes | None:
        """Return an object's bytes, or None if it does not exist; raise StorageError above `limit` bytes."""
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
        """Write a small object, in one request."""
        place = {"Bucket": self.bucket, "Key": self._key(name)}
        self._write(name, len(stored), lambda: self._client.put_object(**place, Body=stored))

    def put_file(self, name: str, path: Path) -> None:
        """Upload a local file as an object. A large file is sent in parts, in parallel."""
        key = self._key(name)
        self._write(name, path.stat().st_size, lambda: self._client.upload_file(str(path), self.bucket, key))

    def _write(self, name: str, size: int, request: Callable[[], object]) -> None:
        def attempt() -> None:
            with self._named(name):
                request()

        attempted(self.patience, size, "written", attempt)

    def _arriving(self, name: str) -> Iterator[bytes]:
        with self._named(name):
            body = self._client.get_object(Bucket=self.bucket, Key=self._key(name))["Body"]
            while piece := body.read(AT_ONCE):  # raises if fewer bytes arrive than the store announced
                yield piece

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}".lstrip("/")

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Convert errors that a retry cannot mend into FileNotFoundError or PermissionError, with the object's name."""
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
        """The boto3 client of this process.

        A forked process needs its own: on its parent's connections, answers would be mixed up.
        """
        if self._connected is None or self._connected[0] != os.getpid():
            self._connected = os.getpid(), _connect(self.patience.timeout)
        return self._connected[1]


def _connect(timeout: float) -> Any:
    from boto3.session import Session  # a new session, because boto3's default session is not thread-safe
    from botocore.config import Config

    checksum_setting: Any = "when_required"  # stores other than Amazon's may not know boto3's default checksums
    config = Config(
        connect_timeout=min(20, timeout),
        read_timeout=timeout,
        retries={"mode": "standard"},
        request_checksum_calculation=checksum_setting,
        response_checksum_validation=checksum_setting,
    )
    return Session().client("s3", endpoint_url=os.environ.get("S3_ENDPOINT_URL"), config=config)
