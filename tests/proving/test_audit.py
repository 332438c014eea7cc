"""The audit as a command: its exit codes, its tables, and recipes made small."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import pytest
from rich.table import Table

from hybridtron.architecture.table import Architecture, architecture
from hybridtron.cli.main import main
from hybridtron.config.check import check
from hybridtron.config.checks.parallel import uncuttable
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config, ParallelConfig
from hybridtron.ops.documents import document_starts
from hybridtron.parallel.pool import Pool, WorkerError
from hybridtron.proving.audit import audit as audit_module
from hybridtron.proving.audit import table as audit_table
from hybridtron.proving.audit.audit import Audit, micro_batches
from hybridtron.proving.audit.cases import ARCHITECTURES, LAYOUTS, MICRO_BATCH, Layout, shrunk, table
from hybridtron.proving.audit.differences import PRECISIONS
from tests import distributed
from tests.recipes import RECIPES

SMALL = ["model.pattern=M-W", "model.layers.W.kv_heads=1"]


class KeptPool(Pool):
    """Stands in for a pool of the command's own: the session's, which nobody closes."""

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        self.gpus = gpus
        self.run = distributed.run_distributed  # type: ignore[method-assign]

    def close(self) -> None: ...


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> object:
    """Runs the command with these arguments, and returns its exit code."""
    monkeypatch.setattr(audit_table, "Pool", KeptPool)

    def run(arguments: Sequence[str]) -> int:
        return main(["audit", *arguments])

    return run


@pytest.mark.gloo
def test_agreeing_layout_exits_with_0(audit, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit([*SMALL, "parallel.tensor=2", "parallel.pipeline=2"]) == 0
    said = capsys.readouterr().out
    assert "2 runs" in said
    assert "tp2-pp2" in said
    assert "float64" in said
    assert "fp32" in said


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["gla", pytest.param("retnet", marks=pytest.mark.slow)])
def test_rounding_that_a_norm_enlarges_is_allowed(kind: str, audit, capsys: pytest.CaptureFixture[str]) -> None:
    """A query is nearly orthogonal to the only key that it sees: the norm of its head's output enlarges rounding."""
    settings = ["recipe=laptop", f"model.layers.M={{kind: {kind}}}", "parallel.tensor=2"]
    assert audit(settings) == 0
    assert "2 runs" in capsys.readouterr().out
    if kind == "gla":
        assert audit([*settings, "--fake-bug", "gla_gate_gradient"]) == 1


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(("bug", "code"), [([], 0), (["--fake-bug", "kv_gradient"], 1)])
def test_layouts_over_gpus_are_compared_with_one_gpu(
    bug: list[str], code: int, audit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the GPUs are missing, because the session's pool hands out none."""
    monkeypatch.setattr(audit_table, "visible_gpus", lambda: ["4", "5"])
    monkeypatch.setattr(audit_module, "serial_step", lambda *_: pytest.fail("the truth is one rank's"))
    assert audit([*SMALL, "--gpus", "--layouts", "tp2,tp2-pp2", *bug]) == code
    printed = capsys.readouterr()
    assert "1 runs" in printed.out
    assert ("1 differ" in printed.out) == (code == 1)
    assert "float64" not in printed.out
    assert "4 GPUs" in printed.err


def test_audit_over_one_gpu_exits_with_2(audit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_table, "visible_gpus", lambda: ["0"])
    assert audit([*SMALL, "--gpus", "--layouts", "tp2"]) == 2


@pytest.mark.gloo
def test_planted_bug_exits_with_1_and_names_what_differs(audit, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit([*SMALL, "--layouts", "tp2", "--fake-bug", "kv_gradient"]) == 1
    said = capsys.readouterr().out
    assert "2 differ" in said
    assert "layers.2.mixer.kv.weight" in said


@pytest.mark.gloo
def test_failed_run_exits_with_1_and_its_reason(
    audit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_table, "PRECISIONS", audit_table.PRECISIONS[:1])
    assert audit([*SMALL, "--layouts", "pp2", "--timeout", "0.01"]) == 1
    assert "finish" in capsys.readouterr().out


class StoppedAudit(Audit):
    """Stands in for an audit whose parallel step raises an exception."""

    def compare(self, *_: object) -> NoReturn:
        raise WorkerError("TypeError")


def test_planted_bug_that_stops_the_step_does_not_count_as_a_difference() -> None:
    case = next(table())
    stopped = StoppedAudit(distributed.pool())
    assert audit_table.compare(stopped, case, PRECISIONS[0], None, Table(*"123456789"))
    with pytest.raises(WorkerError):
        audit_table.compare(stopped, case, PRECISIONS[0], "micro_batch_scale", Table(*"123456789"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["parallel.tensor=3"], "parallel.tensor"),
        (["parallel.tensr=2"], "tensor"),
        (["--layouts", "tp3"], "tp4"),
        (["--fake-bug", "tied_gradiant"], "tied_gradient"),
        (["--cases", "samb"], "samba"),
        (["--cases", "samba", "parallel.tensor=2"], "--layouts NAME"),
        (["--cases", "samba", "--data", "2"], "--data 2"),
        (["model.pattern=M-", "--layouts", "pp4"], "parallel.pipeline"),
        (["model.layers.-.hidden=511", "parallel.tensor=2"], "511"),
    ],
)
def test_bad_input_exits_with_2(audit, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert audit(arguments) == 2
    assert said in capsys.readouterr().err


def test_list_names_every_layout_case_and_bug(audit, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(["--list"]) == 0
    said = capsys.readouterr().out
    for name in (*LAYOUTS, *ARCHITECTURES, *audit_table.BUGS):
        assert name in said


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_shrunk_recipe_keeps_its_shape_and_fits_a_layout(recipe: str) -> None:
    config = replace(load([f"recipe={recipe}"]), parallel=ParallelConfig())
    layout = Layout(tensor=2, sequence=True, pipeline=2)
    if uncuttable(architecture(config.model), 2):
        layout = replace(layout, tensor=1)
    small = shrunk(replace(config, parallel=layout.on(config.parallel)), data=1)
    assert check(RunPlan.of(small)) == []
    before = architecture(config.model)
    after = architecture(small.model)
    assert after.letters == before.letters
    assert [type(spec) for spec in after.specs] == [type(spec) for spec in before.specs]
    assert heads_of(after) == heads_of(before)
    assert small.model.tie_embeddings == config.model.tie_embeddings
    assert small.model.width <= 384  # 4 channels for each head; Nemotron 3 Nano 4B has 96 heads of Mamba-2


def heads_of(arch: Architecture) -> list[tuple[int, int]]:
    return [(getattr(spec, "heads", 0), getattr(spec, "kv_heads", 0)) for spec in arch.specs]


def test_audit_data_has_boundaries_unequal_masks_and_a_fully_masked_row() -> None:
    config: Config = shrunk(replace(load([]), parallel=ParallelConfig()), data=2)
    batches = micro_batches(resolve(config)[0])
    counts = [int(batch.mask_BL.sum()) for batch in batches]
    assert len(batches) == 4
    assert len(set(counts)) == 4
    assert not batches[0].mask_BL[-1].any()
    assert all(batch.tokens_BL.shape[0] == MICRO_BATCH for batch in batches)
    borders = 0
    for batch in batches:
        starts = document_starts(batch.seq.documents_BL)
        assert starts is not None
        assert (batch.seq.positions_BL[starts] == 0).all()
        assert (batch.seq.positions_BL[:, 1:][~starts[:, 1:]] > 0).all()
        borders += int(starts.sum())
    assert borders > 8


def test_list_has_the_number_of_ranks_of_every_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """A layout's name holds its size along each axis: cp2-tp2 takes four ranks."""
    assert main(["audit", "--list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    listed = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[0] in LAYOUTS}
    sizes = {name: re.findall(r"(?:tp|pp|cp|dp)(\d)", name) for name in LAYOUTS}
    assert listed == {name: math.prod(map(int, axes)) for name, axes in sizes.items()}
