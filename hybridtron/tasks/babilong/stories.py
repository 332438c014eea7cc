"""The stories in bAbI's tasks 1 to 10: statements, and questions after some statements.

The rules follow the public task definitions. Where the definitions leave a choice, it is drawn uniformly. A sample is
one question from a story with all statements before the question; earlier questions are left out. `hybridtron tasks
list` prints the first sentence from each story's docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from hybridtron.tasks.babilong.world import PLACES, Handling, World

QUESTIONS = 5  # questions per story; task 4 has a single question


@dataclass(frozen=True)
class Asked:
    """A question after the first `facts` statements in a story, and its answer.

    `about` are the people, objects or places that the answer template in `prompts.Prompt` names. The story generators
    leave `facts` at 0; `story_of` sets it.
    """

    facts: int
    question: str
    answer: str
    about: tuple[str, ...] = ()


@dataclass(frozen=True)
class Story:
    """A story: its statements, and questions about them."""

    facts: list[str]
    asked: list[Asked]


Steps = Iterator[str | Asked]


def story_of(steps: Steps) -> Story:
    """Return a story with a generator's statements and questions, up to QUESTIONS questions."""
    facts: list[str] = []
    questions: list[Asked] = []
    for step in steps:
        if isinstance(step, str):
            facts.append(step)
        else:
            questions.append(Asked(len(facts), step.question, step.answer, step.about))
            if len(questions) == QUESTIONS:
                break
    return Story(facts, questions)


def qa1(random: Random) -> Steps:
    """A person's location, asked after every two moves."""
    world = World(random)
    while True:
        yield world.move()
        yield world.move()
        person = random.choice(sorted(world.known))
        yield Asked(0, f"Where is {person}?", world.known[person], (person,))


def _stream(world: World, *kinds: tuple[str, ...]) -> Steps:
    """Yield random statements without end.

    For each statement, a move or one of the tuples in `kinds` is drawn with equal probability. If a tuple is drawn, the
    statement is a random valid action of the tuple's kinds (get, drop, give), or a move if no such action is valid.
    """
    while True:
        chosen = world.random.choice((*kinds, ()))
        handlings = world.handlings(chosen)
        yield world.do(world.random.choice(handlings)) if handlings else world.move()


def _moving_objects(random: Random, ask: Callable[[World], Asked | None]) -> Steps:
    """Yield a story about objects that people get, carry and drop.

    After a question, at least 3 statements come before the next question. From the third statement on, a question
    follows each statement with probability 1/2, unless `ask` returns None because no question is possible.
    """
    world = World(random)
    since_question = 0
    for statement in _stream(world, ("get", "drop"), ("get", "drop")):
        yield statement
        since_question += 1
        if since_question >= 3 and random.random() < 0.5 and (asked := ask(world)):
            yield asked
            since_question = 0


def qa2(random: Random) -> Steps:
    """The location of an object held by a person whose location is known."""

    def ask(world: World) -> Asked | None:
        known_items = sorted(item for item, holder in world.holder.items() if holder in world.known)
        item = random.choice(known_items) if known_items else ""
        if known_items:
            return Asked(0, f"Where is the {item}?", world.known[world.holder[item]], (item,))
        return None

    return _moving_objects(random, ask)


def qa3(random: Random) -> Steps:
    """The location of an object before its last known location."""

    def ask(world: World) -> Asked | None:
        known_items = sorted(item for item, trail in world.trail.items() if len(trail) >= 2)
        if not known_items:
            return None
        item = random.choice(known_items)
        before, now = world.trail[item][-2:]
        return Asked(0, f"Where was the {item} before the {now}?", before, (now, item))

    return _moving_objects(random, ask)


def qa4(random: Random) -> Steps:
    """Given two facts about three places on a line, the place on one side of the middle place."""
    first, second = random.choice((("north", "south"), ("east", "west")))
    a, b, c = random.sample(PLACES, 3)  # a is `first` of b, b is `first` of c
    pairs = random.sample(((a, b), (b, c)), 2)
    yield from (
        f"The {place} is {first} of the {other_place}."
        if random.random() < 0.5
        else f"The {other_place} is {second} of the {place}."
        for place, other_place in pairs
    )
    side = random.choice((first, second))
    ahead, behind = (a, c) if side == first else (c, a)
    if random.random() < 0.5:
        yield Asked(0, f"What is {side} of the {b}?", ahead)
    else:
        yield Asked(0, f"What is the {b} {side} of?", behind)


GIVING = (  # question, field of Handling with the answer, relative frequency in the released data set
    ("What did {a} give to {b}?", "object", 0.33),
    ("Who gave the {o}?", "person", 0.18),
    ("Who did {a} give the {o} to?", "receiver", 0.17),
    ("Who gave the {o} to {b}?", "person", 0.17),
    ("Who received the {o}?", "receiver", 0.15),
)


def qa5(random: Random) -> Steps:
    """Giver, receiver or object of a handover, with up to 5 unrelated statements after it."""
    world = World(random, ("Fred", "Jeff", "Bill", "Mary"))
    since_question = 0
    while True:
        kind = random.choice(("get", "give", "move"))
        valid = world.handlings((kind,))
        chosen = random.choice(valid) if valid else None
        yield world.do(chosen) if chosen else world.move()
        since_question += 1
        if chosen is None or kind != "give" or since_question < 2:
            continue
        for _ in range(random.randint(0, 5)):
            valid = [
                handling
                for handling in world.handlings((random.choice(("get", "give", "move")),))
                if _apart(handling, chosen)
            ]
            yield world.do(random.choice(valid)) if valid else world.move()
        template, role, _ = random.choices(GIVING, [share for *_, share in GIVING])[0]
        question = template.format(a=chosen.person, b=chosen.receiver, o=chosen.object)
        yield Asked(0, question, getattr(chosen, role))
        since_question = 0


