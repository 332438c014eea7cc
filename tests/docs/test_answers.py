"""The commands of the docs that train on a part of the tokens, run as they are written, with a tokenizer of words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridtron.cli import main as cli
from hybridtron.data.folder import TokenFolder
from hybridtron.data.prepare.embedded import train_tokenizer
from hybridtron.tasks.options import named
from hybridtron.tasks.tokens import open_tokens
from hybridtron.tasks.write import training_seed
from tests.data.prepare.preparing import stored
from tests.data.prepare.test_learned import BEGIN, CHATML, END
from tests.docs.conftest import ROOT, commands
from tests.train.conftest import small_run_arguments

VOCABULARY = 302
TRAINING = 40
FEWER = {"2000": str(TRAINING)}  # samples
ANSWERS = {f"{a} + {b}?": f"It is {a + b}." for a in range(12) for b in range(12)}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Conversations, and a tokenizer with a chat template."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tokenizers/chat"
    folder.mkdir(parents=True)
    tokenizer = train_tokenizer(["The grass is green. The sky is blue. It is 42. " * 9], VOCABULARY - 2)
    tokenizer.add_special_tokens([BEGIN, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    chats = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        for asked, answer in ANSWERS.items()
    ]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return tmp_path


def run_commands(page: str, about: str, workplace: Path) -> None:
    """Run the page's commands that name `about`; training gets the sizes of a run that takes seconds."""
    for command in commands(ROOT / "docs" / page):
        if not any(word == about or f"/{about}" in word for word in command.words):
            continue
        words = [FEWER.get(word, word).replace("~/", f"{workplace}/") for word in command.words]
        if words[0] in ("train", "inspect"):
            words += small_run_arguments(workplace / f"data/{about}", workplace / f"runs/{about}")
            words += [f"model.vocab_size={VOCABULARY}", "run.eval_lengths=[1]"]
        assert cli.main(words) == 0


def documents(folder: TokenFolder) -> list[tuple[list[int], list[int]]]:
    pairs = []
    for split, sources in folder.manifest.splits.items():
        for source in sources:
            tokens, masks = (stored(folder, split, source, column) for column in ("tokens", "mask"))
            pairs += zip(tokens, masks, strict=True)
    return pairs


def learned_by_step(run: Path) -> list[int]:
    return [json.loads(line)["learned"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_page_prepares_tasks_and_trains_on_them(workplace: Path) -> None:
    """The folder holds the samples' own tokens and masks; every step of training counts some of the answers."""
    run_commands("tasks.md", "tuning", workplace)
    folder = TokenFolder.open(workplace / "data/tuning")
    tokens = open_tokens(str(workplace / "tokenizers/chat"))
    task = named("passkey")
    samples = [task.sample(training_seed(0), index, tokens, 512) for index in range(TRAINING)]
    eos = folder.manifest.eos
    expected = {(*sample.tokens, eos): [*sample.mask, 1] for sample in samples}
    assert {tuple(tokens): mask for tokens, mask in documents(folder)} == expected
    counts = learned_by_step(workplace / "runs/tuning")
    share = sum(map(sum, expected.values())) / sum(map(len, expected.values()))
    assert 0 < sum(counts) < 4 * share * 64 * len(counts)


def test_the_page_prepares_conversations_and_trains_on_them(
    workplace: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run_commands("data.md", "chats", workplace)
    folder = TokenFolder.open(workplace / "data/chats")
    tokens = open_tokens(str(workplace / "tokenizers/chat"))
    answers = {tokens.decode([t for t, m in zip(*document, strict=True) if m]) for document in documents(folder)}
    assert answers == {f"{answer}{END}\n<|endoftext|>" for answer in ANSWERS.values()}
    assert all(learned_by_step(workplace / "runs/chats"))
    masks = stored(folder, "train", "text", "mask")
    share = f"{sum(map(sum, masks)) / sum(map(len, masks)):.1%}"
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[-1] for row in rows if row[:2] == ["text", "train"]] == [share]  # as it was prepared
    inspected = [row for row in rows if row[1:3] == ["text", "100.0%"]]
    assert [share in row for row in inspected] == [True]
    assert any("epochs" in message and share in message for message in caplog.messages)  # and read
