"""A run that takes seconds: a model of a few thousand weights on sequences that are easy to learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from hybridtron.cli import train
from hybridtron.data.prepare.writer import write_folder
from hybridtron.problems import ConfigError, Problem
from tests.settings import Setting, flat

VOCAB = 32


def counting_documents(count: int, seed: int) -> list[np.ndarray]:
    """Documents that count up from a random start in steps of one, around a circle."""
    random = np.random.default_rng(seed)
    return [(random.integers(VOCAB - 1) + np.arange(random.integers(5, 60))) % (VOCAB - 1) for _ in range(count)]


@pytest.fixture(scope="session")
def counting_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "counting"
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    splits = {"train": {"text": counting_documents(400, 0)}, "validation": {"text": counting_documents(40, 1)}}
    write_folder(path, splits, tokenizer.to_str(), VOCAB, VOCAB - 1, {"text": "counting"})
    return path


def small_run_arguments(data: Path, run: Path) -> list[str]:
    """The command line of a small model that trains for 20 steps."""
    return [
        "data=folder", f"data.path={data}", "data.epochs=null", f"run.dir={run}", "model.width=32",
        f"model.vocab_size={VOCAB}", "model.layers.M.state=4", "model.layers.W.window=8", "model.layers.-.hidden=64",
        "phases.0.seq_len=16", "phases.0.global_batch=4", "phases.0.micro_batch=2", "phases.0.tokens=1280",
        "run.eval_tokens=256", "run.eval_every=10", "checkpoint.every=5", "optim.warmup=5%",
        "run.sample_tokens=0",
    ]  # fmt: skip


Train = Callable[..., int]
Refused = Callable[..., dict[str, Problem]]


@pytest.fixture
def train_small(counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Train:
    """Runs train.py's main on the small model in tmp_path/run, with further settings."""
    fixed = small_run_arguments(counting_folder, tmp_path / "run")
    return lambda *settings: train.main([*fixed, *flat(settings)])


@pytest.fixture
def refused(train_small: Train, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Runs train.py's main like `train_small`; it must refuse the settings. Returns the problems by key."""
    errors: list[ConfigError] = []
    create = ConfigError.__init__

    def record(error: ConfigError, problems: Sequence[Problem]) -> None:
        create(error, problems)
        errors.append(error)

    monkeypatch.setattr(ConfigError, "__init__", record)

    def refuse(*settings: Setting) -> dict[str, Problem]:
        errors.clear()
        assert train_small(*settings) == 2
        return {problem.key: problem for problem in errors[-1].problems}

    return refuse