def _apart(handling: Handling, gift: Handling) -> bool:
    """Return True if an action involves neither the object in `gift` nor its pair of giver and receiver."""
    same_pair = (handling.person, handling.receiver) == (gift.person, gift.receiver)
    return handling.object != gift.object and not same_pair


def qa6(random: Random) -> Steps:
    """A yes-or-no question about a person's location, asked after every two moves."""
    world = World(random)
    while True:
        yield world.move()
        yield world.move()
        person = random.choice(sorted(world.known))
        yield _yes_or_no(world, person, world.known[person])


def _yes_or_no(world: World, person: str, place: str) -> Asked:
    """Return a question that names the person's place (answer yes) or another place (no), with equal probabilities."""
    if world.random.random() < 0.5:
        return Asked(0, f"Is {person} in the {place}?", "yes")
    return Asked(0, f"Is {person} in the {world.another_place(place)}?", "no")


def _carrying(random: Random, question: str, answer: Callable[[list[str]], str]) -> Steps:
    """Yield a story with questions about the objects that a person carries.

    The first question comes as soon as there are 2 statements and an action on an object. Each later question comes
    after 2 more statements.
    """
    world = World(random)
    since_question = 0
    for statement in _stream(world, ("get", "drop"), ("give",)):
        yield statement
        since_question += 1
        if since_question >= 2 and world.handled:
            person = random.choice(sorted(world.handled))
            yield Asked(0, question.format(person), answer(world.held_by(person)))
            since_question = 0


def qa7(random: Random) -> Steps:
    """The number of objects that a person carries."""
    numbers = ("none", "one", "two", "three")
    return _carrying(random, "How many objects is {} carrying?", lambda held: numbers[len(held)])


def qa8(random: Random) -> Steps:
    """The objects that a person carries."""
    return _carrying(random, "What is {} carrying?", lambda held: ",".join(held) or "nothing")


def qa9(random: Random) -> Steps:
    """A yes-or-no question about a person's location, where some statements are negated."""
    world = World(random)
    last_said = {}
    former_place: dict[str, str] = {}
    while True:
        for _ in range(2):
            kind = random.choice(("move", "is", "not"))
            if kind == "move":
                places_before = dict(world.where)
                yield world.move()
                (person,) = (
                    candidate for candidate in places_before if places_before[candidate] != world.where[candidate]
                )
                former_place[person] = places_before[person]
                last_said[person] = (True, world.where[person])
                continue
            person = random.choice(world.people)
            if kind == "is":
                place = world.where[person]
            else:
                place = world.another_place(world.where[person])
            no_longer = kind == "not" and place == former_place.get(person)
            last_said[person] = (kind == "is", place)
            yield f"{person} is {'' if kind == 'is' else 'no longer ' if no_longer else 'not '}in the {place}."
        person = random.choice(sorted(last_said))
        positive, place = last_said[person]
        yield _yes_or_no(world, person, place) if positive else Asked(0, f"Is {person} in the {place}?", "no")


def qa10(random: Random) -> Steps:
    """A question about a person's location, with answer yes, no or maybe; some statements name two possible places.

    A question follows every two statements. The answer is drawn before the statements. If no person's last statement
    allows this answer after the first statement, the second statement is drawn so that it allows the answer.
    """
    world = World(
        random, ("Bill", "Fred", "Julie", "Mary"), ("kitchen", "bedroom", "office", "school", "park", "cinema")
    )
    said: dict[str, tuple[str, ...]] = {}
    while True:
        answer = random.choice(("yes", "no", "maybe"))
        yield _perhaps(world, said, random.choice(("move", "is", "either")))
        # the number of places that the last statement about the person must leave possible; None: any number
        num_places = {"yes": 1, "maybe": 2}.get(answer)
        possible = num_places is None or any(len(places) == num_places for places in said.values())
        if possible:
            kinds = ("move", "is", "either")
        elif num_places == 1:
            kinds = ("move", "is")
        else:
            kinds = ("either",)
        yield _perhaps(world, said, random.choice(kinds))
        suited_people = sorted(person for person, places in said.items() if num_places in (None, len(places)))
        if not suited_people:  # the second statement was about the only person for whom the answer was possible
            person = random.choice(sorted(said))
            answer = {1: "yes", 2: "maybe"}[len(said[person])]
        else:
            person = random.choice(suited_people)
        others = [place for place in world.places if place not in said[person]]
        yield Asked(0, f"Is {person} in the {random.choice(others if answer == 'no' else said[person])}?", answer)


def _perhaps(world: World, said: dict[str, tuple[str, ...]], kind: str) -> str:
    """Return a statement of a kind (move, is or either) about a random person.

    The places that the statement leaves possible for the person are recorded in `said`.
    """
    if kind == "move":
        places_before = dict(world.where)
        statement = world.move()
        (person,) = (candidate for candidate in places_before if places_before[candidate] != world.where[candidate])
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
