"""A simulation of bAbI's world: where people and objects are, and how much of this the statements have revealed.

The initial state is drawn uniformly and not shown, so a reader knows a person's place only after a statement about it.
All actions are valid: people move to another place, take objects that lie where they are, drop or give objects that
they hold, and give them to people at the same place. The wording follows the released data set.
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
    """The world's true state, and the part that statements have revealed.

    where    each person's true place
    lies     each object's place, unless it is held
    known    each person's place, if a statement has revealed it
    holder   each held object's holder
    trail    each object's successive known places, oldest first; emptied when its place becomes unknown
    handled  people who took part in a get, drop or give
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
        """List the objects that a person holds, oldest first."""
        return [item for item, holder in self.holder.items() if holder == person]

    def another_place(self, than: str) -> str:
        """Draw a place other than the given one."""
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
        """List the valid actions of these kinds."""
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

    def _seen(self, one: str, person: str) -> None:
        """Extend an object's trail by its holder's place; the trail is cleared if that place is not known."""
        if person not in self.known:
            self.trail[one] = []
        elif self.trail.setdefault(one, [])[-1:] != [self.known[person]]:
            self.trail[one].append(self.known[person])
