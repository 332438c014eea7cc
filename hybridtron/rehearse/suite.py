"""Rehearsal suite: every recipe under every layout, on one rank for each pipeline rank.

A rehearsal simulates one rank's training step without a GPU. A rank's results are stored as a line in a file
(`benchmarks/rehearse.jsonl`), with the digest of the rehearsed code. A suite that was stopped can therefore continue:
ranks without results are rehearsed first, then ranks with results of older code.

Some recipes start from another run's weights. A rehearsal of such a recipe needs no checkpoint: it uses the model of a
recipe whose weights could be trained further (`ORIGINS`, `ORIGIN`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtron.config.check import require
from hybridtron.config.load import CONFIGS, choices_of, load, to_yaml
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import ParallelConfig
from hybridtron.planning.memory import largest_phase, plan
from hybridtron.problems import ConfigError
from hybridtron.proving.gpu.queue.digest import code, uncommented
from hybridtron.rehearse.rehearsal import different_ranks
from hybridtron.resources import PACKAGE
from hybridtron.train.jsonl import read_lines, write_whole

if TYPE_CHECKING:  # only for types; the process is created by the caller
    from hybridtron.rehearse.rehearsal import RehearsalProcess

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "TP2 + SP": (2, ("parallel.tensor=2", "parallel.sequence=true")),
    "PP2": (2, ("parallel.pipeline=2",)),
    "PP2 x VPP2": (2, ("parallel.pipeline=2", "parallel.virtual_pipeline=2")),
    "DP8": (8, ("parallel=data",)),
    "CP4": (4, ("parallel.context=4",)),
    "TP2 x PP2 x DP2": (8, ("parallel=tensor2_pipeline2",)),
}
"""Layout -> (number of processes, settings).

In names, TP is tensor, SP sequence, PP pipeline, VPP virtual pipeline, DP data, and CP context parallelism.
"""
FAMILIES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "nemotron_3_nano_30b": (
        *("16 x H100: EP8", 16),
        ("parallel.expert=8", "parallel.recompute=layer", "phases.0.micro_batch=2"),
    ),
    "granite4_h_tiny": ("8 x H100: EP8", 8, ("parallel.expert=8", "phases.0.micro_batch=2")),
    "granite4_h_small": (
        *("16 x H100: PP2 x EP4", 16),
        ("parallel.pipeline=2", "parallel.expert=4", "parallel.recompute=layer"),
    ),
    "qwen3.5_0.8b": ("8 x H100: DP8", 8, ("phases.0.micro_batch=4",)),
    "qwen3.5_4b": (
        *("8 x H100: TP2 + SP x DP4", 8),
        ("parallel.tensor=2", "parallel.sequence=true", "phases.0.micro_batch=4"),
    ),
    "qwen3.5_9b": (
        *("8 x H100: TP4 + SP x DP2", 8),
        ("parallel.tensor=4", "parallel.sequence=true", "phases.0.micro_batch=4"),
    ),
    "qwen3.5_35b_a3b": (
        *("16 x H100: EP8", 16),
        ("parallel.expert=8", "parallel.recompute=layer", "phases.0.micro_batch=2"),
    ),
    "qwen3_next_80b": (
        *("32 x H100: TP2 + SP x PP2 x EP8", 32),
        (
            *("parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "parallel.expert=8"),
            *("parallel.expert_tensor=1", "parallel.recompute=layer", "phases.0.micro_batch=2"),
        ),
    ),
    "jamba_mini": (
        *("16 x H100: TP2 + SP x PP2 x EP8", 16),
        (
            *("parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "parallel.expert=8"),
            *("parallel.expert_tensor=1", "parallel.recompute=layer", "phases.0.micro_batch=2"),
        ),
    ),
    "samba_moe_1.3b_a0.4b": ("8 x H100: EP8", 8, ("parallel.expert=8",)),
}
"""Recipe -> (layout, number of processes, settings), for recipes that are rehearsed under one layout of their own.

