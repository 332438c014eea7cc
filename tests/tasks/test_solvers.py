"""The solver, which reads the prompt, scores 100; the empty answer 0; another sample's answer the level of chance."""

from __future__ import annotations

import math
from random import Random

import pytest

from hybridtron.tasks import TASKS
from hybridtron.tasks.babilong.task import LABELS, Babilong
from hybridtron.tasks.base import Sample, Task, TextTokens
from hybridtron.tasks.options import named
from hybridtron.tasks.tokens import ByteTokens
from tests.tasks.rules import GOLDEN
from tests.tasks.solvers import SOLVERS

LENGTHS = {"passkey": (300, 2000), "vt": (1800, 6000), "cwe": (2500, 9000), "qa_1": (690, 850), "qa_2": (700, 770)}
LENGTHS |= {f"babilong_qa{number}": (2600, 8000) for number in range(1, 11)}
COMMON_LENGTHS = (1200, 6000)
OPTIONS = {"qa_1": [f"data={GOLDEN / 'squad.json'}"], "qa_2": [f"data={GOLDEN / 'hotpotqa.json'}"]}
QUESTIONS = {"qa_1": 4, "qa_2": 3}  # in these files
TEXT_TASKS = [name for name, task in TASKS.items() if task.text]
SAMPLES = 12
GUESSES = 75
BYTES: TextTokens = ByteTokens()


def task_of(name: str) -> Task:
    return named(name, OPTIONS.get(name, ()))


def samples(name: str, length: int, count: int) -> list[Sample]:
    return [task_of(name).sample(5, index, BYTES, length) for index in range(min(count, QUESTIONS.get(name, count)))]


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_a_solver_that_reads_the_prompt_scores_100(name: str) -> None:
    for length in LENGTHS.get(name, COMMON_LENGTHS):
        for sample in samples(name, length, SAMPLES):
            scores = task_of(name).score(sample, SOLVERS[name](sample.prompt))
            assert next(iter(scores.values())) == 1.0, (sample.prompt, scores)
            learned = task_of(name).score(sample, sample.answer)
            learned.pop("accuracy_reference", None)  # in which "none" is "one", too
            assert set(learned.values()) == {1.0}


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_an_empty_answer_scores_0(name: str) -> None:
    for sample in samples(name, LENGTHS.get(name, COMMON_LENGTHS)[0], SAMPLES):
        assert set(task_of(name).score(sample, "").values()) == {0.0}


@pytest.mark.parametrize("name", [name for name in TEXT_TASKS if name not in QUESTIONS])
def test_the_answer_to_another_sample_scores_chance(name: str) -> None:
    """The score is within four deviations of a binomial."""
    task = task_of(name)
    drawn = samples(name, LENGTHS.get(name, COMMON_LENGTHS)[0], GUESSES)
    guesses = [other.answer for other in (*drawn[1:], drawn[0])]
    if isinstance(task, Babilong):
        guesses = Random(2).choices(LABELS[task.story], k=len(drawn))
        drawn = [sample for sample in drawn if "," not in sample.outputs[0]]  # two objects are two labels
    scores = [next(iter(task.score(sample, guess).values())) for sample, guess in zip(drawn, guesses, strict=False)]
    chance = task.chance()
    deviation = math.sqrt(chance * (1 - chance) / len(scores))
    assert abs(sum(scores) / len(scores) - chance) <= 4 * deviation + 0.5 / len(scores)


@pytest.mark.parametrize("name", TASKS)
def test_samples_depend_only_on_seed_index_and_length(name: str) -> None:
    task = task_of(name)
    length = LENGTHS.get(name, COMMON_LENGTHS)[0]
    first = task.sample(1, 2, BYTES, length)
    task.sample(3, 1, BYTES, length)
    assert task.sample(1, 2, BYTES, length) == first
    assert len({task.sample(seed, index, BYTES, length).tokens for seed in (1, 2) for index in (1, 2)}) == 4


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_a_sample_fills_its_length_and_never_exceeds_it(name: str) -> None:
    for length in LENGTHS.get(name, COMMON_LENGTHS):
        for sample in samples(name, length, SAMPLES):
            assert len(sample.tokens) == len(sample.mask)
            if name == "passkey":
                assert len(sample.tokens) == length
            else:
                assert length - 400 < sample.length <= length
