"""Copies of a run's data on a node's own disk, so that training does not read a shared file system.

A node's copy is an entry of a cache (`storage/cache.py`) in the folder `cluster.stage`. Only the sources that phases
read are copied, with their held-out documents. Each call of `stage` reads the original's manifest again, and compares
the copy's files with the manifest's digests. So an existing copy is used, an incomplete or damaged copy is
mended, and after a change of the original only changed files are copied. Data at a URL is downloaded in the same way.
The folder has no limit: nothing is evicted, and copies remain after the run.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from hybridtron.config.resolve import RunPlan
from hybridtron.data.mds.store import DocumentStore
from hybridtron.data.sources import Sources, stage_of
from hybridtron.problems import ConfigError, Problem
from hybridtron.progress import ReportProgress

AT_ONCE = 32  # shards that are copied and mapped at the same time


def stage(plan: RunPlan, report_progress: ReportProgress) -> str:
    """Copy the data of all phases to this machine's folder `cluster.stage`.

    A file's digest is verified once. `report_progress` is called after each shard, with the bytes that were verified so
    far, copied before or now, and the bytes of all shards. Returns a text with the amount of data that was missing or
    had a wrong size. Raises ConfigError before a shard is copied if the disk has too little free space. Raises
    ConfigError or DataError if data can't be read or written.
    """
    began = time.monotonic()
    stores = _stores(plan)
    missing = [(store, store.missing()) for store in stores.values()]
    num_bytes = sum(sum(sizes.values()) for _, sizes in missing)
    folder = plan.config.cluster.stage
    if folder is not None and num_bytes:
        _require_room(Path(folder), num_bytes)
    all_bytes = sum(sum(store.shard_bytes) for store in stores.values())
    verified = 0

    def count(shard_bytes: int) -> None:
        nonlocal verified
        verified += shard_bytes
        report_progress(verified, all_bytes)

    for store in stores.values():  # existing shards too: a changed file is copied again
        _prepare(store, lambda shard, store=store: count(store.shard_bytes[shard]))
    num_shards = sum(len(sizes) for _, sizes in missing)
    return f"{num_bytes / 1e9:.3g} GB in {num_shards} shards were missing, {time.monotonic() - began:.1f} s"


def _prepare(store: DocumentStore, ready: Callable[[int], None]) -> None:
    """Copy and verify a store's shards, AT_ONCE at a time, because each is mapped into memory."""
    num_shards = len(store.shard_documents)
    for first in range(0, num_shards, AT_ONCE):
        store.prepare(range(first, min(first + AT_ONCE, num_shards)), ready)


def _stores(plan: RunPlan) -> dict[tuple[str, str, str], DocumentStore]:
    """Return (folder, split, source) -> store, for each split of each source that is copied."""
    stores: dict[tuple[str, str, str], DocumentStore] = {}
    for phase in plan.phases:
        if stage_of(phase) is None:
            continue
        sources = Sources.open(phase)
        for split in ("train", "validation"):
            for source, store in zip(sources.having(split), sources.stores(split), strict=True):
                stores.setdefault((source.folder.name, split, source.source), store)
    return stores


def _require_room(folder: Path, num_bytes: int) -> None:
    """Raise ConfigError if a folder's disk has fewer free bytes than the copies need."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        cure = "remove old copies from the folder, name a larger disk, or set cluster.stage=null to read data in place"
        why = f"is {folder}, which has {free:,} bytes free, but the data need {num_bytes:,} bytes more"
        raise ConfigError([Problem("cluster.stage", "does-not-fit", f"{why}: {cure}")])
