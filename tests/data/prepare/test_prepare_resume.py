"""An interrupted preparation: its cost, allowed changes before it resumes, and its worker processes."""

from __future__ import annotations

import dataclasses
import errno
import json
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from hybridtron.data.folder import FolderError
from hybridtron.data.prepare import parts as parts_module
from hybridtron.data.prepare import prepare_folder as prepare_module
from hybridtron.data.prepare.documents import ArgumentError, InputError, PrepareError
from hybridtron.data.prepare.input_files import find
from hybridtron.data.prepare.parts import FolderSettings
from hybridtron.data.prepare.prepare_folder import prepare
from hybridtron.data.prepare.vocabulary import Vocabulary, open_vocabulary
from hybridtron.data.workers import WorkerEnded
from tests.data.prepare.preparing import (
    TEXTS,
    contents_of,
    words,
    write_jsonl,
    zstd,
)
from tests.refusals import raises_code

ROOT = Path(__file__).parents[3]
SETTINGS = FolderSettings(validation=0.2, shard_size=1024)


def test_the_number_of_workers_changes_no_byte(inputs: Path, vocabulary: Vocabulary, tmp_path: Path) -> None:
    data_files = find([str(inputs)]).inputs
    alone = prepare(data_files, tmp_path / "alone", vocabulary, SETTINGS)
    together = prepare(data_files, tmp_path / "together", vocabulary, SETTINGS, workers=2)
    assert contents_of(together.path) == contents_of(alone.path)


KILLED = """
import os, signal, sys
from pathlib import Path
from hybridtron.data.prepare import parts as parts_module
from hybridtron.data.prepare.input_files import find
from hybridtron.data.prepare.prepare_folder import prepare
from hybridtron.data.prepare.parts import FolderSettings
from hybridtron.data.prepare.vocabulary import open_vocabulary

inputs, output, tokenizer, last = sys.argv[1:]
read, parts_module.BATCH = parts_module.read, 100

def read_until_killed(one, reading, tally):
    for number, document in enumerate(read(one, reading, tally)):
        if one.name.endswith(last) and number == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        yield document

parts_module.read = read_until_killed
settings = FolderSettings(validation=0.2, shard_size=1024)
prepare(find([inputs]).inputs, Path(output), open_vocabulary(Path(tokenizer)), settings)
"""


