"""Needle in a haystack: RULER's eight NIAH tasks, and a single needle by depth and length.

A needle assigns a value to a key: `One of the special magic numbers for KEY is: VALUE.` The question asks for all
values of one or several keys. The haystack is a repeated line, an essay, or other needles.
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
SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))
DEPTHS = tuple(round(100 * step / 39) for step in range(40))  # positions, in percent of an essay's sentences
KINDS = ("words", "numbers", "uuids")
HAYSTACKS = ("noise", "essay", "needle")
MOST_NEEDLES = 2**14


@dataclass(frozen=True)
class Needles(RulerTask):
    """RULER's NIAH task: keys and values hidden in noise, an essay or other keys and values.

    haystack     noise, essay or needle
    keys, values words, numbers or uuids
    num_keys     number of hidden keys, or num_queries if that is larger; each has num_values values
    num_queries  number of keys in the question
    essay        the essay's provider (haystack.py)
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
            raise TaskError(f"{self.name}: num_keys, num_values and num_queries are at least 1", code="out-of-range")
        needles = max(self.num_keys, self.num_queries) * self.num_values
        if needles > MOST_NEEDLES:
            raise TaskError(f"{self.name}: keys times values must be at most {MOST_NEEDLES:,}", code="out-of-range")
        if self.haystack == "essay" and needles > len(DEPTHS):
            options = f"num_keys={self.num_keys} num_queries={self.num_queries} num_values={self.num_values}"
            raise TaskError(
                f"{self.name}: {options}: haystack=essay has places for {len(DEPTHS)} needles, not for {needles:,}; "
                "ask for fewer, or set haystack=noise or haystack=needle",
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
        """Fill in the template, in the singular if there is only one output."""
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
        """Return the haystack's lines or sentences, and their separator. Units are lines, or words of an essay."""
        if self.haystack == "essay":
            return split_sentences(" ".join(essay(self.essay, units))), " "
        return [NOISE] * units if self.haystack == "noise" else self._distractors(keys, units, random), "\n"

    def places(self, needles: int, lines: int, random: Random, index: int) -> list[int]:
        """Return for each needle the index of the line or sentence before which it is inserted, in order."""
        if self.haystack == "essay":
            return sorted(lines * depth // 100 for depth in random.sample(DEPTHS, needles))
        return sorted(random.sample(range(lines), needles))

    def _distractors(self, keys: list[str], count: int, random: Random) -> list[str]:
        """Return `count` needles as a haystack; their keys differ from the hidden ones."""
        lines = []
        while len(lines) < count:
            key = drawn(self.keys, random)
            value = drawn(self.values, random)
            lines += [NEEDLE.format(kind=self.values, key=key, value=value)] if key not in keys else []
        return lines


@dataclass(frozen=True)
class NeedleByDepth(Needles):
    """One number in noise or an essay, at a depth given by the sample's index.

    Sample i has depth (i mod depth_steps) / (depth_steps - 1); with depth_steps=0 it is drawn uniformly from 0 to 1.
    """

    name: str = "needle"
    haystack: str = "essay"
    depth_steps: int = 11

    @property
    def about(self) -> str:
        return "one number in noise or essays, by depth and length"

    def check(self, length: int) -> None:
        if self.haystack == "needle" or max(self.num_keys, self.num_values, self.num_queries) > 1:
            raise TaskError(f"{self.name}: hides one needle, haystack=noise or haystack=essay", code="conflict")
        super().check(length)

    def places(self, needles: int, lines: int, random: Random, index: int) -> list[int]:
        return [round(depth_of(index, self.depth_steps, random) * lines)]


def drawn(kind: str, random: Random) -> str:
    """Draw a key or value: `adjective-noun`, 7 digits, or a UUID of version 4."""
    if kind == "words":
        return word_pair(random)
    if kind == "numbers":
        return str(random.randrange(10**6, 10**7))
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def inserted(lines: Sequence[str], places: Sequence[int], needles: Sequence[str]) -> list[str]:
    """Insert each needle before the line at its place; `places` are in ascending order."""
    result: list[str] = []
    for start, place, needle in zip([0, *places], places, needles, strict=False):
        result += [*lines[start:place], needle]
    return [*result, *lines[places[-1] :]]