It is a layout on the smallest of 8, 16, 32 and 64 H100s that hold the recipe by the plan, with a tenth of the memory
left over. In names, EP is expert parallelism.
"""
FAMILIES_GPU = "h100"
ORIGINS = {
    "length/official_130m": "mamba2_130m",
    "length/official_370m": "mamba2_350m",
    "length/official_780m": "mamba2_780m",
    "length/official_1.3b": "mamba2_1.3b",
}
ORIGIN = "samba_421m"  # for the other recipes of length/, which can start from any checkpoint
EVERY_RANK = (ORIGIN, "TP2 x PP2 x DP2")  # recipe and layout of the case in which all ranks are rehearsed, as a check
REHEARSED = (
    *("architecture", "config", "data", "device.py", "engine", "mixers", "model", "ops", "optimizers", "parallel"),
    *("planning", "rehearse"),
)
"""Files and folders of the package that a rehearsal depends on. The digest covers these files and the recipes."""


@dataclass(frozen=True)
class RecipeCase:
    """A recipe under a layout."""

    recipe: str
    layout: str

    @property
    def world(self) -> int:
        """Number of processes."""
        return self._layout[0]

    @property
    def _layout(self) -> tuple[int, tuple[str, ...]]:
        """Number of processes, and settings."""
        if self.layout in LAYOUTS:
            return LAYOUTS[self.layout]
        _, world, settings = FAMILIES[self.recipe]
        return world, settings

    def plan(self) -> RunPlan:
        """Return the run's plan. Raises ConfigError if the recipe can't be trained under the layout."""
        run_plan = RunPlan.of(load([*startable(self.recipe), *self._layout[1]]))
        require(run_plan, self.world)
        return run_plan


def origin_of(recipe: str) -> str | None:
    """Return the recipe whose model a rehearsal of `recipe` uses, or None if `recipe` starts from random weights."""
    if recipe.startswith("length/"):
        return ORIGINS.get(recipe, ORIGIN)
    return None


def startable(recipe: str) -> list[str]:
    """Return the settings that load a recipe.

    If the recipe starts from a checkpoint, `run.weights` names a temporary folder with only a checkpoint's
    configuration.
    """
    if (origin := origin_of(recipe)) is None:
        return [f"recipe={recipe}"]
    weights = _checkpoint_of(origin, "official" in recipe)
    return [f"recipe={recipe}", "data.path=/data", f"run.weights={weights}"]


@cache
def _checkpoint_of(recipe: str, imported: bool) -> str:
    """Write a temporary folder in place of the recipe's checkpoint, and return its path.

    The folder has only a configuration. With `imported`, the configuration has no phases, as in a folder with weights
    imported from Hugging Face.
    """
    config = load([f"recipe={recipe}", "data.path=/data"])
    folder = Path(tempfile.mkdtemp(prefix="rehearsed-weights-"))
    (folder / "config.yaml").write_text(to_yaml(dataclasses.replace(config, phases=[]) if imported else config))
    return str(folder)


def layouts_of(recipe: str) -> list[str]:
    """Return the names of a recipe's layouts."""
    if recipe in FAMILIES:
        return [FAMILIES[recipe][0]]
    return list(LAYOUTS)


def all_cases(recipes: Sequence[str] = ()) -> list[RecipeCase]:
    """Return the cases for these recipes. If none is given, return the cases for all recipes, with ablations last."""
    names = recipes or sorted(choices_of("recipe"), key=lambda name: (name.startswith("ablations/"), name))
    return [RecipeCase(name, layout) for name in names for layout in layouts_of(name)]


def slice_of(cases: Sequence[RecipeCase], index: int, count: int, seed: str) -> list[RecipeCase]:
    """Return the cases in slice `index` of `count` slices. A hash of `seed` and the case determines its slice."""
    return [case for case in cases if zlib.crc32(f"{seed} {case}".encode()) % count == index]


@cache
def code_digest() -> str:
    """Return a digest over all files that a rehearsal's numbers depend on.

    Comments, docstrings and blank lines in Python files do not change it, nor do comment lines in YAML files.
    """
    digest = hashlib.blake2b(digest_size=6)
    files = [path for name in REHEARSED for path in (PACKAGE / name, *(PACKAGE / name).rglob("*"))]
    for path in sorted([*files, *CONFIGS.rglob("*.yaml")]):
        if path.suffix in (".py", ".cpp", ".yaml", ".json"):
            digest.update(f"{path.name}\n{rehearsed_text(path)}\n".encode())
    return digest.hexdigest()


def rehearsed_text(path: Path) -> str:
    """Return a file's text without comments, docstrings and blank lines, on which no rehearsal depends."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return code(text)
    if path.suffix == ".yaml":
        return "\n".join(uncommented(text))
    return text


Key = tuple[str, str, int | None]
"""Key of a record: recipe, layout and rank. The rank is None if the recipe can't be trained under the layout."""


