"""Every task gives the samples of its golden file; they follow from its draws by the rules (rules.py)."""

from __future__ import annotations

import pytest

from hybridtron.tasks import TASKS
from hybridtron.tasks.options import named
from hybridtron.tasks.tokens import ByteTokens
from tests.tasks import rules

PER_LENGTH = 3


def setting(text: str) -> str:
    return text.replace("GOLDEN", str(rules.GOLDEN))


@pytest.mark.parametrize("task", TASKS)
def test_a_golden_file_has_three_samples_of_two_lengths(task: str) -> None:
    lengths = [entry["length"] for entry in rules.read(task)]
    assert [lengths.count(length) for length in sorted(set(lengths))] == [PER_LENGTH, PER_LENGTH]


@pytest.mark.parametrize("task", TASKS)
def test_a_golden_file_follows_the_rules(task: str) -> None:
    for entry in rules.read(task):
        assert rules.derived(task, entry) == entry


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if task.text])
def test_text_tasks_give_the_golden_samples(task: str) -> None:
    for entry in rules.read(task):
        task_with_options = named(task, [setting(text) for text in entry["settings"]])
        sample = task_with_options.sample(entry["seed"], entry["index"], ByteTokens(), entry["length"])
        assert (sample.prompt, sample.answer) == (entry["prompt"], entry["answer"])
        assert list(sample.outputs) == entry["outputs"]
        zeros, ones = entry["mask"]
        assert sample.mask == (0,) * zeros + (1,) * ones
        assert bytes(sample.tokens).decode() == entry["prompt"] + entry["answer"]
        assert bytes(sample.prompt_tokens).decode() == entry["prompt"]


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if not task.text])
def test_tasks_on_token_ids_give_the_golden_samples(task: str) -> None:
    for entry in rules.read(task):
        sample = named(task, entry["settings"]).sample(entry["seed"], entry["index"], ByteTokens(), entry["length"])
        assert list(sample.tokens) == entry["tokens"]
        assert list(sample.mask) == entry["mask"]
        assert list(sample.targets()) == entry["targets"]
