"""The first rank that diverged: from records of collectives that are written by hand, and from a real hang."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridtron.data.loader import STACKS
from hybridtron.train import collectives
from hybridtron.train.collectives import Divergence, compare_at_hang, first_divergence, main, read_calls, write_calls

REDUCE = "gloo:all_reduce"
GROUPS = {"all": [0, 1, 2, 3], "01": [0, 1], "23": [2, 3], "02": [0, 2], "13": [1, 3]}


def call(group: str, number: int, name: str = REDUCE, ended: bool = True, **changed: Any) -> dict[str, Any]:
    values = {"group": group, "number": number, "name": name, "sizes": [[8]], "dtypes": ["Float"]}
    return {**values, "ended": ended, "time": float(number), **changed}


def waiting_call(group: str, number: int, name: str = REDUCE, **changed: Any) -> dict[str, Any]:
    return call(group, number, name, ended=False, **changed)


def divergence_of(
    logs: Path,
    calls: Mapping[int, Sequence[dict[str, Any]]],
    idle: Sequence[int] = (),
    lost: bool = False,
    started: float = 5.0,
) -> Divergence | None:
    """Write the files of ranks, and compare them. All but the ranks `idle` wait for others."""
    for rank, of_rank in calls.items():
        groups = {name: ranks for name, ranks in GROUPS.items() if rank in ranks}
        recorded = {"groups": groups, "calls": of_rank, "lost": lost, "started": started, "ranks": 4}
        write_calls(logs, rank, recorded, rank not in idle)
    return first_divergence(read_calls(logs, since=0.0))


def test_rank_with_another_operation_is_first(tmp_path: Path) -> None:
    calls = {rank: [call("all", 6), waiting_call("all", 7)] for rank in range(4)}
    assert divergence_of(tmp_path, calls) is None
    calls[2] = [call("all", 6), waiting_call("all", 7, "gloo:broadcast"), waiting_call("23", 1)]
    divergence = divergence_of(tmp_path, calls)
    assert divergence is not None
    assert divergence.rank == 2
    assert "rank 2 called gloo:broadcast [[8]] ['Float'] as number 7 of group all" in divergence.what
    assert "ranks 0, 1, 3 called gloo:all_reduce" in divergence.what


def test_rank_with_another_size_is_first_unless_sizes_may_differ(tmp_path: Path) -> None:
    calls = {rank: [waiting_call("all", 7, sizes=[[9 if rank == 1 else 8]])] for rank in range(4)}
    divergence = divergence_of(tmp_path, calls)
    assert divergence is not None
    assert divergence.rank == 1
    calls = {rank: [waiting_call("all", 7, "nccl:all_to_all", sizes=[[rank]])] for rank in range(4)}
    assert divergence_of(tmp_path, calls) is None


def test_two_ranks_that_differ_are_both_suspect(tmp_path: Path) -> None:
    divergence = divergence_of(tmp_path, {0: [waiting_call("01", 7)], 1: [waiting_call("01", 7, "gloo:broadcast")]})
    assert divergence is not None
    assert divergence.rank == -1
    assert "without a majority" in divergence.what


@pytest.mark.parametrize("sizes", [(1, 2, 3), (1, 1, 2, 2, 3)])
def test_no_rank_is_named_without_a_majority(sizes: Sequence[int], tmp_path: Path) -> None:
    divergence = divergence_of(tmp_path, {rank: [waiting_call("all", 7, sizes=[[n]])] for rank, n in enumerate(sizes)})
    assert divergence is not None
    assert divergence.rank == -1
    assert "without a majority" in divergence.what


def test_idle_rank_is_named_before_ranks_that_have_not_written_yet(tmp_path: Path) -> None:
    calls = {0: [waiting_call("all", 7)], 3: [call("all", 6)]}
    divergence = divergence_of(tmp_path, calls, idle=[3])
    assert divergence is not None
    assert divergence.rank == 3
    compared = compare_at_hang(tmp_path, since=0.0)
    assert compared is not None
    assert compared.what == f"{divergence.what} (2 of 4 ranks have written)"


def test_files_of_an_earlier_start_are_left_out(tmp_path: Path) -> None:
    """Numbers of calls begin at the same number in each start."""
    divergence_of(tmp_path, {rank: [waiting_call("all", 7, sizes=[[9]])] for rank in range(4)}, started=5.0)
    assert divergence_of(tmp_path, {rank: [waiting_call("all", 7)] for rank in range(3)}, started=6.0) is not None
    assert [of_rank.rank for of_rank in read_calls(tmp_path, since=0.0)] == [0, 1, 2]
    assert divergence_of(tmp_path, {3: [waiting_call("all", 7)]}, started=6.0) is None


def test_comparison_at_a_hang_neither_fails_nor_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare_at_hang(tmp_path, since=0.0) is None
    divergence_of(tmp_path, {rank: [waiting_call("all", 7)] for rank in range(4)})
    assert compare_at_hang(tmp_path, since=0.0) is None
    monkeypatch.setattr(collectives, "MOST_BYTES", 100)
    refused = compare_at_hang(tmp_path, since=0.0)
    assert refused is not None
    assert refused.rank == -1
    assert "are not compared here: python -m hybridtron.train.collectives" in refused.what
    monkeypatch.undo()
    monkeypatch.setattr(collectives, "first_divergence", lambda _: 1 // 0)
    failed = compare_at_hang(tmp_path, since=0.0)
    assert failed is not None
    assert "can't be compared: ZeroDivisionError" in failed.what


def test_file_with_an_infinite_number_is_left_out(tmp_path: Path) -> None:
    divergence_of(tmp_path, {rank: [waiting_call("all", 7)] for rank in range(4)})
    path = tmp_path / "collectives-2.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "rank": float("inf")}))
    assert [of_rank.rank for of_rank in read_calls(tmp_path, since=0.0)] == [0, 1, 3]


def test_rank_that_waits_for_nobody_is_first_although_others_lack_calls(tmp_path: Path) -> None:
    """Rank 1 hangs. Rank 0 waits for it, rank 2 for rank 0, and rank 3 for rank 1."""
    calls = {
        0: [call("02", 3), waiting_call("01", 5)],
        1: [call("13", 3), call("01", 4)],
        2: [call("02", 3), waiting_call("02", 4)],
        3: [call("13", 3), waiting_call("13", 4)],
    }
    divergence = divergence_of(tmp_path, calls, idle=[1])
    assert divergence is not None
    assert divergence.rank == 1
    assert "rank 1 waits for nobody and lacks gloo:all_reduce" in divergence.what
    for path in tmp_path.glob("collectives-1.json"):
        path.unlink()
    del calls[1]
    divergence = divergence_of(tmp_path, calls)
    assert divergence is not None
    assert divergence.what.startswith("rank 1 has written no file and lacks")


def test_rank_that_calls_its_groups_in_another_order_is_first(tmp_path: Path) -> None:
    calls = {rank: [call("all", 6), waiting_call("all", 7)] for rank in range(4)}
    calls[3] = [call("all", 6), waiting_call("13", 1)]
    divergence = divergence_of(tmp_path, calls)
    assert divergence is not None
    assert divergence.rank == 3
    assert "rank 3 waits elsewhere and lacks gloo:all_reduce" in divergence.what
    assert "number 7 of group all, in which ranks 0, 1, 2 wait" in divergence.what


def test_forgotten_calls_are_not_missing(tmp_path: Path) -> None:
    calls = {
        0: [waiting_call("all", 7)],
        1: [waiting_call("13", 900)],
        3: [waiting_call("13", 900)],
        2: [waiting_call("all", 7)],
    }
    assert divergence_of(tmp_path, calls, lost=True) is None
    divergence = divergence_of(tmp_path, {**calls, 1: [call("01", 4)]}, lost=True, idle=[1])
    assert divergence is not None
    assert divergence.rank == 1


def test_command_reads_the_files_of_the_last_hang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    assert main([]) == 2
    assert main([str(tmp_path)]) == 1
    (logs / "collectives-9.json").write_text('{"calls": 3}')
    assert main([str(tmp_path)]) == 1
    divergence_of(logs, {rank: [waiting_call("all", 7)] for rank in range(4)})
    assert main([str(tmp_path)]) == 0
    assert "4 ranks: all ranks have made the same collectives" in capsys.readouterr().out


def test_files_of_an_earlier_hang_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    divergence_of(tmp_path, {0: [waiting_call("all", 7)]})
    assert read_calls(tmp_path, since=1000.0)
    assert not read_calls(tmp_path, since=1001.0)


RANKS = 3
WRONG = 1  # the rank that calls the groups in another order
HANGING = f"""
import os, sys
from pathlib import Path