class SuiteRecords:
    """A suite's results in a file, with a line for each case and rank. Several processes may append lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, case: RecipeCase, rank: int | None, result: dict[str, Any]) -> None:
        """Append a line with a rank's results. `read` ignores older lines with the same case and rank."""
        record = {**dataclasses.asdict(case), "rank": rank, "code": code_digest(), **result}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def read(self) -> dict[Key, dict[str, Any]]:
        """Return the newest record for each key.

        A case that can't be trained has one record, with the reason. Any other case has a record for each rank. If the
        code has changed, the file may contain records of both kinds for a case. Then only records of the newest
        record's kind are returned.
        """
        newest: dict[Key, dict[str, Any]] = {}
        for record in read_lines(self.path):
            recipe, layout, rank = key = record["recipe"], record["layout"], record["rank"]
            others = [
                other for other in newest if other[:2] == (recipe, layout) and (other[2] is None) != (rank is None)
            ]
            for other in (key, *others):
                newest.pop(other, None)
            newest[key] = record
        return newest

    def tidy(self) -> None:
        """Rewrite the file with only the newest records, in the order of cases and ranks.

        No other process may append lines at the same time.
        """
        newest = self.read()
        order = {(case.recipe, case.layout): number for number, case in enumerate(all_cases())}
        kept = sorted((key for key in newest if key[:2] in order), key=lambda key: (order[key[:2]], key[2] or 0))
        write_whole(self.path, "".join(json.dumps(newest[key]) + "\n" for key in kept))


def ranks_of(case: RecipeCase, parallel: ParallelConfig) -> Sequence[int]:
    """Return the ranks to rehearse in a case: all ranks for EVERY_RANK, else one rank for each pipeline rank."""
    if (case.recipe, case.layout) == EVERY_RANK:
        return range(case.world)
    return different_ranks(parallel, case.world)


def missing(
    cases: Sequence[RecipeCase], records: SuiteRecords, keeps: bool = False
) -> list[tuple[RecipeCase, RunPlan, int]]:
    """Return the ranks to rehearse: first ranks without a record, then ranks with a record from older code.

    With `keeps`, ranks with a record from older code are not returned. If a recipe can't be trained under a layout,
    this function writes a record with the reasons.
    """
    shown = records.read()
    digest = code_digest()
    never = []
    older = []
    for case in cases:
        if (refused := shown.get((case.recipe, case.layout, None))) and (keeps or refused["code"] == digest):
            continue
        try:
            run_plan = case.plan()
        except ConfigError as error:
            records.write(case, None, {"refused": [str(problem) for problem in error.problems]})
            continue
        for rank in ranks_of(case, run_plan.config.parallel):
            record = shown.get((case.recipe, case.layout, rank))
            if record is None:
                never.append((case, run_plan, rank))
            elif not keeps and record["code"] != digest:
                older.append((case, run_plan, rank))
    return never + older


def rehearse_all(
    process: RehearsalProcess,
    todo: Sequence[tuple[RecipeCase, RunPlan, int]],
    records: SuiteRecords,
    limit_s: float,
    say: Callable[[str], None],
    compiles: bool = True,
) -> bool:
    """Rehearse the ranks in `todo` in order, and record their results, until `limit_s` seconds have passed.

    Return True if all ranks are done. The function `say` is called with lines about the progress. `compiles` is passed
    to `RehearsalProcess.rehearse`.
    """
    start = time.monotonic()
    for number, (case, run_plan, rank) in enumerate(todo):
        spent = time.monotonic() - start
        if spent > limit_s:
            say(f"stopped after {spent:.0f} s: {len(todo) - number} of {len(todo)} ranks are not rehearsed yet")
            return False
        before = time.monotonic()
        try:
            result = rehearse_case(process, case, run_plan, rank, compiles)
        except Exception as error:
            # record the failure, and continue with the remaining ranks
            lines = [line for line in str(error).splitlines() if line.strip()]
            result = {"failed": f"{type(error).__name__}: {(lines or [''])[0]}"}
            say(f"{case.recipe}, {case.layout}, rank {rank} failed: {result['failed']}")
        records.write(case, rank, result)
        now = time.monotonic()
        left = (now - start) / (number + 1) * (len(todo) - number - 1)
        say(
            f"{number + 1} of {len(todo)}: {case.recipe}, {case.layout}, rank {rank}: {now - before:.0f} s, "
            f"{left / 60:.0f} min left"
        )
    return True


def rehearse_case(
    process: RehearsalProcess, case: RecipeCase, run_plan: RunPlan, rank: int, compiles: bool
) -> dict[str, Any]:
    """Rehearse one rank of a case, and return the values to record."""
    phase = largest_phase(run_plan)
    rehearsed = process.rehearse(phase, case.world, rank, compiles)
    from hybridtron.rehearse.report import forms_of, shown_parts

    traffic = plan(phase, case.world).ranks[rehearsed.step.place.pipeline.rank].traffic
    return {
        "gpu": process.gpu.name,
        "phase": phase.settings.name,
        "pipeline_rank": rehearsed.step.place.pipeline.rank,
        "forms": forms_of(rehearsed),
        "planned_sent": traffic.total,
        **shown_parts(rehearsed),
    }
