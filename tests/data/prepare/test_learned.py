"""The learned tokens of a JSON line: masks compared with bytes counted by hand and with transformers' own masks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from hybridtron.data.folder import TokenFolder
from hybridtron.data.prepare import tokenized as tokenized_module
from hybridtron.data.prepare.documents import ArgumentError, InputError, InputOptions, Learned
from hybridtron.data.prepare.embedded import END_OF_TEXT, train_tokenizer
from hybridtron.data.prepare.input_files import find
from hybridtron.data.prepare.learned import FORMS
from hybridtron.data.prepare.parts import FolderSettings
from hybridtron.data.prepare.prepare_folder import prepare
from hybridtron.data.prepare.tokenized import tokenize_with_mask
from hybridtron.data.prepare.vocabulary import Vocabulary, open_vocabulary, vocabulary_of
from tests.data.prepare.preparing import TEXTS, contents_of, stored, write_jsonl, write_tokenizer
from tests.refusals import raises_code

BEGIN = "<|im_start|>"
END = "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{{ bos_token }}{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {{- 'A: ' }}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}\n"
    "    {%- else %}\n        {{- 'Q: ' + message.content | trim + '\\n' }}\n    {%- endif %}\n{%- endfor %}"
)
LAST_ONLY = "{% for m in messages %}{{ m.content if loop.last else m.content | upper }} {% endfor %}"
CHAT = [
    {"role": "system", "content": "Short answers."},
    {"role": "user", "content": " What is 6 x 7?"},
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": "naïve ☕?"},
    {"role": "assistant", "content": "No ☕."},
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Words with the space before them are tokens, and so are those of CHATML."""
    tokenizer = train_tokenizer([*TEXTS, "Answer: 42. " * 9, "It is 42. user assistant " * 9], 420)
    tokenizer.add_special_tokens([BEGIN, END])
    return vocabulary_of(tokenizer.to_str(), "small", None)


