"""BABILong: both metrics by hand, and stories whose shares are those of the published rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

from hybridtron.tasks.babilong.prompts import PROMPTS
from hybridtron.tasks.babilong.task import LABELS, Babilong
from hybridtron.tasks.base import Sample, TaskError
from hybridtron.tasks.options import named
from hybridtron.tasks.tokens import ByteTokens
from tests.refusals import raises_code
from tests.tasks.rules import GOLDEN

BYTES = ByteTokens()
STORIES = 400


class PairsOfWords:
    """A vocabulary with about 3 tokens per fact, so that the number of facts limits a story."""

    digest = "pairs of words"

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()[::2]]

    def decode(self, tokens: Sequence[int]) -> str:
        raise NotImplementedError


def facts_alone(number: int, count: int) -> list[Sample]:
    task = named(f"babilong_qa{number}", ["essay=none", "style=tuned"])
    return [task.sample(0, index, BYTES, 20000) for index in range(count)]


def scores(story: str, question: str, wanted: str, answer: str) -> tuple[float, float, float]:
    sample = Sample("", 0, 0, "", "", (1,), (1,), (wanted,), 20, 0, {"question": question})
    metrics = Babilong(f"babilong_{story}", story).score(sample, answer)
    return metrics["accuracy"], metrics["accuracy_reference"], metrics["contains"]


@pytest.mark.parametrize(
    ("story", "question", "wanted", "answer", "expected"),
    [
        ("qa1", "Where is Mary?", "office", "The most recent location of Mary is Office.", (1, 1, 1)),
        ("qa1", "Where is Mary?", "office", "office or kitchen", (0, 0, 1)),
        ("qa1", "Where is Mary?", "office", "office. Not the kitchen", (1, 1, 1)),  # up to the period
        ("qa1", "Where is Mary?", "office", "It is here. office", (0, 0, 1)),
        ("qa1", "Where is Mary?", "office", "office<example>kitchen", (1, 1, 1)),
        (
            "qa3",
            "Where was the milk before the kitchen?",
            "garden",
            "Before the kitchen it was in the garden.",
            (1, 1, 1),
        ),
        ("qa3", "Where was the milk before the kitchen?", "garden", "in the kitchen", (0, 0, 0)),
        ("qa6", "Is John in the office?", "no", "I do not know", (0, 1, 1)),  # "no" is a part of "not"
        ("qa6", "Is John in the office?", "yes", "yes, not here", (1, 0, 1)),
        ("qa7", "How many objects is John carrying?", "none", "none", (1, 0, 1)),  # "one" is a part of "none"
        ("qa7", "How many objects is John carrying?", "one", "One object", (1, 1, 1)),
        ("qa8", "What is John carrying?", "milk,apple", "apple and milk", (1, 1, 0)),
        ("qa8", "What is John carrying?", "milk,apple", "milk", (0, 0, 0)),
        ("qa8", "What is John carrying?", "milk", "milk,apple", (0, 0, 1)),
        ("qa10", "Is Bill in the park?", "maybe", "maybe, yes", (0, 0, 1)),
        ("qa5", "Who gave the milk to Jeff?", "Fred", "Fred gave Jeff the milk", (1, 1, 1)),
    ],
)
def test_babilong_metrics_equal_those_by_hand(
    story: str, question: str, wanted: str, answer: str, expected: tuple[float, float, float]
) -> None:
    assert scores(story, question, wanted, answer) == expected


@pytest.mark.parametrize("number", [1, 2, 3, 4, 6])
def test_labels_are_near_uniform(number: int) -> None:
    """A hidden start that is drawn: within four deviations of 400 draws."""
    counts = Counter(sample.outputs[0] for sample in facts_alone(number, STORIES))
    labels = LABELS[f"qa{number}"]
    share = 1 / len(labels)
    assert set(counts) == set(labels)
    assert all(
        abs(counts[label] / STORIES - share) < 4 * (share * (1 - share) / (STORIES / 5)) ** 0.5 for label in labels
    )


def test_answers_have_the_shares_of_simulated_rules() -> None:
    carried = Counter(sample.outputs[0] for sample in facts_alone(7, STORIES))
    for label, share in (("one", 0.53), ("none", 0.38), ("two", 0.08)):
        assert abs(carried[label] / STORIES - share) < 0.1
    known = Counter(sample.outputs[0] for sample in facts_alone(10, STORIES))
    assert all(abs(known[label] / STORIES - 1 / 3) < 0.1 for label in ("yes", "no", "maybe"))


def test_stories_have_the_lengths_of_simulated_rules() -> None:
    """Task 2: median 21, at least 3; task 3: median 32."""
    second, third = ([len(one.meta["facts"]) for one in facts_alone(number, STORIES)] for number in (2, 3))
    assert min(second) >= 3
    assert 16 <= median(second) <= 26
    assert 25 <= median(third) <= 40
    assert {len(one.meta["facts"]) for one in facts_alone(1, 20)} == {2, 4, 6, 8, 10}
    assert {len(one.meta["facts"]) for one in facts_alone(4, 20)} == {2}


def test_questions_of_task_5_have_the_released_shares() -> None:
    words = Counter(" ".join(one.meta["question"].split()[:2]) for one in facts_alone(5, STORIES))
    for start, share in (("What did", 0.33), ("Who gave", 0.35), ("Who did", 0.17), ("Who received", 0.15)):
        assert abs(words[start] / STORIES - share) < 0.1


def test_facts_keep_their_order_in_the_text() -> None:
    for index in range(10):
        sample = named("babilong_qa2").sample(0, index, BYTES, 6000)
        text = sample.prompt.split("<context>\n")[1]
        places = []
        for fact in sample.meta["facts"]:
            places.append(text.index(fact, places[-1] + 1 if places else 0))
        assert places == sorted(places)
        assert sample.meta["gaps"] == sorted(sample.meta["gaps"])


def test_stories_that_do_not_fit_are_drawn_again() -> None:
    """A story has at most a fact for 8 tokens; one that doesn't fit is drawn again, until none of 20 fits."""
    task = named("babilong_qa3", ["style=tuned", "essay=none"])
    lengths = [len(task.sample(0, index, PairsOfWords(), 200).meta["facts"]) for index in range(40)]
    assert 20 < max(lengths) <= 25
    assert all(named("babilong_qa3").sample(0, index, BYTES, 2300).length <= 2300 for index in range(20))
    with raises_code(TaskError, "does-not-fit", "60"):
        task.sample(0, 0, BYTES, 60)


