"""The search for the largest number of units that fits a length: it ends, and reports if nothing fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtron.tasks.base import Task, TaskError
from hybridtron.tasks.fitted import fitted
from hybridtron.tasks.fitting import TooShort, most_units, shrink
from hybridtron.tasks.options import named
from hybridtron.tasks.tokens import ByteTokens
from tests.refusals import raises_code


@given(st.integers(1, 40), st.integers(0, 500), st.integers(1, 30), st.integers(1, 50), st.integers(1, 3000))
def test_bisection_finds_the_most_units(per_unit: int, fixed: int, fewest: int, step: int, length: int) -> None:
    def size(units: int) -> int:
        return fixed + per_unit * units

    counted = [units for units in range(fewest, length + 1, step) if size(units) <= length]
    assert most_units(size, length, fewest, step) == max(counted, default=fewest)


def test_constant_sizes_end_the_search() -> None:
    assert most_units(lambda units: 0, 1000, 1, 1) == 1000


def test_samples_longer_than_expected_shrink() -> None:
    assert shrink(lambda units: 10 * units + 7, 100, 20, 1, 5, "here") == 5
    assert shrink(lambda units: 10 * units, 100, 10, 1, 5, "here") == 10
    with raises_code(TooShort, "does-not-fit", "here", "100", "130"):
        shrink(lambda units: 120 + 10 * units, 100, 20, 1, 5, "here")


@pytest.mark.parametrize(
    "name", ["niah_single_1", "niah_single_2", "niah_multikey_3", "vt", "cwe", "fwe", "qa_synth_1"]
)
@pytest.mark.parametrize("faithful", ["true", "false"])
def test_samples_of_any_length_fit_or_are_refused(name: str, faithful: str) -> None:
    task = named(name, [f"faithful={faithful}"])
    lengths = {length: how_long(task, length) for length in (1, 60, 200, 600, 1500, 2600, 5000, 9000)}
    fit = [length for length, sample in lengths.items() if sample]
    assert all(lengths[length] <= length for length in fit)
    assert 9000 in fit
    assert not {1, 60, 200} & set(fit)
    if (name, faithful) != ("cwe", "true"):  # from 4096 on its lists are five times as long
        assert fit == list(lengths)[-len(fit) :]


def how_long(task: Task, length: int) -> int:
    """0 where it is refused."""
    try:
        return task.sample(0, 0, ByteTokens(), length).length
    except TaskError:
        return 0


def test_noise_fills_a_length_to_within_two_lines() -> None:
    """330 bytes of template and needle, 128 to generate: 90 for each further line and its newline."""
    task = named("niah_single_1")
    lengths = (700, 789, 790, 791, 879, 880)
    units = [fitted(task, ByteTokens(), length) for length in lengths]  # type: ignore[arg-type]
    assert units[-1] - units[0] == 2
    assert sorted(units) == units
    sizes = [task.sample(0, 0, ByteTokens(), length).length for length in lengths]
    assert all(length - 2 * 90 < size <= length for length, size in zip(lengths, sizes, strict=True))
