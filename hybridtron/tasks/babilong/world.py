"""The world of bAbI: who is where, who holds what, what of it a reader knows; in the released set's words.

The start is drawn uniformly and not shown: a reader knows where somebody is once a statement says it. Statements are
valid: a person moves to another place, takes what lies where the person is, drops or gives what is held, and gives to
somebody at the same place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

PEOPLE = ("John", "Mary", "Sandra", "Daniel")
PLACES = ("bedroom", "kitchen", "garden", "hallway", "bathroom", "office")
OBJECTS = ("apple", "football", "milk")
MOVE = ("moved to", "went to", "journeyed to", "travelled to", "went back to")
GET = ("got", "took", "grabbed", "picked up")
DROP = ("dropped", "put down", "left", "discarded")
GIVE = ("gave", "passed", "handed")


@dataclass(frozen=True)
class Handling:
    """One way in which an object could change hands now; `receiver` only where it is given."""

    kind: str
    person: str
    object: str
    receiver: str = ""


@dataclass
class World:
    """The true state, and what was said.

    where    of each person; known: the same, for those of whom it was said
    holder   of each held object; lies: the place of each that is not held
    trail    the known places of each object since its place is known, without repeats in a row
    handled  people who had something to do with an object
    """

    random: Random
    people: tuple[str, ...] = PEOPLE
    places: tuple[str, ...] = PLACES
    where: dict[str, str] = field(init=False)
    lies: dict[str, str] = field(init=False)
    known: dict[str, str] = field(default_factory=dict)
    holder: dict[str, str] = field(default_factory=dict)
    trail: dict[str, list[str]] = field(default_factory=dict)
    handled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.where = {person: self.random.choice(self.places) for person in self.people}
        self.lies = {one: self.random.choice(self.places) for one in OBJECTS}

    def held_by(self, person: str) -> list[str]:
        """In the order in which they came into the person's hands."""
        return [one for one, holder in self.holder.items() if holder == person]

    def another_place(self, than: str) -> str:
        return self.random.choice([place for place in self.places if place != than])

    def move(self) -> str:
        person = self.random.choice(self.people)
        place = self.another_place(self.where[person])
        self.where[person] = self.known[person] = place
        for one in self.held_by(person):
            self._seen(one, person)
        return f"{person} {self.random.choice(MOVE)} the {place}."

    def handlings(self, kinds: tuple[str, ...]) -> list[Handling]:
        """All that are valid now."""
        found = [
            Handling("get", person, one)
            for one, place in self.lies.items()
            for person in self.people
            if self.where[person] == place
        ]
        for one, holder in self.holder.items():
            found.append(Handling("drop", holder, one))
            here = [other for other in self.people if other != holder and self.where[other] == self.where[holder]]
            found += [Handling("give", holder, one, other) for other in here]
        return [handling for handling in found if handling.kind in kinds]

    def do(self, handling: Handling) -> str:
        """Change the state, and say so."""
        person, one = handling.person, handling.object
        self.lies.pop(one, None)
        self.holder.pop(one, None)
        for involved in (person, handling.receiver):
            self.handled += [involved] if involved and involved not in self.handled else []
        there = self.random.choice(("", " there"))
        if handling.kind == "give":
            self.holder[one] = handling.receiver
            self._seen(one, handling.receiver)
            return f"{person} {self.random.choice(GIVE)} the {one} to {handling.receiver}."
        if handling.kind == "get":
            self.holder[one] = person
            self._seen(one, person)
            return f"{person} {self.random.choice(GET)} the {one}{there}."
        self.lies[one] = self.where[person]
        return f"{person} {self.random.choice(DROP)} the {one}{there}."

    def _seen(self, one: str, person: str) -> None:
        """An object is where its holder is; its trail is lost where that is not known."""
        if person not in self.known:
            self.trail[one] = []
        elif self.trail.setdefault(one, [])[-1:] != [self.known[person]]:
            self.trail[one].append(self.known[person])
