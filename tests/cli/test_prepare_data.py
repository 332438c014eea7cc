"""The tool as a person calls it: its output, its exit codes, and Ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridtron.cli import prepare_data
from hybridtron.data.folder import TokenFolder
from tests.data.prepare.preparing import TEXTS, contents_of, lines_of, texts, write_jsonl, write_tokenizer

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(ROOT / "tools/prepare_data.py")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_help_is_fast_and_lists_the_formats(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [COMMAND[0], "-X", "importtime", COMMAND[1], "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0
    assert "Megatron's indexed data set" in done.stdout
    assert "embedded" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert not {"torch", "streaming", "tokenizers", "pyarrow", "rich"} & imported


def test_a_folder_is_prepared(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = tmp_path / "in"
    inputs.mkdir()
    lines = [{"text": text, "meta": {"redpajama_set_name": "Git (hub)"}} for text in texts(50)]
    (inputs / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (inputs / "b.jsonl").write_bytes(lines_of(texts(1000, "b")) + b"torn\n")
    (inputs / "notes.csv").touch()
    output = tmp_path / "deep/er/out"
    command = ["--input", str(inputs), "--output", str(output), "--tokenizer", tokenizer, "--source", "my texts"]
    command += ["--validation", "10%", "--shard-size", "5KB", "--compression", "zstd:5"]
    assert prepare_data.main(command) == 0
    reported = capsys.readouterr()
    assert f"left out of folders, 1 of no known format (--help lists them): {inputs}/notes.csv" in reported.err
    assert "b.jsonl: 1 of 1001 lines are bad and left out\n  line 1001: Expecting value" in reported.err
    rows = [line.split() for line in reported.out.splitlines()]
    splits = TokenFolder.open(output).manifest.splits
    assert [row[:2] for row in rows[1:7]] == [
        [source, split] for split in splits for source in ("Git-hub", "my-texts", "all")
    ]
    assert rows[2][2:] == [f"{getattr(splits['train']['my-texts'], key):,}" for key in ("tokens", "documents")] + [
        str(len(splits["train"]["my-texts"].shards))
    ]
    assert "left out: 1 bad entries" in reported.out
    assert prepare_data.main(command) == 0
    assert prepare_data.main([*command, "--text-key", "body"]) == 2
    assert "was prepared with other arguments" in capsys.readouterr().err


def test_an_empty_split_is_reported(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:2])
    command = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer", tokenizer]
    for share, split in (("0.001%", "validation"), ("0.99999", "train")):
        assert prepare_data.main([*command, "--output", str(tmp_path / split), "--validation", share]) == 0
        assert f"warning: no document is in {split}" in capsys.readouterr().out
    write_jsonl(tmp_path / "b.jsonl", texts(120))
    command = ["--input", str(tmp_path / "b.jsonl"), "--tokenizer", tokenizer]
    assert prepare_data.main([*command, "--output", str(tmp_path / "few"), "--validation", "0.001%"]) == 0
    assert "of 120 documents, --validation 5% would hold out about 6; or give more" in capsys.readouterr().out
    assert prepare_data.main([*command, "--output", str(tmp_path / "held"), "--validation", "5%"]) == 0
    assert prepare_data.main([*command, "--output", str(tmp_path / "none"), "--validation", "0"]) == 0
    assert "warning" not in capsys.readouterr().out


WRONG = {
    "--tokenizer is needed": ["--input", "{file}"],
    "there is no meta-llama/Llama-2-7b. Only a folder": ["--input", "{file}", "--tokenizer", "meta-llama/Llama-2-7b"],
    "no file matches": ["--input", "{file}*.parquet", "--tokenizer", "{tokenizer}"],
    "is of no known format": ["--input", "{tokenizer}/tokenizer.json", "--tokenizer", "{tokenizer}"],
    "'5' is not a share such as 0.5% or 0.005": ["--input", "{file}", "--validation", "5"],
    "'100%' is no": ["--input", "{file}", "--tokenizer", "{tokenizer}", "--max-bad", "101%"],
    "'big' is not a number of bytes": ["--input", "{file}", "--shard-size", "big"],
    "--workers is 0": ["--input", "{file}", "--tokenizer", "{tokenizer}", "--workers", "0"],
    "--workers is 0, must be at least 1": ["--input", "embedded", "--vocab-size", "400", "--workers", "0"],
    "--workers is -2": ["--input", "embedded", "--vocab-size", "400", "--workers", "-2"],
    "--compression is lz4": ["--input", "{file}", "--tokenizer", "{tokenizer}", "--compression", "lz4"],
    "--vocab-size goes with --input embedded": ["--input", "{file}", "--vocab-size", "400"],
    "--input embedded needs --vocab-size": ["--input", "embedded"],
    "and --workers only, not --max-bad, --tokenizer": [
        *("--input", "embedded", "--vocab-size", "400", "--tokenizer", "x", "--max-bad", "2%")
    ],
    "--workers only, not other inputs": ["--input", "embedded", "{file}", "--vocab-size", "400"],
    "at least 300": ["--input", "embedded", "--vocab-size", "299"],
    "--packages goes with --input embedded": ["--input", "{file}", "--tokenizer", "{tokenizer}", "--packages", "torch"],
    "--packages numpie: no package": ["--input", "embedded", "--vocab-size", "400", "--packages", "numpie"],
    "--packages os.path: no package": ["--input", "embedded", "--vocab-size", "400", "--packages", "os.path"],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_exit_code_2(
    message: str, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    named = [word.format(file=file, tokenizer=tokenizer) for word in WRONG[message]]
    try:
        code = prepare_data.main([*named, "--output", str(tmp_path / "out")])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message.replace("'100%' is no", "'101%' is no") in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_what_is_to_be_corrected_is_exit_code_2(
    tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl.zst", TEXTS)
    file.write_bytes(file.read_bytes()[:-4])
    assert prepare_data.main(["--input", str(file), "--output", str(tmp_path / "out"), "--tokenizer", tokenizer]) == 2
    assert "a.jsonl.zst" in capsys.readouterr().err
    good = write_jsonl(tmp_path / "b.jsonl", TEXTS)
    command = ["--tokenizer", tokenizer, "--output", str(tmp_path / "out"), "--text-key"]
    assert prepare_data.main([*command, "body", "--input", str(good)]) == 2
    assert "has no key 'body'" in capsys.readouterr().err
    assert prepare_data.main([*command, "text", "--input", str(good)]) == 0  # the first try stands in nobody's way


def test_a_full_disk_is_exit_code_2_as_the_user_can_mend_it(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("hybridtron.data.prepare.parts.sync", lambda _: (_ for _ in ()).throw(full))
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert prepare_data.main(["--input", str(file), "--output", str(tmp_path / "out"), "--tokenizer", tokenizer]) == 2
    assert "No space left" in capsys.readouterr().err


def test_text_beside_data_is_reported(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", TEXTS)
    (tmp_path / "in/notes.txt").write_text("A note.")
    command = ["--tokenizer", tokenizer, "--input", str(tmp_path / "in")]
    assert prepare_data.main([*command, "--output", str(tmp_path / "some")]) == 0
    said = capsys.readouterr().err
    assert "left out of folders, 1 text files beside data of other formats" in said
    assert "to read them, name them" in said
    assert prepare_data.main([*command, str(tmp_path / "in/*.txt"), "--output", str(tmp_path / "all")]) == 0
    assert "left out" not in capsys.readouterr().err
    counts = [TokenFolder.open(tmp_path / name).manifest.splits["train"]["text"].documents for name in ("some", "all")]
    assert counts[1] == counts[0] + 1


def test_the_embedded_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from hybridtron.data.prepare import corpus
    from hybridtron.data.prepare.documents import Document

    chosen = [Document(text, "text", f"topics/{number}") for number, text in enumerate(texts(60))]
    monkeypatch.setattr(corpus, "documents", lambda: chosen)
    command = ["--input", "embedded", "--output", str(tmp_path / "out")]
    assert prepare_data.main([*command, "--vocab-size", "350"]) == 0
    assert "a vocabulary of 350" in capsys.readouterr().out
    assert prepare_data.main([*command, "--vocab-size", "351"]) == 2
    assert "made for --vocab-size 350" in capsys.readouterr().err
    assert prepare_data.main([*command, "--vocab-size", "350", "--packages", "json"]) == 2
    assert "made without json" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_and_kill_leave_what_is_finished(tokenizer: str, tmp_path: Path) -> None:
    """Interrupt and kill a preparation with two workers; none is left, and a third call gives an undisturbed result."""
    inputs = tmp_path / "in"
    output = tmp_path / "out"
    for number in range(16):
        write_jsonl(inputs / f"{number:02}.jsonl.gz", texts(2_000, f"{number}-"))
    command = [*COMMAND, "--input", str(inputs), "--tokenizer", tokenizer, "--workers", "2", "--shard-size", "8KB"]
    command += ["--output"]
    records = tmp_path / "out.partial/records"
    finished: list[str] = []
    for sent in (signal.SIGINT, signal.SIGKILL):
        running = subprocess.Popen([*command, str(output)], stderr=subprocess.PIPE, text=True, start_new_session=True)
        while len(list(records.glob("*.npz"))) < len(finished) + 2:
            assert running.poll() is None
            time.sleep(0.01)
        (os.killpg if sent == signal.SIGINT else os.kill)(running.pid, sent)
        _, reported = running.communicate(timeout=60)  # returns when all workers, which hold the pipe, have ended
        assert running.returncode == (1 if sent == signal.SIGINT else -signal.SIGKILL)
        if sent == signal.SIGINT:
            assert reported.splitlines()[-1] == f"interrupted; {output}.partial is kept, and the same command continues"
        assert "Traceback" not in reported
        finished = sorted(path.name for path in records.glob("*.npz"))
    done = subprocess.run([*command, str(output)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"resuming: {len(finished)} of 16 inputs are finished" in done.stderr
    command[command.index("--workers") + 1] = "1"
    assert subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, check=False).returncode == 0
    assert contents_of(output) == contents_of(tmp_path / "whole")
