"""Copies of data on a node's disk: used, mended and refused for lack of room; training reads from the copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.data import staging
from hybridtron.data.folder import TokenFolder
from hybridtron.data.loader import Loader, build_loader
from hybridtron.data.sources import Sources
from hybridtron.problems import ConfigError
from tests.train.conftest import small_run_arguments


@pytest.fixture
def shared(make_folder: Callable[..., TokenFolder]) -> Path:
    """A prepared folder of several shards."""
    return make_folder(train=tuple(range(1, 41)), validation=(11, 4, 25, 40)).path


def stage(plan: RunPlan) -> str:
    return staging.stage(plan, lambda done, total: None)


def plan_of(data: Path, folder: Path, *settings: str) -> RunPlan:
    small = small_run_arguments(data, folder / "run")
    return RunPlan.of(load([*small, "model.vocab_size=999", f"cluster.stage={folder / 'disk'}", *settings]))


def copies(folder: Path) -> dict[str, Path]:
    """The copied shards, by their paths in the folder."""
    (entry,) = (folder / "disk").glob("?" * 16)
    return {str(path.relative_to(entry)): path for path in entry.glob("[tv]*/**/*.mds")}


def shards_of(data: Path) -> dict[str, bytes]:
    return {str(path.relative_to(data)): path.read_bytes() for path in data.rglob("*.mds")}


def tokens_of(loader: Loader) -> list[object]:
    return [batch.tokens_BL.tolist() for step in range(4) for batch in loader.micro_batches(step)]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_training_reads_the_copy(
    compression: str | None, make_folder: Callable[..., TokenFolder], tmp_path: Path
) -> None:
    shared = make_folder(train=tuple(range(1, 41)), validation=(40, 25), compression=compression).path
    in_place = tokens_of(build_loader(plan_of(shared, tmp_path, "cluster.stage=null").phases[0]))
    plan = plan_of(shared, tmp_path)
    stage(plan)
    assert len(copies(tmp_path)) > 3
    shutil.move(shared, tmp_path / "away")
    assert tokens_of(build_loader(plan.phases[0], checked=True)) == in_place
    (folder,) = {source.folder.path for source in Sources.open(plan.phases[0], checked=True).mixture}
    assert folder.is_relative_to(tmp_path / "disk")


def test_original_stays_and_a_complete_copy_is_used_again(shared: Path, tmp_path: Path) -> None:
    before = shards_of(shared)
    plan = plan_of(shared, tmp_path)
    assert f"in {len(before)} shards were missing" in stage(plan)
    assert shards_of(shared) == before
    inodes = {name: path.stat().st_ino for name, path in copies(tmp_path).items()}
    assert {name: path.read_bytes() for name, path in copies(tmp_path).items()} == before
    assert "0 GB in 0 shards were missing" in stage(plan)
    assert {name: path.stat().st_ino for name, path in copies(tmp_path).items()} == inodes


def test_bytes_of_copied_and_existing_shards_are_counted(shared: Path, tmp_path: Path) -> None:
    """Verification of existing shards takes time too, so that without them a restart would report nothing."""
    sizes = [len(data) for data in shards_of(shared).values()]
    counts: list[tuple[int, int]] = []
    plan = plan_of(shared, tmp_path)
    for missing in ("all", "one", "none"):
        staging.stage(plan, lambda *count: counts.append(count))
        assert [total for _, total in counts] == [sum(sizes)] * len(sizes), missing
        verified = [0, *(done for done, _ in counts)]
        assert sorted(after - before for before, after in pairwise(verified)) == sorted(sizes), missing
        counts.clear()
        if missing == "all":
            next(iter(copies(tmp_path).values())).unlink()


def test_incomplete_copy_is_mended(shared: Path, tmp_path: Path) -> None:
    plan = plan_of(shared, tmp_path)
    stage(plan)
    paths = list(copies(tmp_path).values())
    inodes = [path.stat().st_ino for path in paths]
    paths[0].unlink()
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    paths[2].write_bytes(paths[2].read_bytes()[:-1] + b"?")  # of the right size, so only its digest is wrong
    assert "in 2 shards" in stage(plan)
    assert {name: path.read_bytes() for name, path in copies(tmp_path).items()} == shards_of(shared)
    assert [path.stat().st_ino for path in paths[3:]] == inodes[3:]


def test_changed_original_is_copied_again(
    shared: Path, make_folder: Callable[..., TokenFolder], tmp_path: Path
) -> None:
    stage(plan_of(shared, tmp_path))
    changed = make_folder(name="other", train=tuple(range(1, 41)), validation=(11, 4, 25, 40), first=7).path
    shutil.rmtree(shared)
    changed.rename(shared)
    stage(plan_of(shared, tmp_path))
    assert {name: path.read_bytes() for name, path in copies(tmp_path).items()} == shards_of(shared)


def test_disk_without_room_is_refused_before_a_shard_is_copied(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(len(data) for data in shards_of(shared).values())
    free = needed - 1
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 0, free))
    with pytest.raises(ConfigError) as refused:
        stage(plan_of(shared, tmp_path))
    (problem,) = refused.value.problems
    assert (problem.key, problem.code) == ("cluster.stage", "does-not-fit")
    assert f"{free:,} bytes free" in problem.message
    assert f"{needed:,} bytes more" in problem.message
    assert copies(tmp_path) == {}
    free = needed
    assert "were missing" in stage(plan_of(shared, tmp_path))
    truncated = next(iter(copies(tmp_path).values()))
    truncated.write_bytes(truncated.read_bytes()[:-1])
    free = 1
    assert "in 1 shards" in stage(plan_of(shared, tmp_path))


def test_folder_that_cannot_be_written_is_named(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"set cluster\.stage to a folder"):
        stage(plan_of(shared, tmp_path, f"cluster.stage={tmp_path / 'file'}"))


def test_reading_the_original_is_tried_again(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copyfile
    failed: list[object] = []

    def failing_once(source: Path, target: Path) -> object:
        if source.suffix == ".mds" and source not in failed:
            failed.append(source)
            raise OSError(5, "Input/output error")
        return copy(source, target)

    monkeypatch.setattr("hybridtron.storage.fetch.shutil.copyfile", failing_once)
    monkeypatch.setattr("hybridtron.storage.retry.PAUSE", 0.0)
    stage(plan_of(shared, tmp_path))
    assert len(failed) == len(copies(tmp_path))
