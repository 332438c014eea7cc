"""The judge of the studies: how often it errs on drawn results, how few seeds decide nothing, and its verdicts."""

from __future__ import annotations

import math
import random

import pytest

from studies.judge import (
    DRAWS,
    LEVEL,
    POWER_SEEDS,
    Said,
    Seeds,
    another,
    below,
    decided,
    differing,
    drawn,
    fails,
    if_failing,
    notes,
    outcome,
    power,
    power_rows,
    timed,
    within,
)

COUNTS = ((3, 3), (4, 4), (5, 5), (7, 7), (10, 10), (3, 10), (10, 3))
DEVIATIONS = ((1.0, 1.0), (1.0, 3.0), (3.0, 1.0), (1.0, 10.0))
TESTED = 600  # draws of each combination; 16,800 for each true difference


def shares(true: float, *, one_start: bool) -> dict[tuple[tuple[int, int], tuple[float, float], Said], float]:
    """Draw results with this true difference, and return the share of each outcome by seeds and deviations."""
    source = random.Random(1)
    found = {}
    for seeds in COUNTS:
        for deviations in DEVIATIONS:
            said = [drawn(true, seeds, deviations, source, one_start=one_start) for _ in range(TESTED)]
            for outcome_of in (Said.AGREES, Said.NOT):
                found[seeds, deviations, outcome_of] = said.count(outcome_of) / TESTED
    return found


def values(*by_seed: float) -> Seeds:
    return {str(seed): value for seed, value in enumerate(by_seed, 1)}


@pytest.mark.parametrize("one_start", [False, True])
@pytest.mark.parametrize(("true", "wrong"), [(0.0, Said.AGREES), (-0.5, Said.AGREES), (0.0, Said.NOT), (0.5, Said.NOT)])
def test_the_judge_errs_in_at_most_one_of_twenty_draws(true: float, wrong: Said, one_start: bool) -> None:
    """Compare the rate of wrong verdicts on a claim that one model lies below another with the level."""
    found = shares(true, one_start=one_start)
    worst = max(share for (_, _, said), share in found.items() if said is wrong)
    assert worst <= LEVEL
    if true == 0.0:  # the intervals are not merely wide: one draw of forty lies beyond each end
        mean = sum(share for (_, _, said), share in found.items() if said is wrong) / (len(COUNTS) * len(DEVIATIONS))
        assert 0.015 < mean < 0.035


def test_claims_with_several_comparisons_are_rarely_contradicted_by_chance() -> None:
    """Without a true difference, six comparisons of five seeds contradict a claim in at most one of twenty draws."""
    source = random.Random(2)

    def drawn_seeds() -> Seeds:
        return values(*(source.gauss(0.0, 1.0) for _ in range(5)))

    said = [outcome([below("drawn", drawn_seeds(), drawn_seeds()) for _ in range(6)]) for _ in range(1000)]
    assert said.count(Said.NOT) / 1000 <= LEVEL
    assert said.count(Said.AGREES) == 0


def test_seeds_see_more_the_more_they_are() -> None:
    """For two models by themselves, t with 2(n - 1) degrees of freedom gives 45% and 99% for 3 and 10 seeds; Welch's
    fewer degrees see less of few seeds."""
    for one_start in (False, True):
        found = [power(seeds, one_start) for seeds in POWER_SEEDS]
        assert found == sorted(found)
        assert found[-1] > 0.98
    assert 0.3 < power(3, False) < 0.45
    assert power(3, True) > power(3, False)
    header, rows = power_rows()
    assert header[1:] == ("3", "4", "5", "7", "10")
    assert rows[0][1] == f"{power(3, False):.0%}"
    text = " ".join(notes())
    assert f"see {power(3, False):.0%}, " in text
    assert f"({DRAWS} draws)" in text


@pytest.mark.parametrize("one_start", [False, True])
def test_few_seeds_decide_nothing(one_start: bool) -> None:
    """However large the difference; the side with fewer seeds counts."""
    three = values(1.0, 1.1, 0.9)
    for more, said in (
        (values(9.0), Said.ONE_SEED),
        (values(9.0, 9.1), Said.FEW_SEEDS),
        (values(9.0, 9.1, 9.2), Said.AGREES),
    ):
        verdict = decided([below("a below b", three, more, one_start=one_start)])
        assert verdict.said is said
        assert verdict.numbers.endswith(f"({said.value})")
    assert decided([within("a", values(0.5), low=0.0)]).said is Said.ONE_SEED


