"""The stories of bAbI's tasks 1 to 10: statements, and a question after some of them.

The rules are those of the public task definitions; where they leave a choice, it is uniform. A story of several
questions gives a sample for each: the statements before the question, without earlier questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from hybridtron.tasks.babilong.world import PLACES, Handling, World

QUESTIONS = 5  # of a story, but for task 4


@dataclass(frozen=True)
class Asked:
    """A question after the first `facts` statements, its answer, and what a sentence with the answer needs."""

    facts: int
    question: str
    answer: str
    about: tuple[str, ...] = ()


@dataclass(frozen=True)
class Story:
    """Statements and questions."""

    facts: list[str]
    asked: list[Asked]


Steps = Iterator[str | Asked]


def story_of(steps: Steps) -> Story:
    """A story of the statements and questions as they come, up to its last question."""
    facts: list[str] = []
    asked: list[Asked] = []
    for step in steps:
        if isinstance(step, str):
            facts.append(step)
        else:
            asked.append(Asked(len(facts), step.question, step.answer, step.about))
            if len(asked) == QUESTIONS:
                break
    return Story(facts, asked)


def qa1(random: Random) -> Steps:
    """Two moves, then where somebody is."""
    world = World(random)
    while True:
        yield world.move()
        yield world.move()
        person = random.choice(sorted(world.known))
        yield Asked(0, f"Where is {person}?", world.known[person], (person,))


def _stream(world: World, *kinds: tuple[str, ...]) -> Steps:
    """Each statement of a kind that is drawn first: a handling, or a move; a move where none is valid."""
    while True:
        chosen = world.random.choice((*kinds, ()))
        valid = world.handlings(chosen)
        yield world.do(world.random.choice(valid)) if valid else world.move()


def _moving_objects(random: Random, ask: Callable[[World], Asked | None]) -> Steps:
    """Objects are carried around; a question follows with probability 1/2 where 3 statements came since the last."""
    world, since = World(random), 0
    for statement in _stream(world, ("get", "drop"), ("get", "drop")):
        yield statement
        since += 1
        if since >= 3 and random.random() < 0.5 and (asked := ask(world)):
            yield asked
            since = 0


def qa2(random: Random) -> Steps:
    """Where an object is that somebody holds whose place is known."""

    def ask(world: World) -> Asked | None:
        known = sorted(one for one, holder in world.holder.items() if holder in world.known)
        one = random.choice(known) if known else ""
        return Asked(0, f"Where is the {one}?", world.known[world.holder[one]], (one,)) if known else None

    return _moving_objects(random, ask)


def qa3(random: Random) -> Steps:
    """Where an object was before the place where it is."""

    def ask(world: World) -> Asked | None:
        known = sorted(one for one, trail in world.trail.items() if len(trail) >= 2)
        if not known:
            return None
        one = random.choice(known)
        before, now = world.trail[one][-2:]
        return Asked(0, f"Where was the {one} before the {now}?", before, (now, one))

    return _moving_objects(random, ask)


def qa4(random: Random) -> Steps:
    """Two facts about three places on a line; what is on one side of the middle one."""
    first, second = random.choice((("north", "south"), ("east", "west")))
    a, b, c = random.sample(PLACES, 3)  # a is `first` of b, b is `first` of c
    pairs = random.sample(((a, b), (b, c)), 2)
    yield from (
        f"The {x} is {first} of the {y}." if random.random() < 0.5 else f"The {y} is {second} of the {x}."
        for x, y in pairs
    )
    side = random.choice((first, second))
    ahead, behind = (a, c) if side == first else (c, a)
    if random.random() < 0.5:
        yield Asked(0, f"What is {side} of the {b}?", ahead)
    else:
        yield Asked(0, f"What is the {b} {side} of?", behind)


GIVING = (  # question, answer, share in the released set
    ("What did {a} give to {b}?", "object", 0.33),
    ("Who gave the {o}?", "person", 0.18),
    ("Who did {a} give the {o} to?", "receiver", 0.17),
    ("Who gave the {o} to {b}?", "person", 0.17),
    ("Who received the {o}?", "receiver", 0.15),
)


def qa5(random: Random) -> Steps:
    """Who gave what to whom, with up to 5 statements in between that don't concern it."""
    world, since = World(random, ("Fred", "Jeff", "Bill", "Mary")), 0
    while True:
        kind = random.choice(("get", "give", "move"))
        valid = world.handlings((kind,))
        chosen = random.choice(valid) if valid else None
        yield world.do(chosen) if chosen else world.move()
        since += 1
        if chosen is None or kind != "give" or since < 2:
            continue
        for _ in range(random.randint(0, 5)):
            valid = [one for one in world.handlings((random.choice(("get", "give", "move")),)) if _apart(one, chosen)]
            yield world.do(random.choice(valid)) if valid else world.move()
        form, wanted, _ = random.choices(GIVING, [share for *_, share in GIVING])[0]
        question = form.format(a=chosen.person, b=chosen.receiver, o=chosen.object)
        yield Asked(0, question, getattr(chosen, wanted))
        since = 0


