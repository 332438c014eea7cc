"""The folder format, what it refuses, and what the configuration check says about it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hybridtron.config.schema import Config, DataConfig, ModelConfig, PhaseConfig, PhaseDataConfig, RunConfig, Source
from hybridtron.data.folder import FolderError, TokenFolder, problems, write_folder


def config_of(
    path: Path,
    source: Source = Source.folder,
    vocab_size: int = 999,
    seq_len: int = 8,
    lengths: tuple[int, ...] = (1, 2),
    phase: PhaseDataConfig | None = None,
) -> Config:
    model = ModelConfig(width=8, vocab_size=vocab_size, pattern="M", layers={})
    first, second = (PhaseConfig(tokens="1M", seq_len=seq_len, global_batch=4, lr=1e-3) for _ in range(2))
    second.data = phase or PhaseDataConfig()
    run = RunConfig(name="test", eval_lengths=lengths)
    return Config(model=model, data=DataConfig(source, str(path)), phases=[first, second], run=run)


def told(config: Config) -> list[str]:
    return [str(p) for p in problems(config)]


def test_round_trip(tmp_path: Path):
    splits = {"train": [[5, 6], np.array([7]), []], "validation": [[8, 69_999]]}
    folder = write_folder(tmp_path / "a" / "data", splits, '{"a": "é"}', 70_000, 1, {"corpus": "toy"})
    assert folder == TokenFolder.open(tmp_path / "a" / "data")
    assert folder.tokens("train").tolist() == [5, 6, 1, 7, 1, 1]
    assert folder.tokens("validation").tolist() == [8, 69_999, 1]
    assert folder.lengths("train").tolist() == [3, 2, 1]
    assert (folder.manifest.dtype, folder.manifest.eos, folder.manifest.vocab_size) == ("uint32", 1, 70_000)
    assert folder.tokenizer_file.read_text(encoding="utf-8") == '{"a": "é"}'
    folder.verify()


def test_an_empty_split(tmp_path: Path):
    folder = write_folder(tmp_path / "data", {"train": [[5]], "validation": []}, "{}", 10, 0, {})
    assert folder.tokens("validation").tolist() == folder.lengths("validation").tolist() == []
    assert any("has 0 validation tokens" in line for line in told(config_of(tmp_path / "data")))


def test_the_first_writer_wins(tmp_path: Path):
    first = write_folder(tmp_path / "data", {"train": [[5]], "validation": []}, "{}", 10, 0, {})
    again = write_folder(tmp_path / "data", {"train": [[6]], "validation": []}, "{}", 10, 0, {})
    assert again == first
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_nothing_stays_of_a_failed_write(tmp_path: Path):
    def documents() -> Iterator[list[int]]:
        yield [1, 2]
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        write_folder(tmp_path / "data", {"train": documents(), "validation": []}, "{}", 10, 0, {})
    with pytest.raises(ValueError, match=r"document 1 of train has tokens outside of 0\.\.9"):
        write_folder(tmp_path / "data", {"train": [[1], [10]], "validation": []}, "{}", 10, 0, {})
    assert not list(tmp_path.iterdir())


def edit_manifest(folder: Path, key: str, value: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, key: value}))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated train.tokens: 422 bytes, 424 by": lambda p: cut(p / "train.tokens"),
    "too long validation.tokens": lambda p: (p / "validation.tokens").write_bytes(bytes(1000)),
    "damaged train.lengths.npy": lambda p: cut(p / "train.lengths.npy"),
    "train.lengths.npy of another shape": lambda p: np.save(p / "train.lengths.npy", np.ones(3, dtype=np.int64)),
    "has no validation.lengths.npy: not a folder of": lambda p: (p / "validation.lengths.npy").unlink(),
    "has no manifest.json": lambda p: (p / "manifest.json").unlink(),
    "tokenizer.json that is not the one": lambda p: (p / "tokenizer.json").write_text("{ }"),
    "manifest.json that does not parse": lambda p: cut(p / "manifest.json"),
    "has format 2; this version reads format 1": lambda p: edit_manifest(p, "format", 2),
    "dtype 'int8'": lambda p: edit_manifest(p, "dtype", "int8"),
    "does not parse: ": lambda p: edit_manifest(p, "splits", {"train": {}}),
}


@pytest.mark.parametrize("expected", DAMAGE)
def test_damage_is_refused_and_told_as_a_problem(toy: TokenFolder, expected: str):
    DAMAGE[expected](toy.path)
    with pytest.raises(FolderError, match=expected):
        TokenFolder.open(toy.path)
    (line,) = told(config_of(toy.path))
    assert line.startswith(f"data.path  {toy.path} ")
    assert expected in line
    assert "data.source=embedded" in line
    (line,) = told(config_of(toy.path, Source.embedded))
    assert "delete it, and it is prepared anew" in line


def test_verify_reads_the_contents(toy: TokenFolder):
    tokens = np.fromfile(toy.path / "validation.tokens", dtype=np.uint16)
    tokens[3] += 1
    tokens.tofile(toy.path / "validation.tokens")
    with pytest.raises(FolderError, match="other contents in split 'validation'"):
        TokenFolder.open(toy.path).verify()


def test_lengths_must_add_up(toy: TokenFolder):
    lengths = np.load(toy.path / "train.lengths.npy")
    lengths[0] += 1
    np.save(toy.path / "train.lengths.npy", lengths)
    with pytest.raises(FolderError, match="do not add up to its 212 tokens"):
        TokenFolder.open(toy.path).lengths("train")


def test_a_good_folder_has_no_problems(toy: TokenFolder):
    assert not told(config_of(toy.path))
    assert not told(config_of(toy.path, vocab_size=2000))


def test_missing_paths(tmp_path: Path):
    (line,) = told(config_of(tmp_path / "none"))
    assert "none does not exist; give a folder of prepared tokens, or set data.source=embedded" in line
    (tmp_path / "file").touch()
    assert "is not a folder" in told(config_of(tmp_path / "file"))[0]
    assert not told(config_of(tmp_path / "none", Source.embedded))


def test_the_key_is_the_one_that_was_set(toy: TokenFolder, tmp_path: Path):
    phase = PhaseDataConfig(path=str(tmp_path / "none"))
    (problem,) = problems(config_of(toy.path, phase=phase))
    assert problem.key == "phases.1.data.path"
    (problem,) = problems(config_of(tmp_path / "none", phase=PhaseDataConfig(path=str(toy.path))))
    assert problem.key == "data.path"


def test_vocabulary(toy: TokenFolder):
    (line,) = told(config_of(toy.path, vocab_size=998))
    assert "has a vocabulary of 999, model.vocab_size is 998; set model.vocab_size=999 or more" in line
    (line,) = told(config_of(toy.path, Source.embedded, vocab_size=1000))
    assert "set model.vocab_size=999, or a path where a vocabulary of 1000 can be prepared" in line
    (line,) = told(config_of(toy.path, Source.embedded, vocab_size=299))
    assert line.startswith("model.vocab_size  is 299;")
    assert "at least 300" in line


def test_an_embedded_folder_may_have_fewer_entries_than_it_was_asked_for(tmp_path: Path):
    splits = {"train": [[5] * 40], "validation": [[5] * 40]}
    write_folder(tmp_path / "data", splits, "{}", 400, 0, {"asked_vocab_size": 500})
    assert not told(config_of(tmp_path / "data", Source.embedded, vocab_size=500))
    assert not told(config_of(tmp_path / "data", Source.embedded, vocab_size=400))
    assert "set model.vocab_size=500" in told(config_of(tmp_path / "data", Source.embedded, vocab_size=600))[0]


def test_too_few_tokens(toy: TokenFolder):
    """212 tokens of training and 43 of validation."""
    assert not told(config_of(toy.path, seq_len=21))
    (line,) = told(config_of(toy.path, seq_len=22))
    assert "has 43 validation tokens, and one row takes 45; smaller run.eval_lengths or seq_len" in line
    assert not told(config_of(toy.path, seq_len=22, lengths=(1,)))
    assert "has 212 train tokens, and one row takes 213" in told(config_of(toy.path, seq_len=212))[0]


def test_the_check_needs_no_torch():
    """It is part of the answer to a wrong command line, which comes within a second."""
    code = "import sys, hybridtron.data.folder; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
