"""Exact memory peaks, from rehearsals whose results are kept in the user's cache.

A rehearsal simulates a training step without a GPU, and needs its own process. This module therefore runs the command
`hybridtron rehearse`.

Peaks are stored under a digest of the code, the configuration, the GPUs, and the versions of torch and megatron-core.
If any of these changes, the peaks are computed again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from hybridtron.compiled import NotBuilt, cache_folder
from hybridtron.config.load import load, to_yaml
from hybridtron.problems import Unusable
from hybridtron.rehearse.suite import code_digest
from hybridtron.train.jsonl import read_record, write_whole

FOLDER = "rehearsed"
PACKAGES = ("torch", "megatron-core")


def rehearsed_peaks(settings: Sequence[str], gpus: int, gpu: str) -> list[int]:
    """Return the tensors' peak memory in bytes, for each pipeline rank.

    Raises Unusable if the step can't be rehearsed.
    """
    key = _key(settings, gpus, gpu)
    peaks = _kept(key)
    if peaks is None:
        peaks = _rehearse(settings, gpus, gpu)
        with suppress(NotBuilt, OSError):  # if the cache can't be written, the next call rehearses again
            write_whole(cache_folder(FOLDER) / f"{key}.json", json.dumps({"peaks": peaks}))
    return peaks


def _key(settings: Sequence[str], gpus: int, gpu: str) -> str:
    versions = [importlib.metadata.version(name) for name in PACKAGES]
    text = json.dumps([code_digest(), versions, to_yaml(load(settings)), gpus, gpu])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _kept(key: str) -> list[int] | None:
    with suppress(NotBuilt):
        return read_record(cache_folder(FOLDER) / f"{key}.json").get("peaks")
    return None


def _rehearse(settings: Sequence[str], gpus: int, gpu: str) -> list[int]:
    options = ["--gpus", str(gpus), "--gpu", gpu, "--rank", "all", "--no-kernels", "--json"]
    command = [sys.executable, "-m", "hybridtron", "rehearse", *settings, *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        cure = f"run `hybridtron rehearse {' '.join(settings)} --gpus {gpus}` for the full error"
        raise Unusable(f"the step can't be rehearsed: {reason}; {cure}", code="unavailable")
    return [report["memory"]["peak"] for report in json.loads(ended.stdout)]
