"""Conversations train on the assistant's tokens, which are counted by hand, also when a run resumes."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from hybridtron.cli import main as cli
from hybridtron.cli import train
from hybridtron.data.batch import Batch
from hybridtron.engine.engine import Engine
from tests.train.conftest import small_run_arguments

USER = [f"u{n}" for n in range(14)]
ASSISTANT = [f"a{n}" for n in range(14)]
BOS = "<s>"
EOS = "</s>"
UNKNOWN = "<unk>"
WORDS = [*USER, *ASSISTANT, UNKNOWN, BOS, EOS]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"
)
STOP_AT = 7


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A prepared folder of conversations; the two sides have no word in common, and only the assistant says eos."""
    folder = tmp_path / "tokenizer"
    draw = random.Random(0)
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    def turn(role: str, words: list[str]) -> dict[str, str]:
        return {"role": role, "content": " ".join(draw.choices(words, k=draw.randint(1, 9)))}

    lines = [{"messages": [turn("user", USER), turn("assistant", ASSISTANT)] * draw.randint(1, 3)} for _ in range(200)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["--input", str(tmp_path / "chats.jsonl"), "--learn", "messages", "--validation", "20%"]
    command += ["--tokenizer", str(folder), "--output", str(tmp_path / "data")]
    assert cli.main(["data", "prepare", *command]) == 0
    assert cli.main(["data", "verify", str(tmp_path / "data")]) == 0
    return tmp_path / "data"


def lines_of(run: Path) -> list[dict[str, Any]]:
    kept = "step", "loss", "grad_norm", "learned", "validation"
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: line.get(key) for key in kept} for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_loss_counts_tokens_of_the_assistant(chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = torch.tensor([WORDS.index(word) for word in (*ASSISTANT, EOS)])
    counts: list[int] = []
    original = Engine.forward_backward
    stopping = [False]

    def noted(self: Engine, batches: list[Batch], step: int) -> Any:
        counts.append(sum(int(torch.isin(batch.labels_BL, said).sum()) for batch in batches))
        if stopping[0] and len(counts) == STOP_AT:
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(self, batches, step)

    monkeypatch.setattr(Engine, "forward_backward", noted)
    assert train.main(small_run_arguments(chats, tmp_path / "whole")) == 0
    whole = lines_of(tmp_path / "whole")
    assert [line["learned"] for line in whole] == counts
    assert min(counts) > 0
    assert max(counts) < 64
    assert whole[-1]["loss"] < whole[0]["loss"]

    counts.clear()
    stopping[0] = True
    assert train.main(small_run_arguments(chats, tmp_path / "stopped")) == 75
    stopping[0] = False
    assert train.main(small_run_arguments(chats, tmp_path / "stopped")) == 0
    assert lines_of(tmp_path / "stopped") == whole
