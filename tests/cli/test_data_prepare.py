"""The tool as a person calls it: its output, its exit codes, and Ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridtron.cli import data_prepare
from hybridtron.data.folder import TokenFolder
from hybridtron.data.prepare.documents import PrepareError
from hybridtron.problems import Code
from tests.data.prepare.preparing import TEXTS, contents_of, lines_of, texts, write_jsonl, write_tokenizer
from tests.refusals import usage_error
from tests.storage.publisher import publishing

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(ROOT / "tools/prepare_data.py")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_help_lists_the_formats_without_heavy_imports(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [COMMAND[0], "-X", "importtime", COMMAND[1], "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0
    assert "Megatron's indexed data set" in done.stdout
    assert "embedded" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert not {"torch", "streaming", "tokenizers", "pyarrow", "rich"} & imported


def test_folder_is_prepared_and_reported(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = tmp_path / "in"
    inputs.mkdir()
    lines = [{"text": text, "meta": {"redpajama_set_name": "Git (hub)"}} for text in texts(50)]
    (inputs / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (inputs / "b.jsonl").write_bytes(lines_of(texts(1000, "b")) + b"torn\n")
    (inputs / "notes.csv").touch()
    output = tmp_path / "deep/er/out"
    command = ["--input", str(inputs), "--output", str(output), "--tokenizer", tokenizer, "--source", "my texts"]
    command += ["--validation", "10%", "--shard-size", "5KB", "--compression", "zstd:5"]
    assert data_prepare.main(command) == 0
    reported = capsys.readouterr()
    assert f"{inputs}/notes.csv" in reported.err
    assert "b.jsonl: 1 of 1001 lines" in reported.err
    assert "line 1001: " in reported.err
    rows = [line.split() for line in reported.out.splitlines()]
    splits = TokenFolder.open(output).manifest.splits
    assert [row[:2] for row in rows[1:7]] == [
        [source, split] for split in splits for source in ("Git-hub", "my-texts", "all")
    ]
    assert rows[2][2:] == [f"{getattr(splits['train']['my-texts'], key):,}" for key in ("tokens", "documents")] + [
        str(len(splits["train"]["my-texts"].shards))
    ]
    assert "left out: 1 bad entries" in reported.out
    assert data_prepare.main(command) == 0
    assert refused([*command, "--text-key", "body"]).code == "exists"


def test_an_empty_split_is_reported(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:2])
    command = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer", tokenizer]
    for share, split in (("0.001%", "validation"), ("0.99999", "train")):
        assert data_prepare.main([*command, "--output", str(tmp_path / split), "--validation", share]) == 0
        warning = capsys.readouterr().out.partition("warning: ")[2]
        assert split in warning
    write_jsonl(tmp_path / "b.jsonl", texts(120))
    command = ["--input", str(tmp_path / "b.jsonl"), "--tokenizer", tokenizer]
    assert data_prepare.main([*command, "--output", str(tmp_path / "few"), "--validation", "0.001%"]) == 0
    assert "--validation 5%" in capsys.readouterr().out
    assert data_prepare.main([*command, "--output", str(tmp_path / "held"), "--validation", "5%"]) == 0
    assert data_prepare.main([*command, "--output", str(tmp_path / "none"), "--validation", "0"]) == 0
    assert data_prepare.main([*command, "--output", str(tmp_path / "all"), "--validation", "100%"]) == 0
    assert "warning" not in capsys.readouterr().out
    held_out = TokenFolder.open(tmp_path / "all").manifest.splits
    assert sum(source.documents for source in held_out["validation"].values()) == 120
    assert not held_out["train"]


EMBEDDED = ["--input", "embedded", "--vocab-size", "400"]
WRONG_USAGE: list[tuple[list[str], str, Code]] = [
    (["--input", "{file}"], "--tokenizer", "missing"),
    (["--input", "{file}", "--validation", "5"], "--validation", "malformed"),
    (["--input", "{file}", "--tokenizer", "{tokenizer}", "--max-bad", "101%"], "--max-bad", "malformed"),
    (["--input", "{file}", "--shard-size", "big"], "--shard-size", "malformed"),
    (["--input", "{file}", "--tokenizer", "{tokenizer}", "--workers", "0"], "--workers", "out-of-range"),
    ([*EMBEDDED, "--workers", "0"], "--workers", "out-of-range"),
    ([*EMBEDDED, "--workers", "-2"], "--workers", "out-of-range"),
    (["--input", "{file}", "--vocab-size", "400"], "--vocab-size", "conflict"),
    (["--input", "embedded"], "--vocab-size", "missing"),
    ([*EMBEDDED, "--tokenizer", "x", "--max-bad", "2%"], "--input", "conflict"),
    (["--input", "embedded", "{file}", "--vocab-size", "400"], "--input", "conflict"),
    (["--input", "{file}", "--tokenizer", "{tokenizer}", "--packages", "torch"], "--packages", "conflict"),
]
WRONG_INPUTS: list[tuple[list[str], Code]] = [
    (["--input", "{file}", "--tokenizer", "meta-llama/Llama-2-7b"], "no-file"),
    (["--input", "{file}*.parquet", "--tokenizer", "{tokenizer}"], "no-file"),
    (["--input", "{tokenizer}/tokenizer.json", "--tokenizer", "{tokenizer}"], "unsupported"),
    (["--input", "{file}", "--tokenizer", "{tokenizer}", "--compression", "lz4"], "unknown-name"),
    (["--input", "embedded", "--vocab-size", "299"], "out-of-range"),
    ([*EMBEDDED, "--packages", "numpie"], "not-installed"),
    ([*EMBEDDED, "--packages", "os.path"], "not-installed"),
]


def refused(words: Sequence[str]) -> PrepareError:
    """Return the error with which a preparation is refused. The command prints it, with exit code 2."""
    chosen = data_prepare.parse([*words])
    work = data_prepare.prepare_inputs
    if chosen.vocab_size is not None:
        work = data_prepare.prepare_embedded
    with pytest.raises(PrepareError) as raised:
        work(chosen)
    assert data_prepare.main([*words]) == 2
    return raised.value


@pytest.mark.parametrize(("words", "option", "code"), WRONG_USAGE)
def test_wrong_options_are_refused(words: list[str], option: str, code: Code, tokenizer: str, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    command = [word.format(file=file, tokenizer=tokenizer) for word in words]
    assert usage_error(data_prepare.main, [*command, "--output", tmp_path / "out"]) == (option, code)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(("words", "code"), WRONG_INPUTS)
def test_unusable_inputs_are_refused(words: list[str], code: Code, tokenizer: str, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    command = [word.format(file=file, tokenizer=tokenizer) for word in words]
    assert refused([*command, "--output", str(tmp_path / "out")]).code == code
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_damaged_inputs_are_refused_and_can_be_corrected(tokenizer: str, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl.zst", TEXTS)
    file.write_bytes(file.read_bytes()[:-4])
    error = refused(["--input", str(file), "--output", str(tmp_path / "out"), "--tokenizer", tokenizer])
    assert error.code == "unreadable"
    assert "a.jsonl.zst" in str(error)
    good = write_jsonl(tmp_path / "b.jsonl", TEXTS)
    command = ["--tokenizer", tokenizer, "--output", str(tmp_path / "out"), "--text-key"]
    error = refused([*command, "body", "--input", str(good)])
    assert error.code == "malformed"
    assert "'body'" in str(error)
    assert data_prepare.main([*command, "text", "--input", str(good)]) == 0  # the first try stands in nobody's way


def test_full_disk_is_exit_code_2(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("hybridtron.data.prepare.parts.sync", lambda _: (_ for _ in ()).throw(full))
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert data_prepare.main(["--input", str(file), "--output", str(tmp_path / "out"), "--tokenizer", tokenizer]) == 2
    assert "No space left" in capsys.readouterr().err


def test_text_beside_data_is_reported(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", TEXTS)
    (tmp_path / "in/notes.txt").write_text("A note.")
    command = ["--tokenizer", tokenizer, "--input", str(tmp_path / "in")]
    assert data_prepare.main([*command, "--output", str(tmp_path / "some")]) == 0
    said = capsys.readouterr().err
    assert "1 text files" in said
    assert "notes.txt" in said
    assert data_prepare.main([*command, str(tmp_path / "in/*.txt"), "--output", str(tmp_path / "all")]) == 0
    assert "notes.txt" not in capsys.readouterr().err
    counts = [TokenFolder.open(tmp_path / name).manifest.splits["train"]["text"].documents for name in ("some", "all")]
    assert counts[1] == counts[0] + 1


def test_embedded_corpus_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from hybridtron.data.prepare import corpus
    from hybridtron.data.prepare.documents import Document

    chosen = [Document(text, "text", f"topics/{number}") for number, text in enumerate(texts(60))]
    monkeypatch.setattr(corpus, "documents", lambda: chosen)
    command = ["--input", "embedded", "--output", str(tmp_path / "out")]
    assert data_prepare.main([*command, "--vocab-size", "350"]) == 0
    printed = capsys.readouterr().out
    assert "vocabulary size 350" in printed
    assert printed.splitlines()[-1].endswith(" gpt-2")
    assert refused([*command, "--vocab-size", "351"]).code == "exists"
    assert refused([*command, "--vocab-size", "350", "--pre-tokenizer", "qwen2"]).code == "exists"
    assert refused([*command, "--vocab-size", "350", "--packages", "json"]).code == "exists"


def test_folder_of_other_texts_is_not_the_embedded_corpus(tokenizer: str, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    output = str(tmp_path / "out")
    assert data_prepare.main(["--input", str(file), "--output", output, "--tokenizer", tokenizer]) == 0
    error = refused(["--input", "embedded", "--vocab-size", "350", "--output", output])
    assert error.code == "exists"
    assert "another input than embedded" in str(error)
    assert "None" not in str(error)


@pytest.mark.slow
def test_interrupted_preparation_keeps_finished_inputs(tokenizer: str, tmp_path: Path) -> None:
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
        if sent == signal.SIGINT:
            os.killpg(running.pid, sent)
        else:
            os.kill(running.pid, sent)
        _, reported = running.communicate(timeout=60)  # returns when all workers, which hold the pipe, have ended
        if sent == signal.SIGINT:
            assert running.returncode == 1
            assert f"{output}.partial" in reported.splitlines()[-1]
        else:
            assert running.returncode == -signal.SIGKILL
        assert "Traceback" not in reported
        finished = sorted(path.name for path in records.glob("*.npz"))
    done = subprocess.run([*command, str(output)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(finished)} of 16 inputs" in done.stderr
    command[command.index("--workers") + 1] = "1"
    assert subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, check=False).returncode == 0
    assert contents_of(output) == contents_of(tmp_path / "whole")


def test_published_files_are_downloaded_and_prepared(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"a.jsonl": lines_of(texts(40, "a")), "b.jsonl": lines_of(texts(60, "b"))}
    (tmp_path / "in").mkdir()
    for name, stored in parts.items():
        (tmp_path / "in" / name).write_bytes(stored)
    options = ["--tokenizer", tokenizer, "--validation", "10%", "--output"]
    assert data_prepare.main(["--input", str(tmp_path / "in"), *options, str(tmp_path / "local")]) == 0
    with publishing() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.publish("mary/texts", {**parts, "README.md": b"not data"})
        command = ["--from", "hf:mary/texts", *options, str(tmp_path / "out")]
        assert data_prepare.main(command) == 0
        server.files["/c.jsonl"] = parts["a.jsonl"]
        assert data_prepare.main(["--from", f"{server.url}/c.jsonl", *options, str(tmp_path / "url")]) == 0
        assert data_prepare.main(["--from", "hf:mary/none", *options, str(tmp_path / "none")]) == 2
        assert data_prepare.main(["--from", "texts.jsonl", *options, str(tmp_path / "none")]) == 2
    err = capsys.readouterr().err
    assert "404" in err
    assert "use --input" in err
    assert contents_of(tmp_path / "out") == contents_of(tmp_path / "local")
    assert sorted(path.name for path in (tmp_path / "out.downloads").iterdir()) == [
        "a.jsonl",
        "b.jsonl",
        "published.json",
    ]
