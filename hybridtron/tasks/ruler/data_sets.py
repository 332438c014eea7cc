"""Published data sets of RULER's tasks qa_1 and qa_2: their files, which `hybridtron tasks download` downloads.

Files are stored in `FOLDER`, relative to the working directory, where the tasks look for them. On a machine without a
network, copy the file from another machine to any path, and set the task's option data=FILE to this path.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybridtron.storage.published import RemoteFile

FOLDER = Path("data/ruler")


@dataclass(frozen=True)
class PublishedDataSet:
    """A published data set: its title and its file."""

    title: str
    file: RemoteFile


PUBLISHED = {
    "squad": PublishedDataSet(
        "SQuAD 2.0",
        RemoteFile(
            "dev-v2.0.json",
            "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
            4_370_528,
            "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
        ),
    ),
    "hotpotqa": PublishedDataSet(
        "HotpotQA",
        RemoteFile(
            "hotpot_dev_distractor_v1.json",
            "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json",
            46_320_117,
            "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
        ),
    ),
}
