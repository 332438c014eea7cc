"""RULER's tasks beyond their golden files: draws, faithful shuffles, haystacks, groups, data that is missing."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from random import Random

import pytest

from hybridtron.data.prepare.embedded import train_tokenizer
from hybridtron.data.prepare.writer import write_folder
from hybridtron.problems import Code
from hybridtron.tasks import GROUPS, RULER_SE_GROUPS, TASKS
from hybridtron.tasks.base import TaskError
from hybridtron.tasks.fitted import fitted
from hybridtron.tasks.haystack import essay, split_sentences
from hybridtron.tasks.options import all_named, members, named, options_of
from hybridtron.tasks.ruler.niah import DEPTHS
from hybridtron.tasks.tokens import ByteTokens
from hybridtron.tasks.words import MAX_WORDS, MIN_WORDS, lists, sentences, single_words
from tests.refusals import raises_code
from tests.tasks.rules import GOLDEN

BYTES = ByteTokens()
LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def test_task_groups_equal_those_of_the_papers() -> None:
    assert [len(GROUPS[name]) for name in ("ruler", "ruler_se", "ruler_hax")] == [13, 11, 12]
    assert set(GROUPS["ruler_hax"]) - set(GROUPS["ruler_se"]) == {"qa_1"}
    assert [len(names) for names in RULER_SE_GROUPS.values()] == [3, 3, 2, 1, 2]
    assert all(name in TASKS for names in GROUPS.values() for name in names)
    assert members(["ruler_se", "vt", "passkey"]) == [*GROUPS["ruler_se"], "passkey"]


def test_options_of_a_group_reach_the_tasks_that_have_them() -> None:
    tasks = {task.name: options_of(task) for task in all_named(["ruler_se"], ["essay=files:x", "faithful=true"])}
    assert tuple(tasks) == GROUPS["ruler_se"]
    assert all(options["faithful"] is True for options in tasks.values())
    assert {name for name, options in tasks.items() if options.get("essay") == "files:x"} == {
        name for name in tasks if name.startswith("niah")
    }
    for names, option in ((["ruler_se"], "esay=x"), (["rule"], "essay=x")):
        with raises_code(TaskError, "unknown-name"):
            all_named(names, ["faithful=true", option])


def test_word_lists_have_the_sizes_of_the_rules() -> None:
    assert len(lists()["noun"]) * len(lists()["adjective"]) == 6_171_620
    assert len(single_words()) == 8166


def test_needle_values_follow_the_rules() -> None:
    for index in range(20):
        for name in ("niah_single_1", "niah_single_3"):
            ((key, value),) = named(name).sample(0, index, BYTES, 1000).meta["hidden"]
            adjective, _, noun = key.partition("-")
            assert adjective
            assert noun
            if name == "niah_single_1":
                assert 10**6 <= int(value) < 10**7
            else:
                assert uuid.UUID(value).version == 4


def test_depths_are_40_of_100_percent() -> None:
    assert (len(set(DEPTHS)), DEPTHS[:3], DEPTHS[-2:]) == (40, (0, 3, 5), (97, 100))


@pytest.mark.parametrize("options", [["num_values=41"], ["num_keys=41"], ["num_queries=11", "num_values=4"]])
def test_an_essay_has_places_for_40_needles(options: list[str]) -> None:
    """An essay holds 40 needles; 41 are refused with its options and the remedy. 41 lines of noise hold 41."""
    base = ["keys=uuids", "num_keys=1", "num_queries=1", "num_values=1"]
    with raises_code(TaskError, "does-not-fit"):
        named("niah_multivalue", [*base, *options]).sample(0, 0, BYTES, 30000)
    wider = named("niah_multivalue", [*base, *options, "haystack=noise"]).sample(0, 0, BYTES, 30000)
    assert len(wider.meta["hidden"]) in (41, 44)
    most = named("niah_multivalue", [*base, "num_values=40"]).sample(0, 0, BYTES, 30000)
    assert len(most.meta["hidden"]) == 40


def test_a_haystack_of_needles_has_no_second_value_of_the_key() -> None:
    for index in range(5):
        sample = named("niah_multikey_2").sample(0, index, BYTES, 20000)
        (key,) = sample.meta["asked"]
        assert len(re.findall(rf" for {re.escape(key)} is: ", sample.prompt)) == 1


def test_needles_by_depth_stand_where_the_index_says() -> None:
    """11 depths of the lines, from the first to after the last."""
    for index in range(11):
        sample = named("needle", ["haystack=noise"]).sample(0, index, BYTES, 2000)
        lines = sample.prompt.split("\n")[1:-1]
        number = len(lines) - 1
        (place,) = [place for place, line in enumerate(lines) if line != LINE]
        assert place == round(index / 10 * number)
    drawn = [named("needle", ["haystack=noise", "depth_steps=0"]).sample(0, i, BYTES, 3000) for i in range(30)]
    assert len({sample.meta["places"][0] for sample in drawn}) > 8


@pytest.mark.parametrize("name", ["cwe", "fwe"])
def test_faithful_shuffles_put_the_answer_at_the_same_places(name: str) -> None:
    """With `faithful=false` every sample has its own shuffle, and other places."""

    def places(faithful: str, index: int) -> list[int]:
        task = named(name, [f"faithful={faithful}", *(["setting=large"] if name == "cwe" else [])])
        text = task.text_of(task.random(0, index), 100, index, 12000)  # type: ignore[attr-defined]
        words = text.question.split("?")[-2].split()
        return [place for place, word in enumerate(words) if word == text.outputs[0]]

    same = [places("true", index)[:3] for index in range(3)]
    unfaithful = [places("false", index)[:3] for index in range(3)]
    assert same[0] == same[1] == same[2]
    assert unfaithful[0] != unfaithful[1] != unfaithful[2]


def test_faithful_samples_grow_in_the_steps_of_the_rules() -> None:
    """500 words of essay, 25 lines (5 below a length of 4096), 10 words; one step more does not fit."""
    for name, length, step in (
        ("niah_single_2", 9000, 500),
        ("niah_single_1", 9000, 25),
        ("niah_single_1", 2000, 5),
        ("cwe", 12000, 10),
    ):
        task = named(name, ["faithful=true", *(["setting=large"] if name == "cwe" else [])])
        units = fitted(task, BYTES, length)  # type: ignore[arg-type]
        assert task.sample(0, 0, BYTES, length).meta["units"] in range(units, 0, -step)
        longer = task.text_of(Random(f"{name} fitting"), units + step, 0, length)  # type: ignore[attr-defined]
        more = len(longer.question + longer.answer_prefix) + task.generate  # type: ignore[attr-defined]
        assert more > length


@pytest.mark.parametrize(
    ("number", "counts"),
    [(200, [121, 30, 13, 7, 4, 3]), (1000, [607, 151, 67, 37, 24, 16]), (4000, [2431, 607, 270, 151, 97, 67])],
)
def test_coded_words_have_the_published_frequencies(number: int, counts: list[int]) -> None:
    """The check values of the rules."""
    text = TASKS["fwe"].text_of(TASKS["fwe"].random(0, 0), number, 0, 4096)  # type: ignore[attr-defined]
    assert text.meta["counts"][:6] == counts


def test_common_words_take_the_setting_that_fits() -> None:
    assert named("cwe").sample(0, 0, BYTES, 4096).meta["setting"] == "small"
    assert named("cwe").sample(0, 0, BYTES, 9000).meta["setting"] == "large"
    with raises_code(TaskError, "does-not-fit"):
        named("cwe", ["faithful=true"]).sample(0, 0, BYTES, 4096)


def test_common_words_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "words"
    file.write_text("\n".join(f"word{number}x" for number in range(100)))
    sample = named("cwe", [f"words={file}"]).sample(0, 0, BYTES, 2400)
    assert all(output.startswith("word") for output in sample.outputs)
    with raises_code(TaskError, "does-not-fit", "100"):
        named("cwe", [f"words={file}", "setting=small"]).sample(0, 0, BYTES, 20000)


def test_essays_start_again_where_the_corpus_ends() -> None:
    provider = f"files:{GOLDEN / 'essay'}"
    words = essay(provider, 1000)
    assert len(words) == 1000
    again = min(place for place in range(1, 200) if words[place : place + 200] == words[:200])
    assert words[again] == "A"
    assert essay(provider, 7) == ["A", "garden", "is", "a", "slow", "machine.", "You"]
    assert "5550123," not in words  # a sentence that could be taken for a needle


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_essays_are_made_of_held_out_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    """Use held-out documents with at least 20 words, and no training documents."""
    monkeypatch.chdir(tmp_path)  # where unpacked shards are cached
    tokenizer = train_tokenizer(["The sea is wide. A ship is small."] * 9, 300)
    long = "The sea is wide. " * 6
    short = "A ship is small."
    training = "Never read this. " * 10
    ids = [[tokenizer.encode(text).ids] for text in (training, short, long)]
    splits = {"train": {"text": ids[0]}, "validation": {"text": [*ids[1], *ids[2]]}}
    write_folder(tmp_path / "data", splits, tokenizer.to_str(), 300, 0, {}, compression=compression)
    assert essay(f"shards:{tmp_path / 'data'}", 26) == ["The", "sea", "is", "wide."] * 6 + ["The", "sea"]


def test_sentences_end_before_a_capital_or_a_digit() -> None:
    text = 'He came. "Why?" she asked. 3 of them left! "No." It cost 3.5 dollars, e.g. here.'
    assert split_sentences(text) == [
        "He came.",
        '"Why?" she asked.',
        "3 of them left!",
        '"No.',
        "It cost 3.5 dollars, e.g. here.",
    ]


def test_synthetic_sentences_never_resemble_needles() -> None:
    synthetic = sentences()
    for _ in range(2000):
        sentence = next(synthetic)
        assert MIN_WORDS <= len(sentence.split()) <= MAX_WORDS
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert not re.search(r"\d|magic", sentence)
    assert essay("synthetic", 50) == essay("synthetic", 5000)[:50]


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("qa_1", [], "no-file"),
        ("qa_2", [], "no-file"),
        ("qa_1", ["data=/nowhere.json"], "no-file"),
        ("niah_single_2", ["essay=files:/nowhere"], "no-file"),
        ("niah_single_2", ["essay=shards:/nowhere"], "unreadable"),
        ("niah_single_2", ["essay=books"], "malformed"),
        ("cwe", ["words=/nowhere"], "unreadable"),
        ("vt", ["example_lines=3"], "out-of-range"),
        ("needle", ["haystack=needle"], "conflict"),
        ("needle", ["depth_steps=1"], "out-of-range"),
        ("niah_single_1", ["keys=names"], "unknown-name"),
        ("passkey", ["digits=0"], "out-of-range"),
        ("passkey", ["trim=middle"], "unknown-name"),
    ],
)
def test_missing_corpora_and_wrong_options_are_refused(name: str, options: list[str], code: Code) -> None:
    with raises_code(TaskError, code):
        named(name, options).sample(0, 0, BYTES, 4000)


def test_data_sets_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"data": [{"paragraphs": [{"text": "no context"}]}]}))
    (tmp_path / "b.json").write_text("[")
    for file in ("a.json", "b.json"):
        with raises_code(TaskError, "unreadable", file):
            named("qa_1", [f"data={tmp_path / file}"]).sample(0, 0, BYTES, 4000)


def test_questions_and_lengths_beyond_the_data_are_refused() -> None:
    with raises_code(TaskError, "out-of-range", "question 4"):
        named("qa_1", [f"data={GOLDEN / 'squad.json'}"]).sample(0, 4, BYTES, 850)
    with raises_code(TaskError, "does-not-fit", "8500", "7"):
        named("qa_1", [f"data={GOLDEN / 'squad.json'}"]).sample(0, 0, BYTES, 8500)


def test_a_missing_word_list_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    lists.cache_clear()
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    try:
        with raises_code(TaskError, "not-installed", "hybridtron[tasks]"):
            named("niah_single_1").sample(9, 9, BYTES, 1000)
        for name in ("passkey", "niah_multikey_3", "vt", "fwe", "copying", "qa_synth_2"):
            assert named(name).sample(9, 9, BYTES, 2000).tokens
    finally:
        lists.cache_clear()
