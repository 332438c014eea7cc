"""Tasks on token ids: a reader that sees earlier tokens alone predicts all targets, and a random guess gives chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import pytest

from hybridtron.problems import Code
from hybridtron.tasks import TASKS
from hybridtron.tasks.base import IGNORED, Sample, TaskError, TokenTask
from hybridtron.tasks.options import named
from hybridtron.tasks.tokens import ByteTokens
from tests.refusals import raises_code

BYTES = ByteTokens()


def copied(seen: Sequence[int]) -> int:
    """The letter after those that are copied already, of the last string."""
    start = max(place for place, token in enumerate(seen) if token == 26)
    row = list(seen[start:])
    if 27 not in row:
        return -1
    letters = row[1 : row.index(27)]
    copy = row[row.index(27) + 1 :]
    return [*letters, 28][len(copy)] if len(copy) <= len(letters) else -1


def looked_up(seen: Sequence[int]) -> int:
    """The value of the last key under the current contexts, as the table had it."""
    if 4 not in seen:
        return -1
    table: dict[tuple[int, ...], int] = {}
    path: list[int] = []
    for token in seen[1 : list(seen).index(4)]:
        if token >= 26:
            path = [*(above for above in path if (above - 26) // 16 > (token - 26) // 16), token]
        else:
            table[tuple(path)] = token
    path = []
    for token in seen[list(seen).index(4) + 1 :]:
        if token >= 26:
            path = [*(above for above in path if (above - 26) // 16 > (token - 26) // 16), token]
    return table.get(tuple(path), -1)


def paired(seen: Sequence[int]) -> int:
    """Return the token that followed the last token among the 4 pairs at the row's start, or -1."""
    return dict(zip(seen[:8:2], seen[1:8:2], strict=False)).get(seen[-1], -1)


READERS: dict[str, tuple[Callable[[Sequence[int]], int], list[str], int, range]] = {
    "copying": (copied, [], 43, range(26)),
    "mqar": (paired, [], 64, range(4096, 8192)),
    "joint_recall": (looked_up, ["sizes=2-4,2-4"], 80, range(10, 26)),
    "multilevel_joint_recall": (looked_up, ["sizes=2-3,2,2-3"], 130, range(10, 26)),
    "associative_recall": (looked_up, ["sizes=4-16"], 80, range(10, 26)),
}


def test_joint_recall_draws_the_first_symbols_only() -> None:
    """Keys, contexts and values are the first 4 of their 16, and all of them are drawn."""
    task = named("joint_recall", ["symbols=4", "sizes=2-4,2-4"])
    rows = [task.sample(0, index, BYTES, 80).tokens for index in range(50)]
    assert {token for row in rows for token in row} == {1, 4, *range(10, 14), *range(26, 30), *range(42, 46)}
    assert task.chance() == 1 / 4


def made(name: str, count: int) -> tuple[TokenTask, list[Sample]]:
    _, options, length, _ = READERS[name]
    task = named(name, options)
    assert isinstance(task, TokenTask)
    return task, [task.sample(3, index, BYTES, length) for index in range(count)]


def test_every_task_on_token_ids_has_a_reader() -> None:
    assert READERS.keys() == {name for name, task in TASKS.items() if not task.text}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_predicts_every_target(name: str) -> None:
    task, samples = made(name, 10)
    for sample in samples:
        predicted = [READERS[name][0](sample.tokens[: place + 1]) for place in range(len(sample.tokens))]
        assert task.score_tokens(sample, predicted) == {"accuracy": 1.0, "exact": 1.0}
        assert set(task.score(sample, sample.answer).values()) == {1.0}
        assert max(sample.tokens) < task.num_tokens


@pytest.mark.parametrize("name", READERS)
def test_empty_answers_score_0_and_guesses_score_chance(name: str) -> None:
    task, samples = made(name, 200)
    random = Random(1)
    right = 0.0
    asked = 0
    for sample in samples:
        assert set(task.score_tokens(sample, [-1] * len(sample.tokens)).values()) == {0.0}
        assert set(task.score(sample, "").values()) == {0.0}
        targets = sum(task.is_scored(target) for target in sample.targets())
        guess = random.choices(READERS[name][3], k=len(sample.tokens))
        right += task.score_tokens(sample, guess)["accuracy"] * targets
        asked += targets
    deviation = math.sqrt(asked * task.chance() * (1 - task.chance()))
    assert abs(right - asked * task.chance()) < 4 * deviation + 0.5


def test_a_wrong_letter_of_four_scores_three_quarters() -> None:
    sample = named("copying").sample(0, 0, BYTES, 11)
    targets = [target if target != IGNORED else 0 for target in sample.targets()]
    targets[5] = (targets[5] + 1) % 26  # $ a b c d | a ...: the first letter of the copy is predicted at place 5
    assert TASKS["copying"].score_tokens(sample, targets) == {"accuracy": 0.75, "exact": 0.0}
    assert TASKS["copying"].score(sample, sample.outputs[0][:3]) == {"accuracy": 0.75, "exact": 0.0}


def test_joint_recall_has_the_length_of_the_paper() -> None:
    """2 n_c (2 n_k + 1) + 2, 1058 for 16 by 16."""
    for contexts, keys in ((16, 16), (5, 9), (1, 1)):
        sample = named("joint_recall", [f"sizes={contexts},{keys}"]).sample(0, 0, BYTES, 1058)
        assert len(sample.tokens) == 2 * contexts * (2 * keys + 1) + 2
        assert sum(sample.mask) == contexts * keys