def test_the_worst_comparison_decides() -> None:
    low = values(1.0, 1.1, 0.9)
    high = values(2.0, 2.1, 1.9)
    agree = below("low below high", low, high)
    level = below("low below low", low, values(1.05, 0.95, 1.01))
    few = below("low below one", low, values(3.0))
    against = below("high below low", high, low)
    assert decided([agree]).said is Said.AGREES
    assert decided([agree, level]).said is Said.UNDECIDED
    assert decided([agree, level, few]).said is Said.ONE_SEED
    assert decided([agree, level, few, against]).said is Said.NOT


def test_a_claim_of_many_comparisons_needs_a_clearer_contradiction() -> None:
    """With p = 0.03 a reversed comparison contradicts alone, and not as one of two."""
    reversed_order = differing("a and b", values(3.0, 5.0, 7.0), values(9.0, 10.0, 11.0), high=0.0)
    assert reversed_order.difference is not None
    assert reversed_order.difference.p() == pytest.approx(0.0316, abs=5e-4)
    assert decided([reversed_order]).said is Said.NOT
    assert decided([reversed_order, reversed_order]).said is Said.UNDECIDED


def test_models_of_one_start_are_compared_seed_by_seed() -> None:
    """Bases differ by 10, what is tuned from them by 1: seen only seed by seed."""
    less = values(1.0, 11.0, 21.0)
    more = values(2.0, 12.1, 21.9)
    assert decided([below("less below more", less, more)]).said is Said.UNDECIDED
    verdict = decided([below("less below more", less, more, one_start=True)])
    assert verdict.said is Said.AGREES
    assert "11 and 12, +1 [+0.752, +1.25]" in verdict.numbers
    other = {"7": 1.0, "8": 2.0}
    assert below("of other seeds", less, other, one_start=True).said() is Said.FEW_SEEDS


def test_differences_lie_in_a_range() -> None:
    base = values(50.0, 51.0, 49.0)
    for more, said in (
        (values(51.0, 52.0, 50.0), Said.AGREES),
        (values(58.0, 59.1, 56.9), Said.NOT),
        (values(42.0, 43.0, 40.9), Said.NOT),
        (values(54.0, 57.0, 52.0), Said.UNDECIDED),
    ):
        assert differing("level", base, more, low=-5.0, high=5.0, one_start=True).said() is said


def test_equal_values_have_an_exact_mean() -> None:
    ones = values(1.0, 1.0, 1.0)
    assert below("level", ones, ones).said() is Said.UNDECIDED
    assert below("higher", ones, values(2.0, 2.0, 2.0)).said() is Said.AGREES
    assert below("lower", values(2.0, 2.0, 2.0), ones, one_start=True).said() is Said.NOT


def test_what_does_not_fail_contradicts_nothing() -> None:
    """A model fails from a ratio of 1.01 on; ratios are printed of logarithms."""

    def failing(*ratios: float) -> Seeds:
        return values(*map(math.log, ratios))

    claimed = below("repaired", values(0.0, 0.1, 0.2), values(1.0, 1.1, 1.2), one_start=True)
    against = below("repaired", values(1.0, 1.1, 1.2), values(0.0, 0.1, 0.2), one_start=True)
    cases = (
        (failing(1.10, 1.11, 1.12), Said.AGREES, Said.NOT),
        (failing(0.99, 1.0, 0.995), Said.NO_FAILURE, Said.NO_FAILURE),
        (failing(0.9, 1.0, 1.2), Said.UNDECIDED, Said.UNDECIDED),
        (failing(1.2), Said.ONE_SEED, Said.ONE_SEED),
    )
    for rises, repaired, not_repaired in cases:
        check = within("fails", rises, low=math.log(1.01), ratio=True)
        assert if_failing([check], [claimed]).said is repaired
        assert if_failing([check], [against]).said is not_repaired
    level = within("base fails", failing(0.99, 1.0, 0.995), low=math.log(1.01), ratio=True)
    verdict = fails(level)
    assert verdict.said is Said.NO_FAILURE
    assert verdict.numbers.startswith("base fails: 0.99, 1, 0.995, 0.995 [")
    assert verdict.numbers.endswith("(not so)")
    one = within("the other fails", failing(1.2), low=math.log(1.01), ratio=True)
    assert if_failing([level, one], [claimed]).said is Said.ONE_SEED


def test_another_measure_and_times() -> None:
    against = below("a below b", values(2.0, 2.1, 1.9), values(1.0, 1.1, 0.9))
    verdict = another("loss in place of benchmarks", [against])
    assert verdict.said is Said.OTHER
    assert "(does not agree)" in verdict.numbers
    assert [timed([("one", True), ("two", two)]).said for two in (True, False)] == [Said.AGREES, Said.NOT]
