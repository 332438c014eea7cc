"""BABILong's tasks: the facts of a bAbI story, scattered in order between the sentences of a long text, and a question.

The text (background) begins at a random sentence of an essay (in the paper: a book from PG-19). It has as many words as
fit the sample's length, a maximum number of tokens. Every sentence of the background has at least 10 words, and does
not contain both a person and a place from the stories. Facts are inserted at random gaps between sentences; a gap may
get several facts. If the story has more than length / 8 facts before its question, or if the sample does not fit the
length even without background, another story is drawn.

Labels are a task's possible answers; only in qa8, an answer may be several labels, separated by commas. There are three
metrics. The first two read the model's answer only up to its first period:

    accuracy            1 if the answer has all right labels and no other label; labels in the question don't count
    accuracy_reference  like accuracy, but labels also match within words, as in the public code: "one" is in "none"
    contains            1 if the right answer occurs anywhere in the model's answer, as in lm-evaluation-harness
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import ClassVar

from hybridtron.tasks.babilong.prompts import PROMPTS
from hybridtron.tasks.babilong.stories import STORIES, Asked, Story, story_of
from hybridtron.tasks.babilong.world import OBJECTS, PEOPLE, PLACES
from hybridtron.tasks.base import Sample, TaskError, TextTokens
from hybridtron.tasks.fitted import FittedTask, TaskText
from hybridtron.tasks.fitting import most_units
from hybridtron.tasks.haystack import SYNTHETIC, corpus_sentences

STYLES = ("few_shot", "tuned")
STORIES_TRIED = 200  # maximum number of stories that are drawn until a story has few enough facts
MIN_SENTENCE_WORDS = 10  # minimum number of words in a sentence of the background
NAMED = {*PEOPLE, "Fred", "Jeff", "Bill", "Julie"}  # all people of the stories
NAMED_PLACES = {*PLACES, "school", "park", "cinema"}  # all places of the stories
LABELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), PLACES),
    "qa5": ("Bill", "Fred", "Jeff", "Mary", *OBJECTS),
    "qa6": ("no", "yes"),
    "qa7": ("none", "one", "three", "two"),
    "qa8": (*OBJECTS, "nothing"),
    "qa9": ("no", "yes"),
    "qa10": ("maybe", "no", "yes"),
}


@dataclass(frozen=True)
class Babilong(FittedTask):
    """A bAbI story hidden in a text. Words of background are added until the text has the wanted length.

    story  bAbI task: qa1 to qa10
    style  few_shot: prompts have an instruction and examples
           tuned: prompts have only text and question, for models that are trained on the task
    essay  the background's source (haystack.py lists the choices), or "none" for no background (0k in BABILong)
    """

    generate: ClassVar[int] = 20
    tries: ClassVar[int] = 20

    name: str
    story: str
    style: str = "few_shot"
    essay: str = SYNTHETIC

    @property
    def about(self) -> str:
        summary = (STORIES[self.story].__doc__ or "").split(".")[0].split("\n")[0]
        return f"BABILong: {summary[0].lower()}{summary[1:]}"

    def check(self, length: int) -> None:
        super().check(length)
        if self.style not in STYLES:
            raise TaskError(f"{self.name}: style={self.style}: must be {' or '.join(STYLES)}", code="unknown-name")

    def steps(self, length: int) -> tuple[int, int]:
        return 0, max(length // 512, 1)

    def most(self, size: Callable[[int], int], tokenizer: TextTokens, length: int) -> int:
        """Return the number of background words that fit this sample.

        Other tasks search for this number once, not for each sample. Here stories differ too much in length for that.
        """
        if self.essay == "none":
            return 0
        return most_units(size, length, *self.steps(length))

    def text_of(self, random: Random, units: int, index: int, length: int) -> TaskText:
        story, asked = self.drawn(random, index, length)
        facts = story.facts[: asked.facts]
        sentences = self.background(random, units)
        gaps = sorted(random.choices(range(len(sentences) + 1), k=len(facts)))
        lines = list(sentences)
        for gap, fact in reversed(list(zip(gaps, facts, strict=True))):
            lines.insert(gap, fact)
        context = " ".join(lines)
        prompt = PROMPTS[self.story]
        answer = prompt.answer.format(*asked.about, answer=asked.answer)
        if self.style == "few_shot":
            question = f"{prompt.head()}\n\n<context>\n{context}\n</context>\n\nQuestion: {asked.question}"
            completion = f"\nAnswer: {answer}"
        else:
            question = f"{context}\nQuestion: {asked.question}\nAnswer:"
            completion = f" {asked.answer}"
        meta = {"facts": facts, "gaps": gaps, "question": asked.question, "essay": self.essay}
        return TaskText(question, "", completion, (asked.answer,), meta)

    def drawn(self, random: Random, index: int, length: int) -> tuple[Story, Asked]:
        """Draw stories until a story has at most length / 8 facts before the question that the index chooses.

        Returns the story and this question. Raises TaskError if none of STORIES_TRIED stories is short enough.
        """
        for _ in range(STORIES_TRIED):
            story = story_of(STORIES[self.story](random))
            asked = story.asked[index % len(story.asked)]
            if asked.facts <= length // 8:
                return story, asked
        reason = f"none of {STORIES_TRIED} stories has at most {length // 8} facts"
        raise TaskError(f"{self.name}: a length of {length} is too short: {reason}", code="does-not-fit")

    def background(self, random: Random, words: int) -> list[str]:
        """Return consecutive sentences with `words` words in total, from a random sentence on.

        The last sentence may be cut. After the essay's last sentence, its first sentence follows.
        """
        if self.essay == "none" or words == 0:
            return []
        sentences = _sentences(self.essay)
        place = random.randrange(len(sentences))
        chosen_sentences: list[str] = []
        while words > 0:
            sentence = sentences[place % len(sentences)].split()[:words]
            chosen_sentences.append(" ".join(sentence))
            words -= len(sentence)
            place += 1
        return chosen_sentences

    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        (target,) = sample.outputs
        labels = LABELS[self.story]
        question = sample.meta["question"]
        return {
            "accuracy": judged(answer, target, question, labels, in_words),
            "accuracy_reference": judged(answer, target, question, labels, in_letters),
            "contains": float(target.lower() in answer.lower()),
        }

    def chance(self) -> float:
        return 1 / len(LABELS[self.story])


def in_words(label: str, text: str) -> bool:
    """Return True if a label occurs in the text as a word."""
    return re.search(rf"\b{re.escape(label)}\b", text) is not None


def in_letters(label: str, text: str) -> bool:
    """Return True if a label occurs anywhere in the text, even within a word."""
    return label in text


def judged(
    answer: str, wanted: str, question: str, labels: tuple[str, ...], occurs: Callable[[str, str], bool]
) -> float:
    """Return 1 if the labels that are only in the answer, not in the question, are exactly the wanted labels, else 0.

    answer: the text that the model has written
    wanted: the right labels, separated by commas
    labels: all possible answers of the task
    occurs: function of (label, text) that returns True if the label occurs in the text

    Only the answer's text before its first period, `<context>` or `<example>` counts. Case is ignored.
    """
    written = re.split(r"\.|<context>|<example>", answer.lower())[0]
    lowered = [label.lower() for label in labels]
    answer_labels = {label for label in lowered if occurs(label, written)}
    answer_labels -= {label for label in lowered if occurs(label, question.lower())}
    return float(answer_labels == set(wanted.lower().split(",")))


@cache
def _sentences(provider: str) -> list[str]:
    """Return the sentences that can be background, from the corpus of a provider such as `files:DIR`.

    A sentence must have MIN_SENTENCE_WORDS words, and must not contain both a person and a place from the stories.
    """
    sentences = []
    for sentence in corpus_sentences(provider):
        words = set(re.findall(r"\w+", sentence))
        if len(sentence.split()) >= MIN_SENTENCE_WORDS and not (words & NAMED and words & NAMED_PLACES):
            sentences.append(sentence)
    if not sentences:
        raise TaskError(f"essay={provider}: has no sentence of {MIN_SENTENCE_WORDS} words", code="missing")
    return sentences
