"""Solvers that read a prompt and answer it, as a reader would: they know neither generator nor draws."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from tests.tasks.names import NEEDLES

Solver = Callable[[str], str]


def passkey(prompt: str) -> str:
    return re.findall(r"The pass key is (\d+)\.", prompt)[0] + "."


def needle(prompt: str) -> str:
    """Return all values of the keys that the question names."""
    question = prompt.rsplit("special magic", 1)[1]
    facts = re.findall(r"One of the special magic \w+ for (.+?) is: (\S+)\.", prompt)
    return ", ".join(value for key, value in facts if re.search(rf" {re.escape(key)}[ ,]", question))


def variables(prompt: str) -> str:
    """Follows the chain that starts with the value in the last question."""
    text = prompt[prompt.rindex("Memorize and track") :]
    (value,) = set(re.findall(r"assigned the value (\d+)", text))
    (first,) = re.findall(rf"VAR (\w+) = {value}$", text, re.MULTILINE)
    chain = [first]
    for name, before in re.findall(r"VAR (\w+) = VAR (\w+)", text):
        chain += [name] if before == chain[-1] else []
    return " ".join(chain)


def common_words(prompt: str) -> str:
    words = re.findall(r"\d+\. (\S+)", prompt[prompt.rindex("Below is") :])
    return " ".join(word for word, _ in Counter(words).most_common(10))


def coded_words(prompt: str) -> str:
    text = prompt.split("coded words. ")[1].split("\nQuestion")[0].split(" ")
    return " ".join([word for word, _ in Counter(text).most_common() if word != "..."][:3])


READ = {  # where the answers stand in the documents of golden/
    "How far does the tide": r"rises (\w+ \w+) twice",
    "What do boats": r"have (\w+ \w+), so",
    "For how long was": r"fired for (\w+ \w+)",
    "What did potters": r"threw (\w+) into",
    "In which country": r"born in (\w+)",
    "Which river does": r"spans the river (\w+)",
    "How many inns": r"and (\w+) inns",
}
ATTRIBUTES = {
    "work as": "{} works as a ",
    "Which city": "{} lives in ",
    "Which instrument": "{} plays the ",
    "animal": "animal of {} is the ",
    "dish": "dish of {} is ",
    "colour": "colour of {} is ",
}


def question(prompt: str) -> str:
    asked = prompt.rsplit("Question: ", 1)[1]
    (pattern,) = (pattern for start, pattern in READ.items() if asked.startswith(start))
    return re.findall(pattern, prompt)[0]


def synthetic_question(prompt: str) -> str:
    asked = prompt.rsplit("Question: ", 1)[1]
    who = re.findall(r"[A-Z]\w+ [A-Z]\w+", asked)[0].removeprefix("What ")
    if "partner" in asked:
        who = re.findall(rf"The partner of {who} is ([A-Z]\w+ [A-Z]\w+)", prompt)[0]
    (form,) = (form for word, form in ATTRIBUTES.items() if word in asked)
    return re.findall(form.format(who) + r"(\w+)\.", prompt)[0]


PERSON = r"(?P<person>John|Mary|Sandra|Daniel|Fred|Jeff|Bill|Julie)"
FACT = re.compile(
    rf"{PERSON} (?:"
    r"(?:moved|went|journeyed|travelled|went back) to the (?P<place>\w+)"
    r"|(?:got|took|grabbed|picked up) the (?P<got>\w+)(?: there)?"
    r"|(?:dropped|put down|left|discarded) the (?P<dropped>\w+)(?: there)?"
    r"|(?:gave|passed|handed) the (?P<given>\w+) to (?P<receiver>\w+)"
    r"|is (?P<negation>not |no longer )?in the (?P<at>\w+)"
    r"|is either in the (?P<one>\w+) or the (?P<other>\w+)"
    r")\."
)


class Reader:
    """Knowledge after the facts of a story."""

    def __init__(self, text: str) -> None:
        self.place: dict[str, str] = {}
        self.holder: dict[str, str] = {}
        self.trail: dict[str, list[str]] = {}
        self.gifts: list[tuple[str, str, str]] = []
        self.last: dict[str, tuple[bool, set[str]]] = {}  # whether positive, and the places of the last statement
        for fact in FACT.finditer(text):
            self._read({name: value for name, value in fact.groupdict().items() if value})

    def _read(self, fact: dict[str, str]) -> None:
        person = fact["person"]
        if "place" in fact:
            self.place[person] = fact["place"]
            self.last[person] = (True, {fact["place"]})
        elif "at" in fact:
            self.last[person] = ("negation" not in fact, {fact["at"]})
        elif "one" in fact:
            self.last[person] = (True, {fact["one"], fact["other"]})
        elif "got" in fact:
            self.holder[fact["got"]] = person
            if person not in self.place:
                self.trail[fact["got"]] = []
        elif "given" in fact:
            self.holder[fact["given"]] = fact["receiver"]
            self.gifts.append((person, fact["given"], fact["receiver"]))
        else:
            self.holder.pop(fact["dropped"], None)
        for thing, holder in self.holder.items():
            trail = self.trail.setdefault(thing, [])
            if holder in self.place and trail[-1:] != [self.place[holder]]:
                trail.append(self.place[holder])


def babilong(prompt: str) -> str:
    """The bare answer to the question after the context."""
    text, question = prompt.split("<context>\n")[1].split("\n</context>\n\nQuestion: ")
    reader = Reader(text)
    words = re.findall(r"\w+", question)
    if words[0] == "Where" and words[1] == "was":
        trail = reader.trail[words[3]]
        assert trail[-1] == words[-1]
        return trail[-2]
    if words[0] == "Where":
        return reader.place.get(words[-1]) or reader.place[reader.holder[words[-1]]]
    if "of" in words:
        return beside(text, words)
    if "carrying" in words:
        held = [thing for thing, holder in reader.holder.items() if holder == words[-2]]
        if words[0] == "How":
            return ["none", "one", "two", "three"][len(held)]
        return ",".join(held) or "nothing"
    if words[0] == "Is":
        positive, places = reader.last[words[1]]
        known = words[-1] in places
        if not (known and positive):
            return "no"
        if len(places) == 1:
            return "yes"
        return "maybe"
    return gift(reader, question)


def beside(text: str, words: list[str]) -> str:
    """Name a neighbour, by facts in either direction.

    It is `X` in `The X is north of the hall`, or `Y` in `The hall is north of the Y`.
    """
    opposite = {"north": "south", "south": "north", "east": "west", "west": "east"}
    facts = re.findall(r"The (\w+) is (\w+) of the (\w+)\.", text)
    facts += [(y, opposite[side], x) for x, side, y in facts]
    if words[2] == "the":
        return next(y for x, side, y in facts if (x, side) == (words[3], words[4]))
    return next(x for x, side, y in facts if (side, y) == (words[2], words[5]))


def gift(reader: Reader, question: str) -> str:
    """The last gift that fits the question."""
    forms = (
        (r"What did (?P<giver>\w+) give to (?P<receiver>\w+)\?", "thing"),
        (r"Who gave the (?P<thing>\w+)\?", "giver"),
        (r"Who did (?P<giver>\w+) give the (?P<thing>\w+) to\?", "receiver"),
        (r"Who gave the (?P<thing>\w+) to (?P<receiver>\w+)\?", "giver"),
        (r"Who received the (?P<thing>\w+)\?", "receiver"),
    )
    for form, wanted in forms:
        if asked := re.fullmatch(form, question):
            gifts = [dict(zip(("giver", "thing", "receiver"), one, strict=True)) for one in reader.gifts]
            return [one for one in gifts if asked.groupdict().items() <= one.items()][-1][wanted]
    raise AssertionError(question)


SOLVERS: dict[str, Solver] = {
    "passkey": passkey,
    "needle": needle,
    "vt": variables,
    "cwe": common_words,
    "fwe": coded_words,
    "qa_1": question,
    "qa_2": question,
    "qa_synth_1": synthetic_question,
    "qa_synth_2": synthetic_question,
} | {f"niah_{name}": needle for name in NEEDLES}
SOLVERS |= {f"babilong_qa{number}": babilong for number in range(1, 11)}
