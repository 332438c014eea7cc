"""Client of S3-compatible stores, for reading data shards and for copying checkpoints. Objects are never deleted.

boto3 reads credentials and the region from its usual files and environment variables. For a store other than Amazon's,
set S3_ENDPOINT_URL to the store's address.

Retries have two levels. `retry.py` limits the duration of an attempt, such as the upload of a file, and repeats a
failed attempt. Within an attempt, botocore repeats a request that fails temporarily, up to AWS_MAX_ATTEMPTS requests in
total (by default 3).
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
from hybridtron.storage.retry import ObjectMissingError, RetryPolicy, StorageError, with_retries

BLOCK_BYTES = 8 * 2**20  # bytes per read from a connection
_MISSING = {"404", "NoSuchBucket", "NoSuchKey"}
_FORBIDDEN = {"403", "AccessDenied"}  # also returned for a missing object if the user may not list the bucket


class Bucket:
    """A folder in a bucket.

    url: s3://BUCKET/FOLDER; object names are relative to this folder
    patience: time limit and number of retries

    Threads and forked processes may share an instance.
    """

    def __init__(self, url: str, patience: RetryPolicy) -> None:
        try:
            import boto3  # noqa: F401  imported here, so that a missing package is reported before the first request
        except ImportError as error:
            raise StorageError(f"can't be used, since a package is missing: {missing('s3') or error}") from error
        parsed = urlparse(url)
        self.url, self.bucket, self.prefix = url.rstrip("/"), parsed.netloc, parsed.path.strip("/")
        self.patience = patience
        self._connected: tuple[int, Any] | None = None  # (process id, client of that process)

    def bring(self, name: str, into: Path) -> Path:
        """Download an object to the local file `into`, and return `into`.

        This method limits each wait for the network, but not the download's duration. The caller (`fetch.py`) limits
        the duration, and repeats a failed download. Raises FileNotFoundError if the object does not exist.
        """
        into.parent.mkdir(parents=True, exist_ok=True)
        with into.open("wb") as file:
            for block in self._read_blocks(name):
                file.write(block)
        return into

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield an object's bytes in blocks of up to BLOCK_BYTES, as they arrive.

        Raises StorageError if a block takes longer than `patience` allows for one attempt, and ObjectMissingError if
        the object does not exist. A failed read is not retried, since the caller has already used the earlier blocks.
        """
        single_attempt = replace(self.patience, retries=0)
        blocks = self._read_blocks(name)
        while block := with_retries(single_attempt, BLOCK_BYTES, "read", lambda: next(blocks, b"")):
            yield block

    def small(self, name: str, limit: int) -> bytes | None:
        """Return an object's bytes, or None if the object does not exist.

        Raises StorageError if the object has more than `limit` bytes, or if it can't be read.
        """
        stored = bytearray()
        try:
            for block in self.pieces(name):
                stored += block
                if len(stored) > limit:
                    raise StorageError(f"{self.url}/{name} has more than {limit:,} bytes")
        except ObjectMissingError:
            return None
        return bytes(stored)

    def put(self, name: str, stored: bytes) -> None:
        """Write bytes as an object in a single request, without multipart upload; for small objects."""
        target = {"Bucket": self.bucket, "Key": self._key(name)}
        self._write(name, len(stored), lambda: self._client.put_object(**target, Body=stored))

    def put_file(self, name: str, path: Path) -> None:
        """Upload a local file as an object. A large file is divided into parts that are uploaded in parallel."""
        key = self._key(name)
        self._write(name, path.stat().st_size, lambda: self._client.upload_file(str(path), self.bucket, key))

    def _write(self, name: str, size: int, request: Callable[[], object]) -> None:
        def attempt() -> None:
            with self._convert_errors(name):
                request()

        with_retries(self.patience, size, "written", attempt)

    def _read_blocks(self, name: str) -> Iterator[bytes]:
        with self._convert_errors(name):
            body = self._client.get_object(Bucket=self.bucket, Key=self._key(name))["Body"]
            while block := body.read(BLOCK_BYTES):  # raises an error if the connection ends before all bytes arrived
                yield block

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}".lstrip("/")

    @contextmanager
    def _convert_errors(self, name: str) -> Iterator[None]:
        """Convert the store's errors: FileNotFoundError for a missing object, PermissionError if access is denied.

        `with_retries` does not repeat an attempt after these two errors. It converts FileNotFoundError to
        ObjectMissingError, and PermissionError to StorageError. Other errors are raised here unchanged, and
        `with_retries` repeats the attempt.
        """
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
        """The boto3 client of this process, created at the first use.

        A forked process needs its own client. If two processes shared connections, each could get the other's
        responses.
        """
        if self._connected is None or self._connected[0] != os.getpid():
            self._connected = os.getpid(), _connect(self.patience.timeout)
        return self._connected[1]


def _connect(timeout: float) -> Any:
    from boto3.session import Session  # a session per client, because boto3's default session is not thread-safe
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
