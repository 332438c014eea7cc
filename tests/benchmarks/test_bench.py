"""Every benchmark at tiny sizes, as a person runs it, and the FLOP count against torch's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hybridtron.architecture.table import architecture
from hybridtron.cli.main import main
from hybridtron.data.batch import SeqInfo
from hybridtron.ops.dispatch import force
from hybridtron.planning.count import count
from hybridtron.proving.measuring import BenchReport, Seconds, Timing, Timings, difference, per_token, time_in_turns
from tests.conftest import small_config, small_model

ROOT = Path(__file__).parents[2]
TABLES = {
    "mixer": 1,
    "mamba2_mixer": 1,
    "scan": 2,
    "recurrences": 1,
    "attention": 1,
    "span": 2,
    "sparse": 2,
    "experts": 1,
    "states": 2,
    "step": 1,
    "llama": 1,
    "cores": 4,
    "context": 1,
    "data": 3,
    "checkpoint": 3,
    "fp8": 1,
    "rounding": 2,
    "optimizer": 1,
    "decode": 2,
    "prefill": 1,
    "scoring": 1,
}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools/bench.py"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=280,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "mixer")) for n in TABLES])
def test_a_benchmark_writes_its_page(name: str, tmp_path: Path) -> None:
    output = tmp_path / f"{name}.md"
    done = bench(name, "--quick", "--repetitions", "2", "--output", str(output))
    assert done.returncode == 0, done.stderr
    page = output.read_text()
    assert f"`hybridtron bench {name} --quick --repetitions 2`" in page
    assert "torch 2." in page
    assert len(re.findall(r"^\| ---", page, re.MULTILINE)) == TABLES[name]
    assert str(ROOT) not in page
    assert " ms" not in page
    ratios = [float(ratio) for ratio in re.findall(r"\| ([\d.]+)x (?=\|)", page.replace(",", ""))]
    if name != "rounding":  # losses of a few tiny steps may be equal, and then no ratio is shown
        assert ratios
        assert all(ratio > 0 for ratio in ratios)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing"], "nothing"),
        (["scan", "model.width=3"], "scan"),
        (["step", "model.widht=3"], "model.widht"),
        (["mixer", "--threads", "0"], "--threads"),
    ],
)
def test_wrong_arguments_exit_with_code_2(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["bench", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert named in capsys.readouterr().err


def test_timed_forms_alternate() -> None:
    calls = []
    timings = time_in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert "".join(calls) == "ab" + "ab" * 3
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3]


def test_a_returned_loss_is_not_taken_for_a_time() -> None:
    """A form's return value counts as a time only if the form is declared to return one."""
    (timing,) = time_in_turns({"a form that returns its loss": lambda: 7.66}, 1).values()
    assert timing.fastest < 1


def test_a_sweep_alternates_over_all_lengths() -> None:
    calls = []
    report = BenchReport("sweep", repetitions=1)
    forms = {length: {"a": partial(calls.append, length), "b": lambda: Seconds(2.0)} for length in (1, 2)}
    measured = report.sweep(forms)
    assert calls == [1, 2, 1, 2]
    assert measured[2]["b"].seconds == (2.0,)
    report.ratios("time", "tokens", {**measured, 3: Timings(b=measured[2]["b"])}, [("b", "b"), ("b", "a")], {})
    assert [row[:2] for row in report.tables[0].cells] == [("1", "1.00x"), ("2", "1.00x"), ("3", "1.00x")]
    assert report.tables[0].cells[2][2] == ""


def test_time_per_token_is_relative_to_the_first_length() -> None:
    measured = {4: Timings(a=Timing((1.0,))), 8: Timings(a=Timing((3.0,)))}
    assert per_token(measured, "a") == ["1.00x", "1.50x"]


def test_forms_with_different_results_are_refused() -> None:
    whole = [torch.tensor([2.0, 100.0])]
    assert difference(whole, whole) == 0
    with pytest.raises(AssertionError, match="1"):
        difference([torch.tensor([3.0, 100.0])], whole)


def test_the_fastest_round_counts() -> None:
    timing = Timing((3.0, 1.0, 2.0))
    assert timing.fastest == 1.0
    assert timing.spread == pytest.approx(1.0)


@pytest.mark.parametrize("tied", [True, False])
def test_projection_costs_equal_those_of_torch(tied: bool) -> None:
    """With the reference forms, every `mm` of the forward pass is a projection or the head."""
    config = small_config("(M-W-)*2F-S", tie_embeddings=tied)
    length = 24
    model = small_model("(M-W-)*2F-S", tie_embeddings=tied)
    counter = FlopCounterMode(display=False)
    with counter, force("reference"), torch.no_grad():
        model(torch.zeros(2, length, dtype=torch.int64), None, SeqInfo.stream(2, length))
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    parts = count(architecture(config), length).flops_by_part
    assert (parts["projections"] + parts["head"]) * 2 * length == pytest.approx(counted, rel=0.01)
