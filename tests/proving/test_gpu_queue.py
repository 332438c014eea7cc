"""The GPU queue without a GPU: its list, its marks of finished parts, and parts that crash or hang."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hybridtron.proving.gpu import measure
from hybridtron.proving.gpu.queue import digest, page, rows
from hybridtron.proving.gpu.queue.parts import CONV1D, MAMBA_SSM, PARTS, TE, QueuePart
from hybridtron.proving.gpu.queue.rows import DONE, FAILED, LEFT_OUT, PartAttempt, attempts, read
from hybridtron.proving.gpu.queue.run_parts import MARGIN_S, QueueRun, run_part, state_of, undone

QUARTER_HOUR_S = 15 * 60
ABOUT = {"card": "h100", "gpu": "NVIDIA H100", "commit": "1a2b3c4d", "versions": "Python 3.12", "rehearsed": False}


def attempt(part: QueuePart, state: str = DONE, card: str = "h100", code: str | None = None) -> PartAttempt:
    begin = {**ABOUT, "part": part.name, "is": "begin", "card": card, "digest": code or part.digest, "at": 0.0}
    return PartAttempt(begin, [], {"state": state, "why": "a reason" * (state != DONE)})


def test_parts_have_unique_names_and_functions() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert all(callable(part.function()) for part in PARTS)


def test_queue_begins_with_the_machine_and_ends_with_compiled_packages() -> None:
    compiled = [bool({MAMBA_SSM, CONV1D, TE} & set(part.needs)) for part in PARTS]
    assert PARTS[0].name == "machine"
    assert compiled == sorted(compiled)


def test_parts_without_compiled_packages_fit_a_quarter_of_an_hour() -> None:
    light = [part for part in PARTS if not {MAMBA_SSM, CONV1D, TE} & set(part.needs)]
    assert sum(part.limit_s + MARGIN_S for part in light) <= QUARTER_HOUR_S
    assert max(part.limit_s for part in PARTS) + MARGIN_S <= 60 * measure.MINUTES


def test_files_of_every_part_exist() -> None:
    for part in PARTS:
        for pattern in (part.file, *part.code):
            assert digest.files([pattern]), (part.name, pattern)


def test_digest_covers_code_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ops/norm"
    folder.mkdir(parents=True)
    monkeypatch.setattr(digest, "PACKAGE", tmp_path)

    def of(text: str) -> str:
        (folder / "kernels.py").write_text(text)
        return digest.digest(["ops/norm/*.py"])

    plain = of("GRID = 264\n\n\ndef f():\n    return '# no comment'\n")
    assert (
        of('"""Words."""\n\nGRID = 264  # two each\n\ndef f():\n    """More."""\n    return \'# no comment\'\n')
        == plain
    )
    assert of("GRID = 528\n\n\ndef f():\n    return '# no comment'\n") != plain
    (folder / "native.py").write_text("of the CPU = 1")
    assert of("GRID = 264\n\n\ndef f():\n    return '# no comment'\n") == plain


def test_digest_of_a_recipe_covers_the_recipes_below_it() -> None:
    assert any("pattern" in line for line in digest.recipe_lines("samba_1.7b_padded"))
    assert not any(line.strip().startswith("#") and "package" in line for line in digest.recipe_lines("samba_421m"))


def test_results_count_for_their_card_and_code_alone() -> None:
    part = PARTS[0]
    assert state_of(part, "h100", [attempt(part)]).state == DONE
    assert state_of(part, "h200", [attempt(part)]).state == "undone"
    assert state_of(part, "h100", [attempt(part, code="other")]).state == "undone"
    assert state_of(part, "h100", [attempt(part, FAILED)]).state == FAILED
    assert state_of(part, "h100", [attempt(part), attempt(part, FAILED)]).state == DONE


def test_untried_parts_come_before_failed_ones() -> None:
    first, second, third, fourth = PARTS[:4]
    known = [attempt(first, FAILED), attempt(second), attempt(third, LEFT_OUT)]
    assert undone(PARTS[:4], "h100", known) == [third, fourth, first]
    assert undone(PARTS[:4], "h200", known) == [first, second, third, fourth]


class Machine:
    """Stand-in for processes and the clock: each part takes a time, writes a row, and ends with a code."""

    def __init__(self, seconds: float = 10.0, codes: dict[str, int] | None = None) -> None:
        self.seconds = seconds
        self.codes = codes or {}
        self.now = 0.0
        self.commands: list[Sequence[str]] = []

    def launch(self, command: Sequence[str], log: Path, limit_s: float) -> int:
        self.commands.append(command)
        name = command[3]
        file = Path(command[4])
        rows.append(file, {"part": name, "is": "measured", "case": "one", "ms": 1.0})
        with log.open("a") as printed:
            printed.write(f"a traceback\nRuntimeError: {name}: an illegal memory access\n")
        self.now += min(self.seconds, limit_s)
        return self.codes.get(name, 0)

    def run(self, file: Path, seconds: float) -> QueueRun:
        return QueueRun(file, ABOUT, seconds, launch=self.launch, clock=lambda: self.now, show=lambda _: None)


def light(number: int) -> list[QueuePart]:
    return [replace(part, needs=(), limit_s=20) for part in PARTS[:number]]


def test_run_takes_the_parts_that_fit_its_time(tmp_path: Path) -> None:
    machine = Machine(seconds=20.0)
    parts = light(4)
    parts[2] = replace(parts[2], limit_s=500)
    assert list(machine.run(tmp_path / "run.jsonl", 60.0).take(parts)) == [parts[0].name, parts[1].name]
    assert list(Machine(1.0).run(tmp_path / "b.jsonl", 60.0).take(parts)) == [parts[i].name for i in (0, 1, 3)]


def test_rows_mark_parts_done_and_failed(tmp_path: Path) -> None:
    parts = light(3)
    machine = Machine(codes={parts[1].name: 1, parts[2].name: 124})
    ended = machine.run(tmp_path / "run.jsonl", 200.0).take(parts)
    assert list(ended.values()) == [DONE, FAILED, FAILED]
    known = attempts(read(tmp_path))
    assert [attempt.state for attempt in known] == [DONE, FAILED, FAILED]
    assert all(attempt.rows[0]["ms"] == 1.0 for attempt in known)
    assert known[1].why.endswith(f"RuntimeError: {parts[1].name}: an illegal memory access")
    assert known[2].why == "took longer than 20 s"
    assert undone(parts, "h100", known) == parts[1:]


def test_part_with_a_missing_package_is_left_out_with_its_reason(tmp_path: Path) -> None:
    machine = Machine()
    part = replace(PARTS[0], needs=("no-such-package",))
    assert machine.run(tmp_path / "run.jsonl", 1.0).take([part]) == {part.name: LEFT_OUT}
    (left_out,) = attempts(read(tmp_path))
    assert (left_out.state, left_out.why, machine.commands) == (LEFT_OUT, "needs no-such-package", [])


def test_hanging_part_is_ended_and_its_rows_stay(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    program = (
        "import sys, time; from pathlib import Path; from hybridtron.proving.gpu.queue.rows import Recorder\n"
        "record = Recorder(Path(sys.argv[1]), 'hangs')\n"
        "with record.case('one') as row: row['ms'] = 2.0\n"
        "Path(sys.argv[1]).with_suffix('.there').touch(); time.sleep(600)"
    )
    started = file.with_suffix(".there")
    limit = 1.0
    while not started.exists():  # a busy machine may need longer to import
        limit *= 2
        assert run_part([sys.executable, "-c", program, str(file)], tmp_path / "log", limit) == 124
    assert {"part": "hangs", "is": "measured", "case": "one", "ms": 2.0} in read(tmp_path)


def test_absent_program_is_a_failed_part(tmp_path: Path) -> None:
    run = replace(
        Machine().run(tmp_path / "run.jsonl", 100.0), launch=lambda *_: run_part(["no-such"], tmp_path / "l", 1)
    )
    assert run.take(light(1)) == {PARTS[0].name: FAILED}


def test_rows_are_on_disk_before_the_next_case(tmp_path: Path) -> None:
    record = rows.Recorder(tmp_path / "run.jsonl", "part")
    with record.case("first") as row:
        row["ms"] = 1.0
    with record.case("second") as second_row:
        assert [row["case"] for row in read(tmp_path)] == ["first"]
        second_row["ms"] = 2.0
        raise ValueError("no kernel image")
    first, second = read(tmp_path)
    assert (first["is"], second["is"], second["ms"]) == ("measured", FAILED, 2.0)
    assert second["why"] == "ValueError: no kernel image"
    assert record.failures == ["second"]


def test_truncated_file_is_read_as_a_failed_part(tmp_path: Path) -> None:
    first = {**ABOUT, "part": PARTS[0].name, "is": "begin", "digest": PARTS[0].digest, "at": 0.0}
    (tmp_path / "run.jsonl").write_text(json.dumps(first) + '\n{"part": "mach')
    (failed,) = attempts(read(tmp_path))
    assert (failed.state, failed.why) == (FAILED, "interrupted")


def test_rehearsals_are_no_results(tmp_path: Path) -> None:
    run = Machine().run(tmp_path / "run.jsonl", 100.0)
    run.about = {**ABOUT, "rehearsed": True}
    run.take(light(1))
    assert attempts(read(tmp_path)) == []


def test_list_has_the_state_of_every_part() -> None:
    lines = page.listed([attempt(PARTS[0])], "h100")
    assert lines[0].endswith("h100: done (1a2b3c4, 1970-01-01)")
    assert lines[1].endswith("h100: undone")


def test_page_shows_measured_parts_alone() -> None:
    assert page.NOTHING_MEASURED in page.text([attempt(PARTS[0], FAILED)])
    done = attempt(PARTS[0])
    kernels = [{"kernel": "norm.backward", "calls": 2, "ms": 3.0, "model_ms": 1.5}]
    done.rows.append({"part": "machine", "is": "measured", "case": "copy", "tb_s": 2.9876, "by_kernel": kernels})
    text = page.text([done])
    assert page.NOTHING_MEASURED not in text
    assert "## machine, NVIDIA H100" in text
    assert "| copy | tb_s 2.988 |" in text
    assert "| `norm.backward` | 2 | 3 | 1.5 | 2.00 |" in text


def test_page_of_the_stored_results_is_current() -> None:
    folder = measure.results()
    assert folder is not None
    assert (folder.parents[1] / page.NAME).read_text() == page.text(attempts(read(folder))), "measure --page"


def test_queue_without_a_gpu_lists_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main(["--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("This machine has no CUDA device")
    assert measure.main(["--list", "--output", str(tmp_path)]) == 0
    assert "mamba2_1.3b" in capsys.readouterr().out