def test_padding_fills_a_row_and_changes_nothing_else() -> None:
    """PAD is token 3; it is not learned, and generation ends before it."""
    for index in range(20):
        plain, padded = (
            named("joint_recall", ["sizes=1-3,1-3", f"padded={one}"]).sample(0, index, BYTES, 50)
            for one in ("false", "true")
        )
        rest = 50 - len(plain.tokens)
        assert padded.tokens == (*plain.tokens, *(3,) * rest)
        assert padded.mask == (*plain.mask, *(0,) * rest)
        assert padded.targets() == (*plain.targets(), *(IGNORED,) * rest)
        assert (padded.answer, padded.generate, padded.length) == (plain.answer, plain.generate, plain.length)


def test_mqar_prefers_short_gaps() -> None:
    """With one pair, slot i of n is chosen with i^-0.99 / sum of all: the first of 31 with 0.2451."""
    task = named("mqar", ["pairs=1"])
    count = 1500
    expected = 1 / sum(i**-0.99 for i in range(1, 32))
    first = sum(task.sample(0, index, BYTES, 64).mask[2] for index in range(count))
    assert abs(first / count - expected) < 4 * math.sqrt(expected * (1 - expected) / count)


def test_mqar_noise_has_separate_ids() -> None:
    """Pairs and slots hold no noise, the rest nothing else, and rows may be longer than the vocabulary."""
    task = named("mqar", ["vocabulary=16", "noise=3", "follows=true"])
    seen = set[int]()
    assert isinstance(task, TokenTask)
    assert task.num_tokens == 19
    for index in range(20):
        sample = task.sample(0, index, BYTES, 64)
        places = {place + more for place in sample.meta["places"] for more in (0, 1)} | set(range(8))
        assert all((token >= 16) == (place not in places) for place, token in enumerate(sample.tokens))
        seen |= {token for token in sample.tokens if token >= 16}
    assert seen == {16, 17, 18}


def test_copies_are_packed_to_the_length() -> None:
    """The last one is cut and not learned; all before it are."""
    sample = named("copying", ["shortest=10", "longest=20", "packed=true"]).sample(0, 0, BYTES, 220)
    assert len(sample.tokens) == len(sample.mask) == 220
    wholes = [len(string) + 1 for string in sample.meta["strings"][:-1]]
    assert sum(sample.mask) == sum(wholes)


@pytest.mark.parametrize(
    ("name", "options", "length", "code"),
    [
        ("copying", ["longest=30"], 62, "does-not-fit"),
        ("copying", ["shortest=5", "longest=4"], 62, "out-of-range"),
        ("mqar", [], 65, "not-divisible"),
        ("mqar", ["pairs=5"], 18, "does-not-fit"),
        ("mqar", ["vocabulary=64"], 64, "out-of-range"),
        ("mqar", ["power=0.0"], 64, "out-of-range"),
        ("mqar", ["power=nan"], 64, "out-of-range"),
        ("mqar", ["power=inf"], 64, "out-of-range"),
        ("mqar", ["power=400.0"], 4096, "out-of-range"),
        ("mqar", ["power=5e-324"], 64, "out-of-range"),
        ("mqar", ["vocabulary=8", "noise=4"], 64, "out-of-range"),
        ("mqar", ["noise=-1"], 64, "out-of-range"),
        ("mqar", ["noise=4", "random_rest=false"], 64, "needs-other-key"),
        ("joint_recall", [], 1057, "does-not-fit"),
        ("joint_recall", ["sizes=5-17,5"], 2000, "out-of-range"),
        ("joint_recall", ["sizes=2,2,2,2,2"], 2000, "out-of-range"),
        ("joint_recall", ["sizes=2,x"], 2000, "out-of-range"),
        ("joint_recall", ["symbols=17"], 2000, "out-of-range"),
        ("joint_recall", ["symbols=8", "sizes=5-9,5"], 2000, "out-of-range"),
    ],
)
def test_impossible_samples_are_refused(name: str, options: list[str], length: int, code: Code) -> None:
    with raises_code(TaskError, code):
        named(name, options).sample(0, 0, BYTES, length)


@pytest.mark.parametrize("power", ["1e-6", "32"])
def test_extreme_powers_prefer_opposite_ends(power: str) -> None:
    """A small power prefers the first slots, and a large one the last."""
    sample = named("mqar", [f"power={power}", "vocabulary=100000"]).sample(0, 0, BYTES, 2**16)
    middle = sum(sample.meta["places"]) / len(sample.meta["places"])
    assert (middle < 2**15) == (power == "1e-6")


def test_mqar_values_that_follow_their_keys_are_next_tokens() -> None:
    """Pairs and places are equal: a key's target is unchanged, and it comes right after the key."""
    apart, follows = (named("mqar", [f"follows={one}"]).sample(5, 2, BYTES, 64) for one in ("false", "true"))
    assert (follows.labels, follows.targets()) == (None, apart.targets())
    assert follows.meta == apart.meta
    places = {place + 1 for place in apart.meta["places"]}
    differ = {place for place in range(64) if apart.tokens[place] != follows.tokens[place]}
    assert differ <= places
