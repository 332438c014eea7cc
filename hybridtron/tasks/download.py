"""Downloads the data sets of RULER's tasks qa_1 and qa_2 from their publishers, and verifies them by SHA-256.

Files are stored in `FOLDER`, relative to the working directory, where the tasks look for them. On a machine without a
network, copy the file from another machine to any path, and set the task's option data=FILE to this path.
"""

from __future__ import annotations

import hashlib
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from hybridtron.storage.durable import sync, temporary_of
from hybridtron.tasks.base import TaskError

FOLDER = Path("data/ruler")
TIMEOUT = 60.0  # seconds without data after which a download fails
PIECE = 2**20  # bytes per read


@dataclass(frozen=True)
class PublishedFile:
    """The file of a published data set: description, URL, size in bytes and SHA-256."""

    about: str
    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """File name, the last part of the URL."""
        return self.url.rpartition("/")[2]


PUBLISHED = {
    "squad": PublishedFile(
        "SQuAD 2.0",
        "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
        4_370_528,
        "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
    ),
    "hotpotqa": PublishedFile(
        "HotpotQA",
        "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json",
        46_320_117,
        "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
    ),
}


def download(published: PublishedFile, folder: Path, moved: Callable[[int, int], object]) -> Path:
    """Download a file into `folder`, unless it exists there, and return its path.

    The file is written under a temporary name, and renamed once its digest is verified. `moved` is called during the
    download with (bytes received, size). Raises TaskError if the download fails, or if the received or existing file
    has another digest.
    """
    path = folder / published.name
    if path.exists():
        if (existing_digest := hashlib.sha256(path.read_bytes()).hexdigest()) == published.sha256:
            return path
        raise TaskError(
            f"{path} is not the published file: its SHA-256 is {existing_digest}; move it away and download again",
            code="changed",
        )
    folder.mkdir(parents=True, exist_ok=True)
    temporary = temporary_of(path)
    try:
        digest = _receive(published, temporary, moved)
        if digest != published.sha256:
            raise TaskError(
                f"{published.url} has changed: the downloaded file has the SHA-256 {digest}, not {published.sha256}",
                code="changed",
            )
        sync(temporary)
        temporary.replace(path)
    except (OSError, HTTPException) as error:
        cure = f"copy {published.name} from another machine, and set the task's option data=FILE"
        raise TaskError(f"{published.url} can't be downloaded: {error}; {cure}", code="unavailable") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _receive(published: PublishedFile, path: Path, moved: Callable[[int, int], object]) -> str:
    """Write the server's response to a file, and return its digest.

    The function reads at most one byte more than the expected size. So it does not read a larger file to its end, and
    returns a wrong digest.
    """
    digest = hashlib.sha256()
    size = 0
    with urllib.request.urlopen(published.url, timeout=TIMEOUT) as answer, path.open("wb") as file:
        while size <= published.size and (piece := answer.read(min(PIECE, published.size + 1 - size))):
            file.write(piece)
            digest.update(piece)
            size += len(piece)
            moved(size, published.size)
    return digest.hexdigest()
