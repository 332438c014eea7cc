"""RULER's variable tracking: find all variables that have a given value through a chain of assignments.

    VAR AAAAA = 12345
    VAR BBBBB = VAR AAAAA

A chain's assignments are inserted in their order at random places between noise lines. The prompt begins with a solved
example, which has shorter names and a fixed number of noise lines. (The public generator instead limits the example to
500 tokens. About 10 noise lines fit with common tokenizers, but no line fits if bytes are tokens.)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from string import ascii_uppercase
from typing import ClassVar

from hybridtron.tasks.base import TaskError
from hybridtron.tasks.fitted import TaskText
from hybridtron.tasks.haystack import NOISE
from hybridtron.tasks.ruler.base import SHORT, RulerTask
from hybridtron.tasks.ruler.niah import inserted

QUESTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned "
    "the value {value}, they are: "
)
FAITHFUL_LINES = 10  # noise lines in the example with `faithful`
LETTERS = 5  # letters in a variable's name
EXAMPLE_LETTERS = 3  # letters in a variable's name in the example
MAX_LINKS = 2**10  # maximum value of num_chains * num_hops, and also of example_lines


@dataclass(frozen=True)
class Drawn:
    """The chains that are hidden in a text.

    names   each chain's variables, in order
    values  each chain's value
    places  for each chain, the line indices before which its assignments are inserted; the lines include
            earlier chains' assignments
    lines   how many noise lines there are
    """

    names: list[list[str]]
    values: list[int]
    places: list[list[int]]
    lines: int

    def texts(self) -> tuple[str, str, str]:
        """Return three texts: the question with its context, the answer prefix, and the answer.

        The question asks for the first chain's variables.
        """
        lines = [NOISE] * self.lines
        for names, value, places in zip(self.names, self.values, self.places, strict=True):
            links = [
                f"VAR {names[0]} = {value}",
                *(f"VAR {later} = VAR {earlier} " for earlier, later in pairwise(names)),
            ]
            lines = inserted(lines, places, links)
        value = str(self.values[0])
        question = QUESTION.format(context="\n".join(lines), value=value)
        return question, PREFIX.format(count=len(self.names[0]), value=value), " ".join(self.names[0])


@dataclass(frozen=True)
class VariableTracking(RulerTask):
    """The variable tracking task; texts grow by noise lines.

    num_chains     how many chains there are; the question asks for the first chain
    num_hops       how many assignments a chain has after its first assignment
    example_lines  how many noise lines the example has; with `faithful` there are 10
    faithful       also reproduce unintended properties of the public generator (base.py)
    """

    generate: ClassVar[int] = 30

    name: str = "vt"
    num_chains: int = 1
    num_hops: int = 4
    example_lines: int = 5
    faithful: bool = False

    @property
    def about(self) -> str:
        return f"RULER: {self.num_hops + 1} variables of one value, by {self.num_chains} chain of assignments"

    def steps(self, length: int) -> tuple[int, int]:
        links = self.num_hops + 1
        if not self.faithful:
            step = 1
        elif length < SHORT:
            step = 5
        else:
            step = 10
        return max(step, links), step

    def check(self, length: int) -> None:
        super().check(length)
        if self.num_chains * self.num_hops > MAX_LINKS or self.example_lines > MAX_LINKS:
            raise TaskError(
                f"{self.name}: num_chains times num_hops, and example_lines, must be at most {MAX_LINKS:,}",
                code="out-of-range",
            )
        if min(self.num_chains, self.num_hops) < 1 or self.example_lines < self.num_hops + 1:
            message = f"num_chains={self.num_chains} num_hops={self.num_hops} example_lines={self.example_lines}"
            raise TaskError(f"{self.name}: {message}: must be at least 1, 1 and num_hops + 1", code="out-of-range")

    def text_of(self, random: Random, units: int, index: int, length: int) -> TaskText:
        main = self.drawn(random, self.num_chains, LETTERS, units, ())
        if self.faithful:
            lines = FAITHFUL_LINES
        else:
            lines = self.example_lines
        example = self.drawn(random, 1, EXAMPLE_LETTERS, max(lines, self.num_hops + 1), main.values)
        question, prefix, answer = main.texts()
        outputs = tuple(main.names[0])
        return TaskText(
            "".join(example.texts()) + "\n" + question,
            prefix,
            answer,
            outputs,
            {"main": vars(main), "example": vars(example)},
        )

    def drawn(self, random: Random, chains: int, letters: int, lines: int, taken: list[int] | tuple[()]) -> Drawn:
        """Draw chains with distinct variables and values, and the places at which they are inserted.

        `letters` is the length of a variable's name. `lines` is the number of noise lines. No value is in `taken`.
        """
        links = self.num_hops + 1
        names: list[str] = []
        while len(names) < chains * links:
            name = "".join(random.choices(ascii_uppercase, k=letters))
            names += [name] if name not in names else []
        values: list[int] = []
        while len(values) < chains:
            value = random.randrange(10000, 99999)
            values += [value] if value not in (*values, *taken) else []
        places = [sorted(random.sample(range(lines + chain * links), links)) for chain in range(chains)]
        return Drawn([names[i * links : (i + 1) * links] for i in range(chains)], values, places, lines)
