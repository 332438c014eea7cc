"""Tasks on token ids as prepared tokens: each sample with its mask, none that is held out in training; trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridtron.cli import tasks, train
from hybridtron.cli.main import main
from hybridtron.data.folder import TokenFolder
from hybridtron.data.mds.store import DocumentStore
from hybridtron.storage.cache import CacheOptions
from hybridtron.tasks.base import TaskError, training_seed
from hybridtron.tasks.options import named
from hybridtron.tasks.tokens import ByteTokens
from tests.refusals import raises_code

COMMAND = ["tasks", "prepare", "--training", "40", "--validation", "12", "--seed", "3"]


def documents(folder: TokenFolder, split: str, source: str) -> list[tuple[list[int], list[int]]]:
    store = DocumentStore(folder, split, source, CacheOptions(folder.path.parent / "cache"))
    return [
        (store.read(number, 0, int(length)).tolist(), store.read_mask(number, 0, int(length)).astype(int).tolist())
        for number, length in enumerate(store.lengths)
    ]


@pytest.mark.parametrize(
    ("task", "length", "options"),
    [
        ("copying", 23, ["shortest=2", "longest=9"]),
        ("mqar", 32, ["follows=true"]),
        ("joint_recall", 62, ["sizes=3,2-4"]),
        ("joint_recall", 62, ["sizes=3,2-4", "padded=true"]),
    ],
)
def test_prepared_samples_and_masks_equal_the_tasks(task: str, length: int, options: list[str], tmp_path: Path) -> None:
    assert main([*COMMAND, task, *options, "--length", str(length), "--output", str(tmp_path / "made")]) == 0
    folder = TokenFolder.open(tmp_path / "made")
    named_task = named(task, options)
    assert folder.manifest.eos == named_task.num_tokens
    assert folder.manifest.vocab_size == named_task.num_tokens + 1
    for split, seed, count in (("validation", 3, 12), ("train", training_seed(3), 40)):
        samples = [named_task.sample(seed, index, ByteTokens(), length) for index in range(count)]
        expected = [([*one.tokens, named_task.num_tokens], [*one.mask, 0]) for one in samples]
        assert documents(folder, split, f"{task}-{length}") == expected
        assert folder.manifest.splits[split][f"{task}-{length}"].learned == sum(sum(one.mask) for one in samples)


def test_held_out_strings_are_not_trained_on(tmp_path: Path) -> None:
    """There are 26 strings with one letter: 12 are held out, and the other 14 can be learned."""
    command = [*COMMAND, "copying", "--length", "5", "--output", str(tmp_path / "made")]
    with raises_code(TaskError, "does-not-fit", "14 distinct samples"):
        tasks.prepare_main(command[2:])
    command[command.index("40")] = "14"
    assert main(command) == 0
    folder = TokenFolder.open(tmp_path / "made")
    held, learned = (
        {tuple(tokens) for tokens, _ in documents(folder, split, "copying-5")} for split in ("validation", "train")
    )
    assert (len(held), len(learned), held & learned) == (12, 14, set())


@pytest.mark.parametrize(("task", "wanted"), [("mqar", "follows=true"), ("vt", "data prepare --learn completion")])
def test_tasks_without_next_token_targets_are_not_prepared(task: str, wanted: str, tmp_path: Path) -> None:
    with raises_code(TaskError, "unsupported", wanted):
        tasks.prepare_main([*COMMAND[2:], task, "--length", "2000", "--output", str(tmp_path / "made")])
    assert not any(tmp_path.iterdir())


def test_a_recipe_trains_on_a_prepared_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([*COMMAND, "copying", "shortest=2", "longest=9", "--length", "23", "--output", str(tmp_path / "made")])
        == 0
    )
    arguments = [
        "data=folder", f"data.path={tmp_path / 'made'}", f"run.dir={tmp_path / 'run'}", "model.pattern=M-W-",
        "model.width=16", "model.vocab_size=32", "model.layers.M.state=4", "model.layers.W.window=8",
        "model.layers.-.hidden=16", "phases.0.seq_len=24", "phases.0.global_batch=2", "phases.0.micro_batch=2",
        "phases.0.tokens=96", "run.eval_tokens=96", "optim.warmup=1",
    ]  # fmt: skip
    assert train.main(arguments) == 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["learned"] < 48 for line in lines if "learned" in line)
    assert any("learned" in line for line in lines)
    capsys.readouterr()
    assert main(["inspect", *arguments, "--json"]) == 0
    (phase,) = json.loads(capsys.readouterr().out)["phases"]
    of_source = TokenFolder.open(tmp_path / "made").manifest.splits["train"]["copying-23"]
    assert phase["sources"] == [
        {
            **{"source": "copying-23", "share": 1.0, "tokens": 96},
            **{"epochs": 96 / of_source.tokens, "learned": (of_source.learned or 0) / of_source.tokens},
            "place": str(tmp_path / "made"),
        }
    ]
