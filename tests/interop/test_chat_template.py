"""A chat template travels with a model: transformers formats chats as prepared, and imports keep the template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from hybridtron.cli.main import main
from hybridtron.data.prepare.chat import ChatTemplate
from hybridtron.interop.tokenizer import CHAT, write_tokenizer
from tests.cli.test_evaluate import tokenizer, trained

BOS = "<|im_start|>"
EOS = "<|endoftext|>"
TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}"
)
CHAT_OF_TWO = [{"role": "user", "content": "the cat?"}, {"role": "assistant", "content": "on the mat."}] * 2


def with_tokens(folder: Path) -> bytes:
    """A tokenizer that a chat template goes with."""
    folder.mkdir()
    words_and_tokens = tokenizer()
    words_and_tokens.add_special_tokens([BOS, EOS])
    words_and_tokens.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return (folder / "tokenizer.json").read_bytes()


def written_by(exported: Path) -> tuple[str, str, list[int]]:
    """Return a conversation, the prompt before an answer, and tokens, all by transformers."""
    theirs = AutoTokenizer.from_pretrained(exported)
    text, prompt = (
        theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=more)
        for messages, more in ((CHAT_OF_TWO, False), (CHAT_OF_TWO[:1], True))
    )
    return text, prompt, theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("bos", [BOS, None])
def test_transformers_writes_the_prepared_conversation(bos: str | None, tmp_path: Path) -> None:
    """Without a bos in the template, transformers must not write eos in its place."""
    stored = with_tokens(tmp_path / "tokenizer")
    named = {"eos_token": EOS}
    if bos:
        named["bos_token"] = bos
    chat = ChatTemplate(TEMPLATE, tuple(named.items()), frozenset())
    (tmp_path / "out").mkdir()
    ids = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer/tokenizer.json")).get_vocab()
    write_tokenizer(tmp_path / "out", stored, ids[EOS], 512, 64, chat.stored())
    text, prompt, _ = written_by(tmp_path / "out")
    assert text.rstrip() == chat.conversation(CHAT_OF_TWO)[0]
    assert prompt == chat.prompt(CHAT_OF_TWO[:1])


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("begun", ["on the", "on the\n", " on"])
def test_begun_answer_is_continued_as_transformers_does(begun: str, trims: bool, tmp_path: Path) -> None:
    template = TEMPLATE
    if trims:
        template = TEMPLATE.replace("{{ m.content }}{{ eos", "{{ m.content | trim }}{{ eos")
        assert template != TEMPLATE
    with_tokens(tmp_path / "tokenizer")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    messages = [*CHAT_OF_TWO[:3], {"role": "assistant", "content": begun}]
    wanted = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, continue_final_message=True)
    chat = ChatTemplate(template, (("bos_token", BOS), ("eos_token", EOS)), frozenset())
    assert chat.prompt(messages, continued=True) == wanted
    assert wanted.rstrip().endswith(begun.strip())


def test_message_outside_the_template_can_not_be_continued() -> None:
    chat = ChatTemplate("{{ messages[0].content }}", (), frozenset())
    with pytest.raises(ValueError, match="continued"):
        chat.prompt(CHAT_OF_TWO[:2], continued=True)


@pytest.mark.slow
def test_chat_template_survives_preparation_export_and_import(tmp_path: Path) -> None:
    with_tokens(tmp_path / "tokenizer")
    chats = [[{"role": "user", "content": f"cat {number}?"}, *CHAT_OF_TWO[1:]] for number in range(60)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    command = ["--input", str(tmp_path / "chats.jsonl"), "--learn", "messages", "--validation", "30%"]
    command += ["--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "data")]
    assert main(["data", "prepare", *command]) == 0
    trained(tmp_path / "run", tmp_path / "data", "M-W-", "model.vocab_size=320")
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 0
    text, prompt, ids = written_by(tmp_path / "out")
    assert text == f"{BOS}user\nthe cat?{BOS}assistant\non the mat.{EOS}" * 2
    assert prompt == f"{BOS}user\nthe cat?{BOS}assistant\n"
    assert main(["import", str(tmp_path / "out"), "--output", str(tmp_path / "back")]) == 0
    folders = folder_of(tmp_path / "run", 4), tmp_path / "back"
    before, after = (Checkpoint.open(folder).meta.data[CHAT] for folder in folders)
    assert json.loads(before)["template"] == json.loads(after)["template"] == TEMPLATE
    assert main(["export", str(tmp_path / "back"), "--output", str(tmp_path / "again")]) == 0
    assert written_by(tmp_path / "again") == (text, prompt, ids)