import torch
import torch.distributed as dist

from hybridtron.train.outcome import Failures
from hybridtron.train.supervisor.sections import VARIABLE, SectionPipe
from hybridtron.train.watchdog import Watchdog

folder = Path(sys.argv[1])
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=rank, world_size={RANKS})
groups = [dist.new_group(list(range({RANKS}))) for _ in range(2)]
pipe = SectionPipe({{VARIABLE: str(os.open(os.devnull, os.O_WRONLY))}})
with Watchdog(Failures(folder, rank), 600.0, pipe):
    dist.all_reduce(torch.ones(8), group=groups[0])
    print("ready", flush=True)
    for group in reversed(groups) if rank == {WRONG} else groups:
        dist.all_reduce(torch.ones(8), group=group)
"""


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(280)
def test_ranks_stuck_in_native_code_write_their_collectives_on_a_signal(tmp_path: Path) -> None:
    """The supervisor's signal comes while all ranks wait in gloo. It is repeated until all have come that far."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", HANGING, str(tmp_path), str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        divergence = None
        until = time.monotonic() + 120
        while divergence is None or "ranks 0, 2 wait" not in divergence.what:
            assert time.monotonic() < until, divergence
            for process in ranks:
                process.send_signal(STACKS)
            time.sleep(0.2)
            by_rank = read_calls(tmp_path / "logs", since=0.0)
            divergence = first_divergence(by_rank) if len(by_rank) == RANKS else None
        assert divergence.rank == WRONG
        assert f"rank {WRONG} waits elsewhere and lacks gloo:all_reduce" in divergence.what
        assert all(process.poll() is None for process in ranks)
        assert "all_reduce" in (tmp_path / "logs" / "stacks-0.txt").read_text()
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)
            process.communicate()
