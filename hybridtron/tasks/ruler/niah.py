"""Needle in a haystack (NIAH): RULER's eight tasks, and a task with a single needle at chosen depths.

A needle assigns a value to a key: `One of the special magic numbers for KEY is: VALUE.` Needles are hidden in a long
text, the haystack, which is a repeated line, an essay, or other needles. The question asks for all values of one or
several keys.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from hybridtron.tasks.base import TaskError
from hybridtron.tasks.fitted import TaskText
from hybridtron.tasks.haystack import NOISE, SYNTHETIC, essay, split_sentences
from hybridtron.tasks.passkey import depth_of
from hybridtron.tasks.ruler.base import SHORT, RulerTask, listed
from hybridtron.tasks.words import word_pair

INTRODUCTION = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
QUESTION = "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
# replacements in the prompt, in this order, if the answer is a single value
SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))
DEPTHS = tuple(round(100 * step / 39) for step in range(40))  # possible depths of needles in an essay, in percent
KINDS = ("words", "numbers", "uuids")
HAYSTACKS = ("noise", "essay", "needle")
MAX_NEEDLES = 2**14


@dataclass(frozen=True)
class Needles(RulerTask):
    """RULER's NIAH task: keys and values hidden in a haystack.

    haystack      noise (a repeated line), essay, or needle (other keys with values)
    keys, values  words, numbers or uuids
    num_keys      how many keys are hidden; a number below num_queries is raised to num_queries
    num_values    how many values each key has
    num_queries   how many keys the question asks for
    essay         the essay's provider (haystack.py)
    faithful      also reproduce unintended properties of the public generator (base.py)
    """

    generate: ClassVar[int] = 128

    name: str
    haystack: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1
    essay: str = SYNTHETIC
    faithful: bool = False

    @property
    def about(self) -> str:
        hidden = (
            f"{self.num_queries} of {max(self.num_keys, self.num_queries)} keys, {self.num_values} {self.values} each"
        )
        return f"RULER: {hidden}, in {self.haystack}"

    def steps(self, length: int) -> tuple[int, int]:
        needles = max(self.num_keys, self.num_queries) * self.num_values
        if not self.faithful:
            return needles, 1
        if self.haystack == "essay":
            step = 500
        elif length < SHORT:
            step = 5
        else:
            step = 25
        return max(step, needles), step

    def check(self, length: int) -> None:
        super().check(length)
        for option, value, known in (
            ("haystack", self.haystack, HAYSTACKS),
            ("keys", self.keys, KINDS),
            ("values", self.values, KINDS),
        ):
            if value not in known:
                raise TaskError(
                    f"{self.name}: {option}={value}: must be one of {', '.join(known)}", code="unknown-name"
                )
        if min(self.num_keys, self.num_values, self.num_queries) < 1:
            raise TaskError(
                f"{self.name}: num_keys, num_values and num_queries must be at least 1", code="out-of-range"
            )
        needles = max(self.num_keys, self.num_queries) * self.num_values
        if needles > MAX_NEEDLES:
            raise TaskError(
                f"{self.name}: num_keys (or num_queries) times num_values must be at most {MAX_NEEDLES:,}",
                code="out-of-range",
            )
        if self.haystack == "essay" and needles > len(DEPTHS):
            options = f"num_keys={self.num_keys} num_queries={self.num_queries} num_values={self.num_values}"
            raise TaskError(
                f"{self.name}: {options}: haystack=essay can hold at most {len(DEPTHS)} needles, not {needles:,}; "
                "choose fewer keys or values, or set haystack=noise or haystack=needle",
                code="does-not-fit",
            )

    def text_of(self, random: Random, units: int, index: int, length: int) -> TaskText:
        keys: list[str] = []
        while len(keys) < max(self.num_keys, self.num_queries):
            key = drawn(self.keys, random)
            keys += [key] if key not in keys else []
        values = {key: [drawn(self.values, random) for _ in range(self.num_values)] for key in keys}
        asked_keys = random.sample(keys, self.num_queries)
        hidden = self.shuffled([(key, value) for key in keys for value in values[key]], random)
        lines, joint = self.lines(keys, units, random)
        places = self.places(len(hidden), len(lines), random, index)
        needles = [NEEDLE.format(kind=self.values, key=key, value=value) for key, value in hidden]
        context = joint.join(inserted(lines, places, needles))
        outputs = tuple(value for key in asked_keys for hidden_key, value in hidden if hidden_key == key)
        return self.asked_about(context, asked_keys, outputs, {"hidden": hidden, "places": places})

    def asked_about(self, context: str, asked: Sequence[str], outputs: tuple[str, ...], meta: dict) -> TaskText:
        """Return a sample's texts, in the singular if there is one output. `asked` has the keys in the question."""
        kind = self.values
        parts = [INTRODUCTION, QUESTION, PREFIX]
        if len(outputs) == 1:
            kind = kind.removesuffix("s")
            for plural_form, singular_form in SINGULAR:
                parts = [part.replace(plural_form, singular_form) for part in parts]
        before, after, prefix = (part.format(kind=kind, query=listed(asked)) for part in parts)
        meta = {"asked": list(asked), "haystack": self.haystack, **meta}
        if self.haystack == "essay":
            meta["essay"] = self.essay
        return TaskText(f"{before}{context}{after}", prefix, f" {listed(outputs)}.", outputs, meta)

    def lines(self, keys: list[str], units: int, random: Random) -> tuple[list[str], str]:
        """Return the haystack's lines or sentences, and their separator.

        `units` is the number of lines, or for an essay the number of words.
        """
        if self.haystack == "essay":
            return split_sentences(" ".join(essay(self.essay, units))), " "
        return [NOISE] * units if self.haystack == "noise" else self._distractors(keys, units, random), "\n"

    def places(self, needles: int, lines: int, random: Random, index: int) -> list[int]:
        """Return for each needle the line index before which it is inserted, in ascending order.

        `needles` and `lines` are numbers. In an essay, sentences are the lines.
        """
        if self.haystack == "essay":
            return sorted(lines * depth // 100 for depth in random.sample(DEPTHS, needles))
        return sorted(random.sample(range(lines), needles))

    def _distractors(self, keys: list[str], count: int, random: Random) -> list[str]:
        """Return `count` needles as a haystack. Their keys differ from the hidden keys `keys`."""
        lines = []
        while len(lines) < count:
            key = drawn(self.keys, random)
            value = drawn(self.values, random)
            lines += [NEEDLE.format(kind=self.values, key=key, value=value)] if key not in keys else []
        return lines


@dataclass(frozen=True)
class NeedleByDepth(Needles):
    """A single needle in noise or an essay, at a depth that depends on the sample's index.

    Sample i has depth (i mod depth_steps) / (depth_steps - 1). With depth_steps=0 depths are drawn uniformly from 0
    to 1.
    """

    name: str = "needle"
    haystack: str = "essay"
    depth_steps: int = 11

    @property
    def about(self) -> str:
        return "one number in noise or essays, by depth and length"

    def check(self, length: int) -> None:
        if self.haystack == "needle" or max(self.num_keys, self.num_values, self.num_queries) > 1:
            raise TaskError(
                f"{self.name}: this task hides a single needle; set haystack=noise or haystack=essay, "
                "and num_keys, num_values and num_queries to 1",
                code="conflict",
            )
        super().check(length)

    def places(self, needles: int, lines: int, random: Random, index: int) -> list[int]:
        return [round(depth_of(index, self.depth_steps, random) * lines)]


def drawn(kind: str, random: Random) -> str:
    """Return a random key or value: `adjective-noun` for words, 7 digits for numbers, or a UUID (version 4)."""
    if kind == "words":
        return word_pair(random)
    if kind == "numbers":
        return str(random.randrange(10**6, 10**7))
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def inserted(lines: Sequence[str], places: Sequence[int], needles: Sequence[str]) -> list[str]:
    """Return the lines with each needle inserted before the line at its place; `places` are in ascending order."""
    result: list[str] = []
    for start, place, needle in zip([0, *places], places, needles, strict=False):
        result += [*lines[start:place], needle]
    return [*result, *lines[places[-1] :]]