def test_filler_has_no_sentence_that_places_a_person(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(
        "On that day Mary wrote a long letter to her aunt at home. Nobody saw that John stood in the garden for hours "
        "and hours. The kitchen had been painted twice in the same year by the same man."
    )
    sample = named("babilong_qa1", [f"essay=files:{tmp_path}"]).sample(0, 0, BYTES, 3000)
    text = sample.prompt.split("<context>\n")[1]
    assert "aunt" in text
    assert "painted" in text
    assert "stood" not in text
    (tmp_path / "a.txt").write_text("Too short.")
    with raises_code(TaskError, "missing"):
        named("babilong_qa1", [f"essay=files:{tmp_path}/"]).sample(0, 0, BYTES, 3000)


def test_styles_choose_between_examples_and_plain_questions() -> None:
    shown = named("babilong_qa2").sample(0, 0, BYTES, 3000)
    assert shown.prompt.startswith(PROMPTS["qa2"].head())
    assert shown.answer.startswith("\nAnswer: The ")
    tuned = named("babilong_qa2", ["style=tuned"]).sample(0, 0, BYTES, 3000)
    assert "<example>" not in tuned.prompt
    assert tuned.prompt.endswith("\nAnswer:")
    assert tuned.answer == f" {tuned.outputs[0]}"
    with raises_code(TaskError, "unknown-name"):
        named("babilong_qa2", ["style=zero"]).sample(0, 0, BYTES, 3000)


def test_prompts_equal_the_published_ones() -> None:
    for story, prompt in PROMPTS.items():
        assert prompt.head() == (GOLDEN / "babilong" / f"{story}.prompt").read_text()
