"""Substitutes for RULER's question answering that need no download: questions about invented people.

A document describes one person by six attributes, and names the person's partner, who has another document. qa_synth_1
asks for an attribute of a person. qa_synth_2 asks for an attribute of a person's partner, so the answer requires two
documents. Each attribute has 12 possible values, so a guess is right with probability 1/12. Scores are not comparable
with scores for RULER's qa_1 and qa_2.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from hybridtron.tasks.base import Sample, TaskError
from hybridtron.tasks.fitted import TaskText
from hybridtron.tasks.ruler.base import RulerTask
from hybridtron.tasks.ruler.qa import PREFIX, QUESTION, question_scores

VALUES = 12
ATTRIBUTES = {
    "profession": "baker carpenter dentist farmer gardener lawyer mechanic painter pilot sailor tailor surgeon",
    "city": "Athens Berlin Cairo Dublin Havana Jakarta Lisbon Madrid Nairobi Oslo Prague Warsaw",
    "instrument": "accordion banjo cello drum flute guitar harp oboe piano trumpet tuba violin",
    "animal": "badger camel dolphin eagle ferret gecko hamster iguana lobster otter parrot walrus",
    "dish": "burrito curry dumpling falafel goulash lasagne omelette paella ramen risotto sushi waffle",
    "colour": "amber beige crimson emerald indigo lavender magenta olive purple scarlet turquoise yellow",
}
SENTENCES = {
    "profession": "{name} works as a {value}.",
    "city": "{name} lives in {value}.",
    "instrument": "{name} plays the {value}.",
    "animal": "The favourite animal of {name} is the {value}.",
    "dish": "The favourite dish of {name} is {value}.",
    "colour": "The favourite colour of {name} is {value}.",
}
QUESTIONS = {
    "profession": "What does {who} work as?",
    "city": "Which city does {who} live in?",
    "instrument": "Which instrument does {who} play?",
    "animal": "What is the favourite animal of {who}?",
    "dish": "What is the favourite dish of {who}?",
    "colour": "What is the favourite colour of {who}?",
}
ONSETS = "bdfghklmnprstvz"
VOWELS = "aeiou"
ENDS = "lnrs"


@dataclass(frozen=True)
class SyntheticQuestions(RulerTask):
    """A question about invented people. A text is lengthened by adding documents.

    hops      1: the question is about a person; 2: it is about a person's partner
    faithful  also reproduce unintended properties of RULER's public generator (base.py)
    """

    generate: ClassVar[int] = 32

    name: str
    hops: int
    faithful: bool = False

    @property
    def about(self) -> str:
        return f"a substitute for RULER's qa_{self.hops}: {self.hops} of many made-up documents"

    def steps(self, length: int) -> tuple[int, int]:
        if self.hops not in (1, 2):
            raise TaskError(f"{self.name}: hops={self.hops}: must be 1 or 2", code="out-of-range")
        if self.faithful:
            return (10, 10)
        return (2, 1)

    def text_of(self, random: Random, units: int, index: int, length: int) -> TaskText:
        names = people(random, units)
        partners = names[1:] + names[:1]
        values = [{kind: random.choice(words.split()) for kind, words in ATTRIBUTES.items()} for _ in names]
        kind = random.choice(list(ATTRIBUTES))
        answer = values[self.hops - 1][kind]
        documents = [described(*person, random) for person in zip(names, values, partners, strict=True)]
        shuffled = self.shuffled(documents, random)
        context = "\n\n".join(f"Document {place}:\n{text}" for place, text in enumerate(shuffled, 1))
        if self.hops == 1:
            who = names[0]
        else:
            who = f"the partner of {names[0]}"
        question = QUESTION.format(context=context, question=QUESTIONS[kind].format(who=who))
        meta = {"documents": shuffled, "kind": kind, "who": names[0], "source": "made-up people"}
        return TaskText(question, PREFIX, f" {answer}", (answer,), meta)

    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        return question_scores(sample, answer)

    def chance(self) -> float:
        return 1 / VALUES


def described(name: str, values: dict[str, str], partner: str, random: Random) -> str:
    """Return a person's document, with its sentences in random order."""
    sentences = [SENTENCES[kind].format(name=name, value=value) for kind, value in values.items()]
    sentences.append(f"The partner of {name} is {partner}.")
    random.shuffle(sentences)
    return " ".join(sentences)


def people(random: Random, count: int) -> list[str]:
    """Return `count` distinct random names, each with a first and a last name."""
    names: dict[str, None] = {}
    while len(names) < count:
        parts = [_syllables(random) for _ in range(2)]
        names[" ".join(part.capitalize() for part in parts)] = None
    return list(names)


def _syllables(random: Random) -> str:
    return "".join(random.choice(ONSETS) + random.choice(VOWELS) for _ in range(2)) + random.choice(ENDS)