def test_a_killed_preparation_resumes(inputs: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    vocabulary = open_vocabulary(tokenizer_folder)
    data_files = find([str(inputs)]).inputs
    output = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(inputs), str(output), str(tokenizer_folder), "2.jsonl.zst"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    work = tmp_path / "out.partial"
    assert sorted(path.stem for path in (work / "records").iterdir()) == ["part-00000", "part-00001"]
    shards = list((work / "tokens").rglob("*.mds"))
    assert {shard.parent.name for shard in shards} == {"part-00000", "part-00001", "part-00002"}
    times = {file.relative_to(work / "tokens"): file.stat().st_mtime_ns for file in shards}
    folder = prepare(data_files, output, vocabulary, SETTINGS)
    for file, before in times.items():
        assert ((output / file).stat().st_mtime_ns == before) == ("part-00002" not in file.parts)
    untouched = prepare(data_files, tmp_path / "untouched", vocabulary, SETTINGS)
    assert contents_of(folder.path) == contents_of(untouched.path)
    assert not work.exists()


class Stopped(Exception):
    pass


def interrupted(patch: pytest.MonkeyPatch, inputs: Path, output: Path, vocabulary: Vocabulary, parts: int = 2) -> None:
    """Leaves `parts` finished parts, and an unfinished one."""
    read = parts_module.read

    def read_some(data_input, reading, tally):
        for document in read(data_input, reading, tally):
            yield document
            if data_input.files[0].name.startswith(str(parts)) and tally.entries == 30:
                raise Stopped

    with patch.context() as within:
        within.setattr(parts_module, "read", read_some)
        within.setattr(parts_module, "BATCH", 100)
        with pytest.raises(Stopped):
            prepare(find([str(inputs)]).inputs, output, vocabulary, SETTINGS)


def test_other_arguments_do_not_resume(
    inputs: Path, vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    interrupted(monkeypatch, inputs, output, vocabulary)
    data_files = find([str(inputs)]).inputs
    other = dataclasses.replace(SETTINGS, validation=0.3, compression="zstd:3")
    with raises_code(ArgumentError, "changed", "validation", "0.2", "0.3", "compression", "None", "'zstd:3'"):
        prepare(data_files, output, vocabulary, other)
    with raises_code(PrepareError, "changed", "tokenizer", "'words ", "eos"):
        prepare(data_files, output, words(300), SETTINGS)
    added = write_jsonl(inputs / "new.jsonl", TEXTS)
    with raises_code(PrepareError, "changed", "out.partial", "new inputs", "new.jsonl"):
        prepare(find([str(inputs)]).inputs, output, vocabulary, SETTINGS)
    added.unlink()
    with raises_code(PrepareError, "changed", "gone", "3.jsonl"):
        prepare(data_files[:-1], output, vocabulary, SETTINGS)
    os.utime(data_files[0].files[0], (1, 1))
    with raises_code(PrepareError, "changed", "0.jsonl"):
        prepare(data_files, output, vocabulary, SETTINGS)


def test_a_replaced_input_leaves_nothing_of_its_former_contents(
    inputs: Path, vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished input may change, and nothing from its former contents remains."""
    output = tmp_path / "out"
    third = inputs / "2.jsonl.zst"
    good = third.read_bytes()
    third.write_bytes(of_another_source())
    interrupted(monkeypatch, inputs, output, vocabulary)
    assert (tmp_path / "out.partial/tokens/train/other").exists()
    third.write_bytes(good)
    shard = next((tmp_path / "out.partial/tokens/train/text/part-00000").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    folder = prepare(find([str(inputs)]).inputs, output, vocabulary, SETTINGS)
    clean = prepare(find([str(inputs)]).inputs, tmp_path / "clean", vocabulary, SETTINGS)
    assert contents_of(folder.path) == contents_of(clean.path)
    assert not (folder.path / "train/other").exists()


def test_a_failure_before_the_first_part_blocks_nothing(
    inputs: Path, vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other arguments start afresh after a wrong key, after a limit that leaves out all, and after an interruption."""
    every = find([str(inputs)]).inputs
    output = tmp_path / "out"
    with raises_code(InputError, "malformed", "'body'"):
        prepare(every, output, vocabulary, dataclasses.replace(SETTINGS, text_key="body"))
    assert not (tmp_path / "out.partial").exists()
    with raises_code(InputError, "missing", "--min-tokens"):
        prepare(every, output, vocabulary, dataclasses.replace(SETTINGS, min_tokens=10**6))
    assert not (tmp_path / "out.partial").exists()
    interrupted(monkeypatch, inputs, output, vocabulary, parts=0)
    assert list((tmp_path / "out.partial/tokens").rglob("*.mds"))
    other = dataclasses.replace(SETTINGS, validation=0.3)
    folder = prepare(every[1:], output, vocabulary, other)
    clean = prepare(every[1:], tmp_path / "clean", vocabulary, other)
    assert contents_of(folder.path) == contents_of(clean.path)


def test_records_in_the_former_format_are_resumed_from(
    inputs: Path, vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records in the former format, with one input per part, are read."""
    interrupted(monkeypatch, inputs, tmp_path / "out", vocabulary)
    for file in (tmp_path / "out.partial/records").iterdir():
        with np.load(file) as stored:
            arrays = dict(stored)
        about = json.loads(arrays["about"].tobytes())
        (about["tally"],) = about.pop("tallies")
        arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        np.savez(file, **arrays)
    times = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out.partial/tokens").rglob("part-00001/*.mds")}
    folder = prepare(find([str(inputs)]).inputs, tmp_path / "out", vocabulary, SETTINGS)
    assert {file.name: file.stat().st_mtime_ns for file in folder.path.rglob("part-00001/*.mds")} == times


def of_another_source() -> bytes:
    lines = [{"text": f"{number} " * 300, "meta": {"redpajama_set_name": "other"}} for number in range(40)]
    return zstd("".join(json.dumps(line) + "\n" for line in lines).encode())


def test_a_finished_folder_is_opened_again(
    inputs: Path, vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files = find([str(inputs)]).inputs
    output = tmp_path / "out"
    folder = prepare(data_files, output, vocabulary, SETTINGS)
    monkeypatch.setattr(prepare_module, "write_part", lambda *_: pytest.fail("written again"))
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/plan.json").touch()  # of a call that was killed when all was done
    assert prepare(data_files, output, vocabulary, SETTINGS, workers=3) == folder
    assert not (tmp_path / "out.partial").exists()
    with raises_code(PrepareError, "exists", output):
        prepare(data_files[1:], output, vocabulary, SETTINGS)
    with raises_code(FolderError, "unreadable", "manifest.json"):
        prepare(data_files, inputs, vocabulary, SETTINGS)


def test_a_second_call_at_the_same_time_is_refused(
    inputs: Path, vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, inputs, tmp_path / "out", vocabulary)
    with (
        prepare_module._lock_folder(tmp_path / "out.partial"),
        raises_code(PrepareError, "in-use", "out.partial"),
    ):
        prepare(find([str(inputs)]).inputs, tmp_path / "out", vocabulary, SETTINGS)


def test_foreign_files_in_the_work_folder_are_left_alone(inputs: Path, vocabulary: Vocabulary, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/mine.txt").write_text("my text")
    with raises_code(PrepareError, "exists", "out.partial", "mine.txt"):
        prepare(find([str(inputs)]).inputs, tmp_path / "out", vocabulary, SETTINGS)
    assert (tmp_path / "out.partial/mine.txt").exists()


def workers() -> list[BaseProcess]:
    """The processes that a preparation has started; other tests may have left a pool of theirs."""
    return [child for child in multiprocessing.active_children() if "ForkServer" not in child.name]


@pytest.mark.slow
def test_an_error_in_a_worker_is_reported(inputs: Path, vocabulary: Vocabulary, tmp_path: Path) -> None:
    """A worker's error, or its end, reaches the first process, and no worker stays."""
    file = inputs / "1.jsonl.gz"
    file.write_bytes(file.read_bytes()[:-5])
    with raises_code(PrepareError, "unreadable", "1.jsonl.gz"):
        prepare(find([str(inputs)]).inputs, tmp_path / "out", vocabulary, SETTINGS, workers=2)
    assert not workers()


@pytest.mark.slow
def test_a_worker_that_is_killed_is_reported(
    inputs: Path, vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: int) -> None:
        for child in workers():
            child.kill()

    monkeypatch.setattr(prepare_module.PrepareProgress, "advance", kill)
    with pytest.raises(WorkerEnded, match="exit code -9"):
        prepare(find([str(inputs)]).inputs, tmp_path / "out", vocabulary, SETTINGS, workers=2)
    assert not workers()


def test_preparation_resumes_after_a_full_disk(
    inputs: Path, vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files = find([str(inputs)]).inputs
    whole = prepare(data_files, tmp_path / "whole", vocabulary)
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr("hybridtron.data.prepare.parts.sync", lambda _: (_ for _ in ()).throw(full))
        with pytest.raises(OSError, match="No space left"):
            prepare(data_files, tmp_path / "out", vocabulary)
    assert not (tmp_path / "out").exists()
    assert contents_of(prepare(data_files, tmp_path / "out", vocabulary).path) == contents_of(whole.path)
