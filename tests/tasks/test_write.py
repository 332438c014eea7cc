"""Sets as files: no sample twice, none of the evaluation set in the training set, seeds apart, all or nothing."""

from __future__ import annotations

import json
from pathlib import Path

from hybridtron.tasks.base import TRAINING_SEEDS, TaskError, training_seed
from hybridtron.tasks.options import named
from hybridtron.tasks.tokens import ByteTokens
from hybridtron.tasks.write import WrittenSet, write
from tests.refusals import raises_code


def written(folder: Path, names: list[str], length: int, evaluation: int, training: int, *options: str) -> list[dict]:
    tasks = tuple(named(name, options) for name in names)
    files = write(WrittenSet(tasks, (length,), evaluation, training, 0, ByteTokens()), folder, lambda done, of: None)
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_line_has_prompt_and_completion(tmp_path: Path) -> None:
    (row,) = written(tmp_path / "set", ["niah_single_1"], 900, 1, 0)
    sample = named("niah_single_1").sample(0, 0, ByteTokens(), 900)
    assert row["prompt"] == sample.prompt == row["input"] + row["answer_prefix"]
    assert row["completion"] == sample.answer
    assert row["outputs"] == list(sample.outputs)
    assert (row["length"], row["generate"], row["max_length"]) == (sample.length, 128, 900)
    about = json.loads((tmp_path / "set" / "set.json").read_text())
    assert about["tokenizer"] == "bytes"
    assert about["tasks"]["niah_single_1"]["haystack"] == "noise"


def test_tasks_on_token_ids_are_written_as_ids(tmp_path: Path) -> None:
    (copied,) = written(tmp_path / "a", ["copying"], 43, 1, 0)
    assert len(copied["tokens"]) == len(copied["mask"]) == 43
    (asked,) = written(tmp_path / "b", ["mqar"], 64, 1, 0)
    assert sum(label != -100 for label in asked["labels"]) == 4
    assert "mask" not in asked


def test_training_and_evaluation_share_no_sample(tmp_path: Path) -> None:
    """Keys of one digit at 2 depths: 18 samples, of which 15 are asked for."""
    rows = written(tmp_path / "set", ["passkey"], 300, 5, 10, "digits=1", "depth_steps=2")
    assert len({row["prompt"] + row["completion"] for row in rows}) == len(rows) == 15
    assert sorted({row["seed"] for row in rows}) == [0, TRAINING_SEEDS]


def test_too_few_distinct_samples_are_an_error_and_leave_nothing(tmp_path: Path) -> None:
    with raises_code(TaskError, "does-not-fit"):
        written(tmp_path / "set", ["passkey"], 300, 30, 0, "digits=1", "depth_steps=2")
    assert list(tmp_path.iterdir()) == []


def test_training_seeds_are_no_evaluation_seeds() -> None:
    assert training_seed(0) == TRAINING_SEEDS
    with raises_code(TaskError, "out-of-range", TRAINING_SEEDS):
        training_seed(TRAINING_SEEDS)
    task = named("passkey")
    assert task.sample(training_seed(0), 0, ByteTokens(), 300) != task.sample(0, 0, ByteTokens(), 300)
    with raises_code(TaskError, "out-of-range", "seed=-1"):
        task.sample(-1, 0, ByteTokens(), 300)
