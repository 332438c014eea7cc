"""The code of docs/extending.md: a format of inputs from outside of the package, as written."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from hybridtron.cli import data_prepare
from hybridtron.data.prepare.formats import FORMATS
from tests.data.prepare.preparing import TEXTS, contents_of, write_jsonl, write_tokenizer
from tests.train.test_extending import run_code_of


def test_the_data_format_of_the_docs_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new format's folder equals that of the same texts as JSON lines byte by byte, but for the inputs' names."""
    texts = [text.replace("\0", "") for text in TEXTS]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["n", "body"], *enumerate(texts), [9], [10, " "]])
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    command = ["--input", str(tmp_path / "a.csv"), "--tokenizer", tokenizer, "--text-key", "body"]
    monkeypatch.setitem(FORMATS, "csv", FORMATS["text"])  # what is in its place at the end goes again
    del FORMATS["csv"]
    assert data_prepare.main([*command, "--output", str(tmp_path / "out")]) == 2
    assert "a.csv" in capsys.readouterr().err
    run_code_of("A data format")
    assert data_prepare.main([*command, "--output", str(tmp_path / "out")]) == 0
    message = capsys.readouterr().err
    assert "a.csv: 1 of 7 rows" in message
    assert "\n  row 6: " in message
    write_jsonl(tmp_path / "a.jsonl", texts)
    command = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer", tokenizer]
    assert data_prepare.main([*command, "--output", str(tmp_path / "same")]) == 0
    csv_files, jsonl_files = (contents_of(tmp_path / name) for name in ("out", "same"))
    origins = [json.loads(files.pop("manifest.json"))["origin"] for files in (csv_files, jsonl_files)]
    assert csv_files == jsonl_files
    assert [(origin["bad"], origin["empty"]) for origin in origins] == [(1, 1), (0, 0)]
    with pytest.raises(SystemExit):
        data_prepare.main(["--help"])
    assert "*.csv: a column of text" in capsys.readouterr().out
