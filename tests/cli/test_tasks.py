"""`hybridtron tasks`: the list, a sample, and files. An impossible request gives one message and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from hybridtron.cli import tasks
from hybridtron.cli.main import main
from hybridtron.data.prepare.embedded import train_tokenizer
from hybridtron.tasks import GROUPS, TASKS
from hybridtron.tasks.passkey import FILLER, WARNING
from tests.refusals import refusal, usage_error


def test_list_has_every_task_and_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "list"]) == 0
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")}
    assert names == {*TASKS, *GROUPS}


def test_show_prints_a_sample(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tasks", "show", "passkey", "--length", "300", "--seed", "3", "--index", "10", "digits=2"]
    assert main(command) == 0
    said = capsys.readouterr()
    about = json.loads(said.err)
    assert (about["depth"], about["learned"], about["prompt_tokens"]) == (1.0, 4, 296)
    prompt, answer = said.out.rstrip("\n").split(">>>")
    assert answer == f" {about['key']}."
    assert len((prompt + answer).encode()) == 300
    assert main(command) == 0
    assert capsys.readouterr().out == said.out


def test_length_is_counted_in_tokens_of_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Vocabularies of one's own, where bytes would not fit; truncation that the file asks for is not applied."""
    tokenizer = train_tokenizer([f"{WARNING} {FILLER}"] * 20, 500)
    tokenizer.enable_truncation(5)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert main(["tasks", "show", "passkey", "--length", "200", "--tokenizer", str(tmp_path)]) == 0
    said = capsys.readouterr()
    prompt, _ = said.out.rstrip("\n").split(">>>")
    about = json.loads(said.err)
    assert about["prompt_tokens"] + about["learned"] == 200
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain.no_truncation()
    assert len(plain.encode(prompt).ids) <= about["prompt_tokens"]  # joints between parts may merge


def test_write_writes_a_file_for_every_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tasks", "write", "vt", "fwe", "--length", "2000", "2500", "--evaluation", "3", "--training", "2"]
    assert main([*command, "--output", str(tmp_path / "set")]) == 0
    files = capsys.readouterr().out.split()
    names = [
        f"{split}/{task}-{n}" for task in ("vt", "fwe") for n in (2000, 2500) for split in ("evaluation", "training")
    ]
    assert files == [str(tmp_path / "set" / f"{name}.jsonl") for name in names]
    assert [len(Path(file).read_text().splitlines()) for file in files] == [3, 2] * 4


@pytest.mark.parametrize(
    "words",
    [
        ["show", "paskey", "--length", "300"],
        ["show", "passkey", "--length", "100"],
        ["show", "passkey", "--length", "300", "digit=3"],
        ["show", "passkey", "--length", "300", "digits=many"],
        ["show", "passkey", "--length", "300", "--tokenizer", "/nowhere"],
        ["show", "vt", "--length", "3000", "faithful=maybe"],
        ["show", "qa_1", "--length", "3000"],
        ["write", "vt", "fwe", "num_hop=3", "--length", "3000", "--output", "OUT"],
        ["write", "vt", "--length", "300", "--output", "OUT"],
        ["write", "vt", "--length", "3000", "--output", "/"],
        ["write", "num_hops=3", "--length", "3000", "--output", "OUT"],
    ],
)
def test_impossible_requests_are_refused_with_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", *(word.replace("OUT", str(tmp_path / "set")) for word in words)]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    error = refusal(tasks.show_main, ["passkey", "--length", "300", "--tokenizer", tmp_path])
    assert error.code == "unreadable"
    assert "tokenizer.json" in str(error)


def test_request_for_no_samples_is_refused(tmp_path: Path) -> None:
    words = ["vt", "--length", "3000", "--evaluation", "0", "--output", tmp_path / "set"]
    assert usage_error(tasks.write_main, words) == ("--evaluation", "out-of-range")