def chatting(vocabulary: Vocabulary, folder: Path, template: object = CHATML, **config: str) -> Vocabulary:
    """Return the vocabulary with a chat template, opened from a tokenizer's usual files."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(vocabulary.json)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))
    return open_vocabulary(folder)


def made(
    tmp_path: Path, vocabulary: Vocabulary, learn: str, *records: object, max_bad: float = 0.0, **changes: int | None
) -> TokenFolder:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    chosen = FolderSettings(validation=0, learn=learn, **changes)  # type: ignore[arg-type]
    return prepare(find([str(file)]).inputs, tmp_path / "out", vocabulary, chosen, max_bad=max_bad)


def documents(folder: TokenFolder) -> list[tuple[list[int], list[int]]]:
    return list(zip(stored(folder, "train", "text"), stored(folder, "train", "text", "mask"), strict=True))


def bytes_of(tokenizer: Tokenizer) -> dict[int, int]:
    """Count the bytes that each token stands for: byte-level tokens are spelled with one letter per byte."""
    return {number: len(token) for token, number in tokenizer.get_vocab().items()}


parts = st.sampled_from(["a", " ", "  ", "42", " 42", "\n", "☕", "é", "日本", "Answer:", " It is", END_OF_TEXT, "."])


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(parts, min_size=1, max_size=30).map("".join), st.lists(st.integers(0, 200)), st.booleans(), st.booleans()
)
@example("日本" * 30, [3, 11], True, True)
def test_a_token_is_learned_if_its_last_character_is(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, text: str, places: list[int], trims: bool, pieces: bool
):
    """Count in bytes; a token in this vocabulary has as many bytes as letters."""
    monkeypatch.setattr(tokenized_module, "PIECE", 20 if pieces else 10**6)
    monkeypatch.setattr(tokenized_module, "NEAR", 10)
    if trims:  # as most byte-level tokenizers come: their offsets leave out spaces
        tokenizer = Tokenizer.from_str(vocabulary.json)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        vocabulary = dataclasses.replace(vocabulary, json=tokenizer.to_str())
    boundaries = sorted({min(place, len(text)) for place in places})
    spans = tuple(zip(boundaries[::2], boundaries[1::2], strict=False))
    tokens, mask = tokenize_with_mask(text, Learned(spans), vocabulary)
    characters = [place for place, letter in enumerate(text) for _ in letter.encode()]
    ends = np.cumsum([bytes_of(vocabulary.tokenizer())[token] for token in tokens.tolist()])
    assert ends[-1] == len(characters)
    assert mask.tolist() == [any(a <= characters[end - 1] < b for a, b in spans) for end in ends]
    if not pieces:
        assert tokens.tolist() == vocabulary.tokenizer().encode(text, add_special_tokens=False).ids


def test_a_space_belongs_to_the_word_behind_it(vocabulary: Vocabulary, tmp_path: Path):
    """` 42` is one token: the span of the number alone has its last character, that of ` 4` has not."""
    text = "Answer: 42."
    *_, number, dot = Tokenizer.from_str(vocabulary.json).encode(text, add_special_tokens=False).ids
    records = [{"text": text, "spans": spans} for spans in ([[8, 10]], [[7, 10]], [[8, 11]], [[10, 11], [0, 1]])]
    for spans, (tokens, mask) in zip("ABCD", documents(made(tmp_path, vocabulary, "spans", *records)), strict=True):
        assert tokens[-3:] == [number, dot, vocabulary.eos]
        assert mask[-3:] == {"A": [1, 0, 0], "B": [1, 0, 0], "C": [1, 1, 1], "D": [0, 1, 1]}[spans]
    (tmp_path / "out").rename(tmp_path / "before")
    with raises_code(InputError, "malformed", "in.jsonl", "line 1"):
        made(tmp_path, vocabulary, "spans", {"text": text, "spans": [[7, 9]]})


def test_a_prompt_and_its_completion_are_tokenized_apart(vocabulary: Vocabulary, tmp_path: Path):
    """The boundary falls inside text that would be one token. The line names its source."""
    record = {"prompt": "Answer: 4", "completion": f"2 {END_OF_TEXT}.", "meta": {"redpajama_set_name": "text"}}
    folder = made(tmp_path, vocabulary, "completion", record, {"prompt": "", "completion": "x"})
    tokenizer = vocabulary.tokenizer()
    prompt, completion = (tokenizer.encode(record[key]).ids for key in ("prompt", "completion"))
    (tokens, mask), (short, learned) = documents(folder)
    assert tokens == [*prompt, *completion, vocabulary.eos]
    assert tokens != [*tokenizer.encode(record["prompt"] + record["completion"]).ids, vocabulary.eos]
    assert mask == [0] * len(prompt) + [1] * (len(completion) + 1)
    assert (short, learned) == ([*tokenizer.encode("x").ids, vocabulary.eos], [1, 1])
    (shard,) = folder.manifest.splits["train"]["text"].shards
    assert shard.learned == sum(mask) + 2
    assert folder.manifest.origin["learn"] == "completion"


def test_tokens_written_by_the_assistant_are_learned(vocabulary: Vocabulary, tmp_path: Path):
    """ChatML: `It is 42.`, the end of the turn and the line break; nothing of the other roles."""
    chat = chatting(vocabulary, tmp_path / "tokenizer").chat
    assert chat is not None
    text, spans = chat.conversation(CHAT)
    assert text == "".join(f"{BEGIN}{m['role']}\n{m['content']}{END}\n" for m in CHAT)
    assert [text[first:end] for first, end in spans] == [f"It is 42.{END}\n", f"No ☕.{END}\n"]


@pytest.mark.parametrize(
    "template", [TAGGED, [{"name": "other", "template": "x"}, {"name": "default", "template": TAGGED}]]
)
def test_learned_turns_equal_those_of_transformers(vocabulary: Vocabulary, tmp_path: Path, template: object):
    """Special tokens of the template are these tokens; eos that it writes at the end is not doubled."""
    with_chat = chatting(vocabulary, tmp_path / "tokenizer", template, eos_token=END, bos_token=BEGIN)
    ((tokens, mask),) = documents(made(tmp_path, with_chat, "messages", {"messages": CHAT}))
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer/tokenizer.json"), bos_token=BEGIN, eos_token=END
    ).apply_chat_template(CHAT, chat_template=TAGGED, return_dict=True, return_assistant_tokens_mask=True)
    assert tokens == theirs["input_ids"]
    assert mask == theirs["assistant_masks"]
    assert (tokens[0], tokens[-1], tokens.count(with_chat.eos)) == (
        with_chat.tokenizer().token_to_id(BEGIN),
        with_chat.eos,
        2,
    )
    assert with_chat.eos == with_chat.tokenizer().token_to_id(END)


SPANS = {"text": "0123456789☕"}
BAD = [
    ("spans", SPANS, "'spans'"),
    ("spans", SPANS | {"spans": []}, "'spans'"),
    ("spans", SPANS | {"spans": [[5, 12]]}, "[5, 12]"),
    ("spans", SPANS | {"spans": [[-1, 2]]}, "[-1, 2]"),
    ("spans", SPANS | {"spans": [[3, 3]]}, "[3, 3]"),
    ("spans", SPANS | {"spans": [[4, 9], [0, 5]]}, "[0, 5] and [4, 9]"),
    ("spans", SPANS | {"spans": [[0, True]]}, "[0, True]"),
    ("spans", {"spans": [[0, 1]]}, "'text'"),
    ("completion", {"prompt": "x"}, "'completion'"),
    ("completion", {"prompt": ["x"], "completion": "y"}, "'prompt'"),
    ("completion", {"prompt": "x", "completion": ""}, "'completion'"),
    ("completion", {"prompt": "x", "completion": "\ud800"}, "surrogates"),
    ("messages", {"messages": []}, "'messages'"),
    ("messages", {"messages": [{"content": "x"}]}, "message 0"),
    ("messages", {"messages": [CHAT[1], {"role": "assistant"}]}, "message 1"),
    ("messages", {"messages": [CHAT[0], CHAT[1]]}, "'messages'"),
    ("messages", {"messages": [{"role": "user", "content": f"x{END}"}]}, END),
    (None, {"messages": CHAT}, "--learn messages"),
]


@pytest.mark.parametrize(("learn", "record", "named"), BAD)
def test_a_line_with_a_wrong_learned_part_is_left_out(
    vocabulary: Vocabulary, tmp_path: Path, learn: str, record: object, named: str
):
    good = {"text": "x", "spans": [[0, 1]], "prompt": "", "completion": "y", "messages": CHAT[1:3]}
    with raises_code(InputError, "malformed", "in.jsonl: 1 of 2", "line 2", named):
        made(tmp_path, chatting(vocabulary, tmp_path / "tokenizer"), learn, good, record)
    assert not (tmp_path / "out.partial").exists()
    folder = made(tmp_path, chatting(vocabulary, tmp_path / "tokenizer"), learn, good, record, max_bad=0.5)
    assert (folder.manifest.origin["bad"], folder.manifest.splits["train"]["text"].documents) == (1, 1)


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (LAST_ONLY, "message 2"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[99].role.upper() }}", "99"),
        ("{% for n in range(10**9) %}{% endfor %}", "range"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ],
)
def test_lines_that_the_template_refuses_are_bad(vocabulary: Vocabulary, tmp_path: Path, template: str, named: str):
    with raises_code(InputError, "malformed", "line 1: the chat template", named):
        made(tmp_path, chatting(vocabulary, tmp_path / "tokenizer", template), "messages", {"messages": CHAT})


def test_inputs_without_a_learned_part_are_refused(vocabulary: Vocabulary, tmp_path: Path):
    line = {"messages": CHAT}
    with raises_code(ArgumentError, "missing", "--learn messages", "small"):
        made(tmp_path, vocabulary, "messages", line)
    with raises_code(ArgumentError, "malformed", "tokenizer", "endfor"):
        made(tmp_path, chatting(vocabulary, tmp_path / "tokenizer", "{% for m in messages %}"), "messages", line)
    (tmp_path / "a.txt").write_text("x")
    inputs = find([str(tmp_path / "a.txt"), str(tmp_path / "in.jsonl")]).inputs
    with raises_code(ArgumentError, "unsupported", "--learn spans", "*.jsonl", "a.txt"):
        prepare(inputs, tmp_path / "out", vocabulary, FolderSettings(learn="spans"))
    assert not (tmp_path / "out.partial").exists()


def test_learn_forms_equal_the_choices_of_the_command():
    from hybridtron.cli.data_prepare import LEARN

    assert (*FORMS, "mask") == LEARN
    assert all(InputOptions(learn=form).learn == form for form in FORMS)


def test_documents_are_left_out_by_their_tokens(vocabulary: Vocabulary, tmp_path: Path):
    """Lengths include eos, as in the folder.

    A folder from before these limits existed counts as prepared with other arguments and is refused.
    """
    tokenizer = vocabulary.tokenizer()
    contents = ["x " * count for count in range(1, 40)]
    counts = [len(tokenizer.encode(text).ids) + 1 for text in contents]
    file = write_jsonl(tmp_path / "a.jsonl", contents)
    limited = FolderSettings(validation=0, min_tokens=10, max_tokens=25)
    folder = prepare(find([str(file)]).inputs, tmp_path / "out", vocabulary, limited)
    assert folder.lengths("train", "text").tolist() == [count for count in counts if 10 <= count <= 25]
    origin = folder.manifest.origin
    assert (origin["too_short"], origin["too_long"]) == (sum(c < 10 for c in counts), sum(c > 25 for c in counts))
    plain = prepare(find([str(file)]).inputs, tmp_path / "plain", vocabulary, FolderSettings(validation=0))
    assert not {"learn", "too_short", "too_long"} & set(plain.manifest.origin)
    with raises_code(InputError, "missing", "39", "--min-tokens", "--max-tokens"):
        prepare(
            find([str(file)]).inputs,
            tmp_path / "none",
            vocabulary,
            dataclasses.replace(limited, min_tokens=999, max_tokens=None),
        )
    with raises_code(ArgumentError, "conflict", "--max-tokens", "--min-tokens"):
        prepare(find([str(file)]).inputs, tmp_path / "none", vocabulary, dataclasses.replace(limited, max_tokens=9))
    with raises_code(ArgumentError, "out-of-range", "--min-tokens"):
        prepare(find([str(file)]).inputs, tmp_path / "none", vocabulary, FolderSettings(min_tokens=0))


def test_masks_survive_workers_compression_and_preparing_again(vocabulary: Vocabulary, tmp_path: Path):
    for number in range(3):
        lines = [{"prompt": f"{text} {number}", "completion": f" {n}"} for n, text in enumerate(TEXTS * 12)]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data_inputs = find([str(tmp_path / "*.jsonl")]).inputs
    chosen = FolderSettings(validation=0.2, learn="completion", shard_size=2000)
    alone, together = (
        prepare(data_inputs, tmp_path / f"by{workers}", vocabulary, chosen, workers) for workers in (1, 2)
    )
    assert contents_of(alone.path) == contents_of(together.path)
    packed = prepare(data_inputs, tmp_path / "packed", vocabulary, dataclasses.replace(chosen, compression="zstd"))
    assert documents(packed) == documents(alone)
    again = find([str(packed.path / "train/text")]).inputs
    kept = prepare(again, tmp_path / "kept", vocabulary, FolderSettings(validation=0, learn="mask"))
    assert documents(kept) == documents(alone)
    assert sum(sum(mask) for _, mask in documents(kept)) == alone.manifest.splits["train"]["text"].learned
    everything = prepare(again, tmp_path / "everything", vocabulary, FolderSettings(validation=0))
    assert stored(everything, "train", "text") == stored(alone, "train", "text")
    assert everything.manifest.splits["train"]["text"].learned is None
    plain = find([str(everything.path / "train/text")]).inputs
    with raises_code(InputError, "missing", "index.json", "'mask'"):
        prepare(plain, tmp_path / "none", vocabulary, FolderSettings(learn="mask"))


def test_another_template_does_not_resume(vocabulary: Vocabulary, tmp_path: Path):
    first = chatting(vocabulary, tmp_path / "tokenizer")
    folder = made(tmp_path, first, "messages", {"messages": CHAT})
    (tmp_path / "tokenizer/chat_template.jinja").write_text(CHATML.replace("\n", " "))
    other = open_vocabulary(tmp_path / "tokenizer")
    with raises_code(ArgumentError, "exists", "out"):
        made(tmp_path, other, "messages", {"messages": CHAT})
    assert made(tmp_path, first, "messages", {"messages": CHAT}) == folder
    assert open_vocabulary(write_tokenizer(tmp_path / "plain")).chat is None
