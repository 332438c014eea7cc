"""Conversations with a checkpoint: the tokens that the model reads, the end of an answer, and refusals."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridtron.cli import generate
from hybridtron.cli.main import main
from hybridtron.config.load import load
from hybridtron.evaluate.chat import Chat, assistant, user
from tests.cli.test_evaluate import trained
from tests.cli.test_generate import SMALL, write_checkpoint
from tests.interop.test_chat_template import BOS, TEMPLATE, with_tokens
from tests.refusals import refusal, usage_error

REFUSING = "{% if m.role == 'system' and 'rude' in m.content %}{{ raise_exception('a rude system') }}{% endif %}"


def prepared_run(folder: Path, template: str) -> Path:
    with_tokens(folder / "tokenizer")
    (folder / "tokenizer/chat_template.jinja").write_text(template)
    chats = [{"messages": [user(f"{number}?"), assistant("mat.")]} for number in range(60)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    command = ["--input", str(folder / "chats.jsonl"), "--learn", "messages", "--validation", "30%"]
    command += ["--tokenizer", str(folder / "tokenizer"), "--output", str(folder / "data")]
    assert main(["data", "prepare", *command]) == 0
    return trained(folder / "run", folder / "data", "M-W-", "model.vocab_size=320")


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on conversations."""
    return prepared_run(
        tmp_path_factory.mktemp("talker"), TEMPLATE.replace("{{ bos_token }}", REFUSING + "{{ bos_token }}", 1)
    )


OPTIONS = ("--chat", "--temperature", "0", "--tokens", "9")


def answered(capsys: pytest.CaptureFixture[str], run: Path, options: Sequence[str]) -> str:
    """Return what a run's model answers in a chat."""
    capsys.readouterr()
    assert main(["generate", str(run), *OPTIONS, *options]) == 0
    return capsys.readouterr().out


def test_answer_equals_that_of_the_exported_model(talker: Path, tmp_path: Path, capsys) -> None:
    """Transformers writes the prompt by the template that was exported, and continues it."""
    assert main(["export", str(talker), "--output", str(tmp_path / "out")]) == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = None
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    for system in ([], [{"role": "system", "content": "be brief"}]):
        messages = [*system, user("3?")]
        prompt = theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        with torch.no_grad():
            answer = model.generate(prompt, max_new_tokens=9, do_sample=False)[0, prompt.shape[1] :]
        expected = theirs.decode(answer, skip_special_tokens=True)
        options = [word for message in system for word in ("--system", message["content"])]
        assert answered(capsys, talker, ["--prompt", "3?", *options]) == f"{expected}\n"


def test_lines_form_a_conversation(talker: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier answers are part of the next prompt; a refused line is left out."""
    read: list[list[dict[str, str]]] = []
    prompt = Chat.prompt

    def noted(self: Chat, messages: list[dict[str, str]]) -> list[int]:
        read.append(messages)
        return prompt(self, messages)

    monkeypatch.setattr(Chat, "prompt", noted)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"3?\n\n{BOS} 5?\n4?\n"))
    capsys.readouterr()
    assert main(["generate", str(talker), *OPTIONS]) == 0
    shown = capsys.readouterr()
    first = answered(capsys, talker, ["--prompt", "3?"])[:-1]
    second = read[3][1]["content"]
    assert second == first
    assert shown.out.startswith(f"{first}\n")
    assert repr(BOS) in shown.err
    assert read[3] == [user("3?"), assistant(first), user("4?")]


def test_messages_are_answered_one_after_another(talker: Path, capsys) -> None:
    answers = [answered(capsys, talker, ["--prompt", text]) for text in ("3?", "17?")]
    both = answered(capsys, talker, ["--prompt", "3?", "--prompt", "17?"])
    assert both == f"--- 1 of 2\n{answers[0]}--- 2 of 2\n{answers[1]}"


def test_answer_ends_where_the_template_ends_a_turn(talker: Path, tmp_path: Path) -> None:
    """A turn ends with the template's special token, which may differ from the end of a text, or with words."""
    chat = Chat.of(next((talker / "checkpoints").glob("step-*")))
    assert chat.ends([user("3?")]) == ([chat.tokenizer.token_to_id("<|endoftext|>")], [])
    turns = "{% for m in messages %}" + BOS + "{{ m.role }} {{ m.content }}" + BOS + "\n{% endfor %}"
    other = Chat(chat.folder, type(chat.template)(turns, (), chat.template.special), chat.tokenizer)
    assert other.ends([user("3?")]) == ([chat.tokenizer.token_to_id(BOS)], [])
    words = "{% for m in messages %}{{ m.role }}: {{ m.content }} OVER\n{% endfor %}"
    plain = Chat(chat.folder, type(chat.template)(words, (), chat.template.special), chat.tokenizer)
    assert plain.ends([user("3?")]) == ([], ["OVER"])


def test_unanswerable_messages_are_refused_before_computing(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = write_checkpoint(tmp_path / "silent", 3, load(SMALL))
    monkeypatch.setattr("hybridtron.model.lm.LanguageModel.forward", None)
    assert refusal(generate.main, [silent, "--chat", "--prompt", "3?"]).code == "missing"
    error = refusal(generate.main, [talker, "--chat", "--prompt", f"3? {BOS}"])
    assert error.code == "unreadable"
    assert repr(BOS) in str(error)
    error = refusal(generate.main, [talker, "--chat", "--prompt", "3?", "--system", "rude"])
    assert error.code == "unreadable"
    assert "a rude system" in str(error)
    assert usage_error(generate.main, [talker, "--system", "x"]) == ("--system", "misplaced")
    assert usage_error(generate.main, [talker, "--chat", "--past-end"]) == ("--past-end", "conflict")