def _apart(one: Handling, given: Handling) -> bool:
    """Whether it concerns neither the object nor the same giver and receiver."""
    same_pair = (one.person, one.receiver) == (given.person, given.receiver)
    return one.object != given.object and not same_pair


def qa6(random: Random) -> Steps:
    """Two moves, then whether somebody is at a place; yes and no are equally likely."""
    world = World(random)
    while True:
        yield world.move()
        yield world.move()
        person = random.choice(sorted(world.known))
        yield _yes_or_no(world, person, world.known[person])


def _yes_or_no(world: World, person: str, place: str) -> Asked:
    if world.random.random() < 0.5:
        return Asked(0, f"Is {person} in the {place}?", "yes")
    return Asked(0, f"Is {person} in the {world.another_place(place)}?", "no")


def _carrying(random: Random, question: str, answer: Callable[[list[str]], str]) -> Steps:
    """What somebody carries: after the first handling, and then after every 2 statements."""
    world, since = World(random), 0
    for statement in _stream(world, ("get", "drop"), ("give",)):
        yield statement
        since += 1
        if since >= 2 and world.handled:
            person = random.choice(sorted(world.handled))
            yield Asked(0, question.format(person), answer(world.held_by(person)))
            since = 0


def qa7(random: Random) -> Steps:
    """How many objects somebody carries."""
    numbers = ("none", "one", "two", "three")
    return _carrying(random, "How many objects is {} carrying?", lambda held: numbers[len(held)])


def qa8(random: Random) -> Steps:
    """What somebody carries."""
    return _carrying(random, "What is {} carrying?", lambda held: ",".join(held) or "nothing")


def qa9(random: Random) -> Steps:
    """Two statements, of which some say where somebody is not; then whether somebody is at a place."""
    world, said = World(random), {}
    before: dict[str, str] = {}
    while True:
        for _ in range(2):
            kind = random.choice(("move", "is", "not"))
            if kind == "move":
                was = dict(world.where)
                yield world.move()
                (person,) = (one for one in was if was[one] != world.where[one])
                before[person] = was[person]
                said[person] = (True, world.where[person])
                continue
            person = random.choice(world.people)
            place = world.where[person] if kind == "is" else world.another_place(world.where[person])
            no_longer = kind == "not" and place == before.get(person)
            said[person] = (kind == "is", place)
            yield f"{person} is {'' if kind == 'is' else 'no longer ' if no_longer else 'not '}in the {place}."
        person = random.choice(sorted(said))
        positive, place = said[person]
        yield _yes_or_no(world, person, place) if positive else Asked(0, f"Is {person} in the {place}?", "no")


def qa10(random: Random) -> Steps:
    """Two statements, of which some leave two places open; then whether somebody is at a place: yes, no or maybe.

    The answer is drawn first; where no person allows it, the second statement makes it possible.
    """
    world = World(
        random, ("Bill", "Fred", "Julie", "Mary"), ("kitchen", "bedroom", "office", "school", "park", "cinema")
    )
    said: dict[str, tuple[str, ...]] = {}
    while True:
        answer = random.choice(("yes", "no", "maybe"))
        yield _perhaps(world, said, random.choice(("move", "is", "either")))
        wanted = {"yes": 1, "maybe": 2}.get(answer)  # places that the last statement about a person leaves
        possible = wanted is None or any(len(places) == wanted for places in said.values())
        kinds = ("move", "is", "either") if possible else ("move", "is") if wanted == 1 else ("either",)
        yield _perhaps(world, said, random.choice(kinds))
        suited = sorted(person for person, places in said.items() if wanted in (None, len(places)))
        if not suited:  # the second statement was about the only person who suited
            person = random.choice(sorted(said))
            answer = {1: "yes", 2: "maybe"}[len(said[person])]
        else:
            person = random.choice(suited)
        others = [place for place in world.places if place not in said[person]]
        yield Asked(0, f"Is {person} in the {random.choice(others if answer == 'no' else said[person])}?", answer)


def _perhaps(world: World, said: dict[str, tuple[str, ...]], kind: str) -> str:
    """A statement of a kind, and the places that it leaves."""
    if kind == "move":
        was = dict(world.where)
        statement = world.move()
        (person,) = (one for one in was if was[one] != world.where[one])
        said[person] = (world.where[person],)
        return statement
    person = world.random.choice(world.people)
    place = world.where[person]
    if kind == "is":
        said[person] = (place,)
        return f"{person} is in the {place}."
    places = world.random.sample((place, world.another_place(place)), 2)
    said[person] = tuple(places)
    return f"{person} is either in the {places[0]} or the {places[1]}."


STORIES: dict[str, Callable[[Random], Steps]] = {
    "qa1": qa1,
    "qa2": qa2,
    "qa3": qa3,
    "qa4": qa4,
    "qa5": qa5,
    "qa6": qa6,
    "qa7": qa7,
    "qa8": qa8,
    "qa9": qa9,
    "qa10": qa10,
}
