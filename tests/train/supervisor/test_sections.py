"""Time limits of sections, and the pipe through which a rank announces its work."""

from __future__ import annotations

import os

import pytest

from hybridtron.data.loader import STACKS as LOADER_STACKS
from hybridtron.train.supervisor.child import STACKS, is_counted
from hybridtron.train.supervisor.sections import (
    FACTOR,
    PATIENCE_S,
    START_S,
    VARIABLE,
    Section,
    SectionClock,
    SectionPipe,
    SectionWork,
    parse,
)


def clock_after(*durations: tuple[Section, float], timeout_s: float = 100.0) -> tuple[SectionClock, float]:
    """Return a clock that has measured these pieces of work, and the time."""
    clock = SectionClock(timeout_s)
    clock.restart(0.0, resumes=False)
    now = 0.0
    for section, seconds in durations:
        clock.begin(SectionWork(section, 0, ""), now)
        now += seconds
    return clock, now


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [((1.0, 1.0), 10.0), ((4.0, 3.0), 4.0 * FACTOR), ((50.0, 1.0), 100.0 + PATIENCE_S), ((9.0,), 100.0 + PATIENCE_S)],
    ids=["the least", "scaled", "run.timeout", "not measured"],
)
def test_limit_of_steps_follows_their_longest_time(seconds: tuple[float, ...], limit: float) -> None:
    clock, now = clock_after(*((Section.step, spent) for spent in seconds))
    clock.begin(SectionWork(Section.step, 1, "step 2"), now)
    assert clock.limit() == limit


def test_start_and_restored_start_have_limits_of_their_own() -> None:
    clock = SectionClock(10.0)
    clock.restart(0.0, resumes=True)
    assert clock.work.section is Section.resume
    assert clock.limit() == START_S + PATIENCE_S
    clock.begin(SectionWork(Section.start, 0, "building the model"), 1.0)
    assert clock.work.section is Section.resume
    assert clock.begin(SectionWork(Section.step, 5, "step 6"), 2.0)  # the first step has ended
    clock.begin(SectionWork(Section.start, 5, "the first step of a phase"), 3.0)
    assert clock.work.section is Section.start


@pytest.mark.parametrize("section", [Section.export, Section.settle])
def test_work_that_differs_has_the_limit_of_the_run(section: Section) -> None:
    clock, now = clock_after((section, 0.01), (section, 0.01))
    clock.begin(SectionWork(section, 1, ""), now)
    assert clock.limit() == 100.0 + PATIENCE_S


def test_fast_local_saves_do_not_limit_a_save_in_the_folder_of_the_run() -> None:
    clock, now = clock_after(*((Section.local_save, 1.0) for _ in range(9)))
    clock.begin(SectionWork(Section.save, 1, "the checkpoint of step 10"), now)
    assert clock.limit() == 100.0 + PATIENCE_S
    clock.begin(SectionWork(Section.local_save, 1, "the local checkpoint of step 11"), now)
    assert clock.limit() == 20.0


def test_every_piece_of_a_start_has_the_limit_of_a_start() -> None:
    clock = SectionClock(1800.0)
    clock.restart(0.0, resumes=False)
    pieces = ("the start", "all ranks joining", "the start", "building the model", "step 1")
    for number, doing in enumerate(pieces):
        assert clock.limit() == 1800.0 + PATIENCE_S
        clock.begin(SectionWork(Section.start, 0, doing), float(number))
    assert clock.limit() == 1800.0 + PATIENCE_S


def test_limit_that_was_too_short_grows() -> None:
    clock, now = clock_after((Section.step, 1.0), (Section.step, 1.0))
    clock.begin(SectionWork(Section.step, 1, ""), now)
    clock.give_up(now + 11.0)
    assert clock.limit() == 11.0 * FACTOR


def test_time_of_a_step_is_the_median() -> None:
    clock, now = clock_after((Section.step, 1.0), (Section.save, 90.0), (Section.step, 2.0), (Section.step, 50.0))
    clock.begin(SectionWork(Section.save, 1, ""), now)
    assert clock.step_s() == 2.0


def test_work_passes_through_the_pipe() -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    pipe = SectionPipe({VARIABLE: str(writing)})
    assert not os.get_inheritable(writing)
    work = SectionWork(Section.evaluation, 12, "the evaluation\nat step 12")
    pipe.announce(work)
    line = os.read(reading, 1000).decode()
    assert parse(line.rstrip("\n")) == work._replace(doing="the evaluation at step 12")
    for _ in range(10_000):
        pipe.announce(work)  # a supervisor that does not read must not stop the rank
    os.close(reading)
    pipe.announce(work)
    os.close(writing)


def test_rank_without_a_supervisor_announces_nothing() -> None:
    pipe = SectionPipe({})
    pipe.announce(SectionWork(Section.step, 1, "step 2"))
    assert pipe.file is None


def test_counted_work_is_the_same_on_all_ranks() -> None:
    assert is_counted(Section.step, Section.step)
    assert is_counted(Section.evaluation, Section.step)
    assert not is_counted(Section.evaluation, Section.evaluation)  # a rank announces each of its samples
    assert not is_counted(Section.start, Section.start)  # the first rank also waits for the others to join


def test_ranks_and_loader_workers_write_their_stacks_on_the_same_signal() -> None:
    assert STACKS == LOADER_STACKS
