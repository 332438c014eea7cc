"""Paths that can't be, files nested without end, sizes beyond all memory: every command refuses them with a message."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from hybridtron.cli import sweep, tasks
from hybridtron.cli.main import main
from hybridtron.tasks.base import TaskError
from tests.data.prepare.preparing import write_jsonl
from tests.interop.test_chat_template import with_tokens
from tests.refusals import refusal

PATHS = {"long": "a" * 5000, "nul": "a\0b", "loop": "loop"}
SHOW = ["tasks", "show", "passkey", "--length", "512"]
TAKING_A_PATH = [
    ["evaluate", "PATH"], ["evaluate", "runs/x", "--tasks", "PATH"], ["evaluate", "runs/x", "--output", "PATH"],
    ["generate", "PATH", "--prompt", "a"], ["checkpoint", "verify", "PATH"], ["checkpoint", "list", "PATH"],
    ["data", "verify", "PATH"], ["plot", "PATH"], ["sweep", "PATH"], ["sweep", "sweep.yaml", "--output", "PATH"],
    [*SHOW, "--tokenizer", "PATH"], ["tasks", "write", "passkey", "--length", "64", "--output", "PATH"],
    ["export", "PATH", "--output", "out"], ["export", "runs/x", "--output", "PATH"], ["status", "PATH"],
    ["import", "PATH", "--output", "out"],
    ["data", "prepare", "--input", "in.jsonl", "--tokenizer", "PATH", "--output", "out"],
    ["data", "prepare", "--input", "in.jsonl", "--tokenizer", "tokenizer", "--output", "PATH"],
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with the files that the commands name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop2")
    (tmp_path / "loop2").symlink_to("loop")
    (tmp_path / "sweep.yaml").write_text("settings: [recipe=laptop]\n")
    with_tokens(tmp_path / "tokenizer")
    write_jsonl(tmp_path / "in.jsonl", ["one text"])
    return tmp_path


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must end with exit code 2; return its message."""
    try:
        code: object = main(words)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    assert len(said) < 6000
    return said


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("words", TAKING_A_PATH, ids=lambda words: "-".join(words[:2]))
def test_impossible_paths_are_refused(
    words: list[str], kind: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused([word.replace("PATH", PATHS[kind]) for word in words], capsys)
    assert "path" in said


@pytest.mark.parametrize(
    "words",
    [
        ["sweep", "sweep.yaml", "--output", "/dev/null/x"],
        ["tasks", "write", "passkey", "--length", "512", "--output", "/dev/null/x"],
        ["data", "prepare", "--input", "in.jsonl", "--tokenizer", "tokenizer", "--output", "/dev/null/x"],
    ],
    ids=lambda words: words[0],
)
def test_outputs_below_a_file_are_refused(words: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(words, capsys)
    assert "/dev/null" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_folder_of_another_user_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "closed").mkdir(mode=0)
    assert "another user" in refused(["evaluate", "closed/run"], capsys)


DEEP_JSON = "[" * 20_000 + "]" * 20_000
DEEP_YAML = f"a: {DEEP_JSON}"
CHAINED = "grid: [&a0 [1], " + ", ".join(f"&a{n + 1} [*a{n}]" for n in range(5000)) + "]"
LESS_DEEP = '{"a": ' * 900 + "1" + "}" * 900
WRITTEN = ["data", "prepare", "--input", "in.jsonl", "--tokenizer", "tokenizer", "--output", "out"]
NESTED = [
    ("deep.yaml", DEEP_YAML, ["sweep", "deep.yaml"]),
    ("deep.yaml", "grid: " + LESS_DEEP, ["sweep", "deep.yaml"]),
    ("deep.yaml", "settings: &a [*a]", ["sweep", "deep.yaml"]),
    ("deep.yaml", CHAINED, ["sweep", "deep.yaml"]),
    ("deep.yaml", DEEP_YAML, ["train", "recipe=./deep.yaml", "run.plan=true"]),
    ("deep.json", DEEP_JSON, ["tasks", "show", "qa_1", "--length", "512", "data=deep.json"]),
    ("deep.json", LESS_DEEP, ["tasks", "show", "qa_2", "--length", "512", "data=deep.json"]),
    ("model/config.json", DEEP_JSON, ["import", "model", "--output", "out"]),
    ("model/config.json", LESS_DEEP, ["import", "model", "--output", "out"]),
    ("model/adapter_config.json", DEEP_JSON, ["import", "model", "--base", "model", "--output", "out"]),
    ("tokenizer/tokenizer_config.json", DEEP_JSON, WRITTEN),
    ("tokenizer/special_tokens_map.json", LESS_DEEP, WRITTEN),
    ("tokenizer/tokenizer.json", '{"model": ' + DEEP_JSON + "}", [*SHOW, "--tokenizer", "tokenizer"]),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("file", "text", "words"), NESTED, ids=[f"{n}-{w[0]}" for n, (*_, w) in enumerate(NESTED)])
def test_files_nested_without_end_are_refused(
    file: str, text: str, words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / file).parent.mkdir(exist_ok=True)
    (here / file).write_text(text)
    said = refused(words, capsys)
    assert Path(file).name in said
    assert any(word in said for word in ("nested", "deep", "within itself", "recursion")), said


def test_aliases_that_repeat_without_end_are_refused(here: Path) -> None:
    """30 levels of two aliases each stand for 2**30 values."""
    wide = "grid: [&a0 [1, 1], " + ", ".join(f"&a{n + 1} [*a{n}, *a{n}]" for n in range(30)) + "]"
    (here / "wide.yaml").write_text(wide)
    error = refusal(sweep.main, ["wide.yaml"])
    assert error.code == "unreadable"
    assert "repeats *a" in str(error)
    assert "1,048,576" in str(error)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_keeps_the_finished_parts(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished parts are kept, and the same command continues."""
    with monkeypatch.context() as patch:
        patch.setattr("hybridtron.data.prepare.prepare_folder.assemble", full)
        said = refused(WRITTEN, capsys)
    assert "out: No space left on device" in said
    assert "out.partial" in said
    assert not (here / "out").exists()
    assert main(WRITTEN) == 0


def test_full_disk_is_reported_by_tasks_and_exports(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridtron.cli.tasks.write", full)
    said = refused(["tasks", "write", "passkey", "--length", "512", "--output", "out"], capsys)
    assert "out: No space left on device" in said
    monkeypatch.setattr("hybridtron.cli.convert_commands.export_checkpoint", full)
    said = refused(["export", "runs/x", "--output", "out", "--verify", "none"], capsys)
    assert "out: No space left on device" in said


SIZES = [
    [*SHOW[:-1], "9" * 20], [*SHOW[:-1], "9" * 5000], [*SHOW, "digits=" + "9" * 20], [*SHOW, "digits=10000"],
    ["tasks", "show", "niah_single_2", "--length", "512", "num_values=4301"],
    [*SHOW, "digits=" + "9" * 5000], ["tasks", "write", "passkey", "--length", "9" * 20, "--output", "out"],
    ["tasks", "prepare", "copying", "--length", "9" * 20, "--training", "1", "--output", "out"],
    ["evaluate", "runs/x", "--lengths", "nan"], ["evaluate", "runs/x", "--samples", "3"],
]  # fmt: skip


@pytest.mark.timeout(30)
@pytest.mark.parametrize("words", SIZES, ids=lambda words: " ".join(words)[:60])
def test_impossible_sizes_and_options_are_refused(
    words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(words, capsys)
    assert any(phrase in said for phrase in ("must be", "is only for", "needs", "choose fewer")), said


def test_usual_json_and_yaml_is_read(here: Path) -> None:
    data = {"data": [{"paragraphs": [{"context": "The cat sat.", "qas": [{"question": "Who sat?", "answers": []}]}]}]}
    (here / "squad.json").write_text(json.dumps(data))
    error = refusal(tasks.show_main, ["qa_1", "--length", "512", "data=squad.json"])
    assert isinstance(error, TaskError)
    assert "question" in str(error)
    (here / "ok.yaml").write_text("settings: &same [recipe=laptop]\nvariants: {a: [], b: *same}\n")
    assert main(["sweep", "ok.yaml", "--plan"]) == 0
