"""The example of conversations: its questions, its learned tokens, and its recipe, which ends in a chat model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples.chat.conversations import LONGEST, conversations, first_sentence
from examples.chat.conversations import main as write
from hybridtron.cli.main import main


def test_questions_differ_and_have_answers() -> None:
    answers = dict(conversations())
    assert len(answers) == len(list(conversations())) > 1000
    assert answers["What does json.dumps do?"] == "Serialize ``obj`` to a JSON formatted ``str``."
    assert all(answer.endswith(".") and len(answer) <= LONGEST for answer in answers.values())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Copy a\nfile. Then stop.", "Copy a file."),
        ("Copy.\n\nMore.", "Copy."),
        ("copy(a, b)\n\nCopies.", ""),
        (f"{'long ' * 40}.", ""),
        ("", ""),
    ],
)
def test_answers_end_with_the_first_sentence(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_recipe_ends_in_a_chat_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Prepare, train in three phases, export and ask, with few tokens."""
    monkeypatch.chdir(tmp_path)
    prepare = ["data", "prepare", "--input"]
    assert main([*prepare, "embedded", "--vocab-size", "2048", "--output", "data/embedded-2048"]) == 0
    assert write("data/embedded-2048", "data/chats") == 0
    learned = ["--learn", "messages", "--validation", "5%", "--tokenizer", "data/chats"]
    assert main([*prepare, "data/chats/chats.jsonl", *learned, "--output", "data/chats/tokens"]) == 0
    few = [
        "phases.0.tokens=4096",
        "phases.1.tokens=8192",
        "phases.2.tokens=4096",
        "run.eval_tokens=4K",
        "run.eval_lengths=[1]",
    ]
    assert main(["train", "recipe=chat_laptop", *few]) == 0
    exported = Path("runs/chat_laptop/export/tune")
    tokenizer = AutoTokenizer.from_pretrained(exported)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why?"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "Question: Why?\nAnswer: "
    assert json.loads((exported / "config.json").read_text())["vocab_size"] == 2048
    capsys.readouterr()
    assert main(["generate", "runs/chat_laptop", "--chat", "--prompt", "Why?", "--tokens", "5"]) == 0
