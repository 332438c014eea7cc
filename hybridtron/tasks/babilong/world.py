"""A simulation of bAbI's world: people and objects at places, and the facts that statements have revealed.

The initial state is drawn uniformly, and no statement shows it. So a model that reads the story knows a person's place
only after a statement about this person. Only valid actions occur:

    a person moves to another place
    a person gets an object that lies at the person's place
    a person drops an object that the person holds
    a person gives an object that the person holds to another person at the same place

The statements' wording follows the released data set.
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
    """A possible action on an object: get, drop or give. `receiver` is set only for give."""

    kind: str
    person: str
    object: str
    receiver: str = ""


@dataclass
class World:
    """The world's true state, and the part of it that statements have revealed.

    where    person -> true place
    lies     object that no person holds -> true place
    known    person -> place, for people whose place a statement has revealed
    holder   object that a person holds -> this person
    trail    object -> its known places, oldest first; the list is emptied when the object's place becomes unknown
    handled  people who took part in an action on an object (get, drop or give)
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
        self.lies = {item: self.random.choice(self.places) for item in OBJECTS}

    def held_by(self, person: str) -> list[str]:
        """Return the objects held by a person, in the order in which the person got them."""
        return [item for item, holder in self.holder.items() if holder == person]

    def another_place(self, than: str) -> str:
        """Return a random place other than `than`."""
        return self.random.choice([place for place in self.places if place != than])

    def move(self) -> str:
        """Move a random person to another place, and return the statement."""
        person = self.random.choice(self.people)
        place = self.another_place(self.where[person])
        self.where[person] = self.known[person] = place
        for item in self.held_by(person):
            self._seen(item, person)
        return f"{person} {self.random.choice(MOVE)} the {place}."

    def handlings(self, kinds: tuple[str, ...]) -> list[Handling]:
        """Return all valid actions of these kinds (get, drop, give)."""
        handlings = [
            Handling("get", person, item)
            for item, place in self.lies.items()
            for person in self.people
            if self.where[person] == place
        ]
        for item, holder in self.holder.items():
            handlings.append(Handling("drop", holder, item))
            receivers = [other for other in self.people if other != holder and self.where[other] == self.where[holder]]
            handlings += [Handling("give", holder, item, other) for other in receivers]
        return [handling for handling in handlings if handling.kind in kinds]

    def do(self, handling: Handling) -> str:
        """Carry out an action, and return the statement."""
        person = handling.person
        item = handling.object
        self.lies.pop(item, None)
        self.holder.pop(item, None)
        for involved in (person, handling.receiver):
            self.handled += [involved] if involved and involved not in self.handled else []
        suffix = self.random.choice(("", " there"))
        if handling.kind == "give":
            self.holder[item] = handling.receiver
            self._seen(item, handling.receiver)
            return f"{person} {self.random.choice(GIVE)} the {item} to {handling.receiver}."
        if handling.kind == "get":
            self.holder[item] = person
            self._seen(item, person)
            return f"{person} {self.random.choice(GET)} the {item}{suffix}."
        self.lies[item] = self.where[person]
        return f"{person} {self.random.choice(DROP)} the {item}{suffix}."

    def _seen(self, item: str, person: str) -> None:
        """Append the place of `person`, who holds the object, to the object's trail.

        If this place is not known, the trail is cleared.
        """
        if person not in self.known:
            self.trail[item] = []
        elif self.trail.setdefault(item, [])[-1:] != [self.known[person]]:
            self.trail[item].append(self.known[person])
