"""Runs for a paper's claims are rehearsed on the one H100 that they need, phase by phase, as `fit` cuts them.

Runs that differ only in data, rates or lengths of training are rehearsed once. One takes three to twenty seconds of a
processor. Joint recall with sparse attention beside Mamba-2 is left out: its keys of 64 channels in fp32 are too wide
for the kernels, and the tiles that are used then have shapes that depend on values.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hybridtron.architecture.table import architecture
from hybridtron.config.load import load, to_plain
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config
from hybridtron.ops.sparse.triton import FP32_SIZE
from hybridtron.planning.activations import MARGIN, MARGIN_FROM
from hybridtron.planning.fit import fit, settings_of
from hybridtron.planning.rates import GPUS, HEAD_ROOM
from studies.papers.__main__ import PAPERS
from studies.papers.on_gpu import Chain, chain_of, config_of, loadable, runs_of
from tests.rehearse.programs import PATIENT, printed_by

H100 = GPUS["h100"]
PARTS = 10  # of all runs
NO_STEP = {"run", "optim", "checkpoint"}  # sections that change nothing of what a step computes
NO_SHAPE = {"name", "tokens", "lr", "lr_piece", "data", "dropout"}  # keys of a phase


def shape(chain: Chain) -> str:
    """Return the part of a run's configuration that decides the computation of a step."""
    plain = {name: section for name, section in to_plain(config_of(chain)).items() if name not in NO_STEP}
    plain["data"] = plain["data"]["documents"]
    plain["states"] = plain["states"]["mode"]
    plain["phases"] = [{k: v for k, v in phase.items() if k not in NO_SHAPE} for phase in plain["phases"]]
    return json.dumps(plain)


def by_tiles(config: Config) -> bool:
    """Return True if its sparse attention has keys that are too wide for the kernels."""
    sparse = [spec for spec in architecture(config.model).specs if getattr(spec, "sparse", None) is not None]
    return config.precision.name == "fp32" and any(vars(spec)["state"] > FP32_SIZE for spec in sparse)


@cache
def chains() -> list[tuple[str, Chain]]:
    """Return one run of each shape among every claim's runs, with the paper's name."""
    by_shape: dict[str, tuple[str, Chain]] = {}
    for name, paper in PAPERS.items():
        for runs in (runs_of(claim.on_gpu) for claim in paper.claims if claim.on_gpu):
            for run in runs:
                chain = chain_of(run, runs)
                if not by_tiles(config_of(chain)):
                    by_shape.setdefault(shape(chain), (name, chain))
    return list(by_shape.values())


def rehearsed(part: list[tuple[str, Chain]], folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Rehearse all phases of each run; return their settings and reports."""
    jobs = []
    for number, (_, chain) in enumerate(part):
        settings = loadable(chain, folder / str(number))
        config = load(settings)
        cut = settings_of(fit(RunPlan.of(config), 1, H100.memory)[0], config)
        jobs += [([*settings, *cut], 1, 0, False, index) for index in range(len(config.phases))]
    reports = printed_by("steps", json.dumps(jobs), processor_s=1600)
    return [(" ".join(job[0]), report) for job, report in zip(jobs, reports, strict=True)]


@pytest.mark.slow
@PATIENT
@pytest.mark.parametrize("part", range(PARTS))
def test_runs_of_claims_fit_one_h100_and_wait_once_a_step(part: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    for what, report in rehearsed(chains()[part::PARTS], tmp_path):
        memory = report["memory"]
        assert memory["peak"] <= (1 + MARGIN) * (1 - HEAD_ROOM) * H100.memory, what
        if memory["peak"] >= MARGIN_FROM:
            assert memory["peak"] <= (1 + MARGIN) * memory["planned"], what
        assert (report["per_micro_batch"]["waits"], report["once"]["waits"]) == (0, 1), what


@pytest.mark.slow
def test_every_paper_has_runs_of_one_gpu() -> None:
    assert {paper for paper, _ in chains()} == PAPERS.keys()
