"""The files of RULER's qa_1 and qa_2, from those who publish them, with digests: only these bytes are taken.

They stand in `FOLDER` of where a command runs, and tasks look for them there. Where there is no network, a file that
comes another way is named by data=FILE.
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
TIMEOUT = 60.0  # seconds without a byte
PIECE = 2**20  # bytes


@dataclass(frozen=True)
class PublishedFile:
    """A file of a data set."""

    about: str
    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
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


def download(one: PublishedFile, folder: Path, moved: Callable[[int, int], object]) -> Path:
    """The file, which appears when it is whole and the one that was published. Nothing is asked for one that is there.

    TaskError where it can't be had.
    """
    path = folder / one.name
    if path.exists():
        if (found := hashlib.sha256(path.read_bytes()).hexdigest()) == one.sha256:
            return path
        raise TaskError(f"{path} is another file than the published one: its SHA-256 is {found}; move it away")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = temporary_of(path)
    try:
        digest = _receive(one, temporary, moved)
        if digest != one.sha256:
            raise TaskError(f"{one.url} is no longer the file with the SHA-256 {one.sha256}: it has {digest}")
        sync(temporary)
        temporary.replace(path)
    except (OSError, HTTPException) as error:
        elsewhere = f"with a copy of {one.name} from elsewhere, data=FILE names it"
        raise TaskError(f"{one.url} can't be fetched: {error}; {elsewhere}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _receive(one: PublishedFile, path: Path, moved: Callable[[int, int], object]) -> str:
    """What the server sends, one byte more than wanted at most; its digest."""
    digest, size = hashlib.sha256(), 0
    with urllib.request.urlopen(one.url, timeout=TIMEOUT) as answer, path.open("wb") as file:
        while size <= one.size and (piece := answer.read(min(PIECE, one.size + 1 - size))):
            file.write(piece)
            digest.update(piece)
            size += len(piece)
            moved(size, one.size)
    return digest.hexdigest()
