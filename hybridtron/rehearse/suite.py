"""Rehearsal suite: every recipe under every layout, on each rank that differs.

A rank's results are stored as a line in a file (`benchmarks/rehearse.jsonl`), with a digest of the rehearsed code. So a
suite that was stopped can continue. After a change to the code, missing results come first, then older ones are
replaced. Recipes that start from other weights are rehearsed on the model that they are for (`ORIGINS`), whose
configuration replaces a checkpoint.
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

from hybridtron.config.check import check
from hybridtron.config.load import CONFIGS, choices_of, load, to_yaml
from hybridtron.config.schema import Config
from hybridtron.planning.memory import largest_phase, plan
from hybridtron.problems import ConfigError
from hybridtron.rehearse.rehearsal import different_ranks
from hybridtron.shipped import PACKAGE
from hybridtron.train.records import read_lines, write_whole

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
"""Layout -> number of processes, and settings."""
ORIGINS = {
    "length/official_130m": "mamba2_130m",
    "length/official_370m": "mamba2_350m",
    "length/official_780m": "mamba2_780m",
    "length/official_1.3b": "mamba2_1.3b",
}
ORIGIN = "samba_421m"  # model for recipes that continue any checkpoint: it has both kinds of states
EVERY_RANK = (ORIGIN, "TP2 x PP2 x DP2")  # the case whose ranks are all rehearsed, to see which are equal
REHEARSED = (
    *("architecture", "config", "data", "device.py", "engine", "mixers", "model", "ops", "optimizers", "parallel"),
    *("planning", "rehearse"),
)
"""Code that a rehearsal depends on; the digest covers these files and the recipes."""


@dataclass(frozen=True)
class RecipeCase:
    """A recipe under a layout."""

    recipe: str
    layout: str

    @property
    def world(self) -> int:
        """Number of processes."""
        return LAYOUTS[self.layout][0]

    def config(self) -> Config:
        """Load the configuration as it would be trained. Raises ConfigError if the recipe refuses the layout."""
        config = load([*startable(self.recipe), *LAYOUTS[self.layout][1]])
        if problems := check(config, self.world):
            raise ConfigError(problems)
        return config


def origin_of(recipe: str) -> str | None:
    """Return the recipe whose weights this one starts from, or None."""
    if recipe.startswith("length/"):
        return ORIGINS.get(recipe, ORIGIN)
    return None


def startable(recipe: str) -> list[str]:
    """Return the settings that load a recipe. If it starts from a checkpoint, they name a simulated one."""
    if (origin := origin_of(recipe)) is None:
        return [f"recipe={recipe}"]
    weights = _checkpoint_of(origin, "official" in recipe)
    return [f"recipe={recipe}", "data.path=/data", f"run.weights={weights}"]


@cache
def _checkpoint_of(recipe: str, imported: bool) -> str:
    """Write a folder that a configuration accepts as the recipe's checkpoint, and return its path."""
    config = load([f"recipe={recipe}", "data.path=/data"])
    folder = Path(tempfile.mkdtemp(prefix="rehearsed-weights-"))
    (folder / "config.yaml").write_text(to_yaml(dataclasses.replace(config, phases=[]) if imported else config))
    return str(folder)


def all_cases(recipes: Sequence[str] = ()) -> list[RecipeCase]:
    """List these recipes' cases, or those of all recipes; ablations come last."""
    names = recipes or sorted(choices_of("recipe"), key=lambda name: (name.startswith("ablations/"), name))
    return [RecipeCase(name, layout) for name in names for layout in LAYOUTS]


def slice_of(cases: Sequence[RecipeCase], index: int, count: int, seed: str) -> list[RecipeCase]:
    """Return one of `count` slices; another seed gives other slices."""
    return [case for case in cases if zlib.crc32(f"{seed} {case}".encode()) % count == index]


@cache
def code_digest() -> str:
    """Return a digest over all files that a rehearsal's numbers depend on."""
    digest = hashlib.blake2b(digest_size=6)
    files = [path for name in REHEARSED for path in (PACKAGE / name, *(PACKAGE / name).rglob("*"))]
    for path in sorted([*files, *CONFIGS.rglob("*.yaml")]):
        if path.suffix in (".py", ".cpp", ".yaml", ".json"):
            digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


Key = tuple[str, str, int | None]
"""Key of a record: recipe, layout, and rank, or None for a case that is refused."""


class SuiteRecords:
    """Results of a suite in a file, with a line for each case and rank. Several processes may add lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, case: RecipeCase, rank: int | None, found: dict[str, Any]) -> None:
        """Append a line; it replaces older lines with the same case and rank."""
        record = {**dataclasses.asdict(case), "rank": rank, "code": code_digest(), **found}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def read(self) -> dict[Key, dict[str, Any]]:
        """Read the newest line of each key. For a case they are either its refusal or its ranks."""
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
        """Rewrite the file with only the newest lines, by recipe. No other process may be writing."""
        newest = self.read()
        order = {(case.recipe, case.layout): number for number, case in enumerate(all_cases())}
        kept = sorted((key for key in newest if key[:2] in order), key=lambda key: (order[key[:2]], key[2] or 0))
        write_whole(self.path, "".join(json.dumps(newest[key]) + "\n" for key in kept))


def ranks_of(case: RecipeCase, config: Config) -> Sequence[int]:
    """Return the ranks to rehearse in a case: one for each pipeline rank, and all ranks for EVERY_RANK."""
    if (case.recipe, case.layout) == EVERY_RANK:
        return range(case.world)
    return different_ranks(config.parallel, case.world)


def missing(
    cases: Sequence[RecipeCase], records: SuiteRecords, keeps: bool = False
) -> list[tuple[RecipeCase, Config, int]]:
    """List the ranks to rehearse: first those without a record, then those recorded with older code.

    The latter are left out if `keeps` is set. Cases that are refused are recorded here.
    """
    shown = records.read()
    digest = code_digest()
    never = []
    older = []
    for case in cases:
        if (refused := shown.get((case.recipe, case.layout, None))) and (keeps or refused["code"] == digest):
            continue
        try:
            config = case.config()
        except ConfigError as error:
            records.write(case, None, {"refused": [str(problem) for problem in error.problems]})
            continue
        for rank in ranks_of(case, config):
            record = shown.get((case.recipe, case.layout, rank))
            if record is None:
                never.append((case, config, rank))
            elif not keeps and record["code"] != digest:
                older.append((case, config, rank))
    return never + older


def rehearse_all(
    process: RehearsalProcess,
    todo: Sequence[tuple[RecipeCase, Config, int]],
    records: SuiteRecords,
    limit_s: float,
    say: Callable[[str], None],
    compiles: bool = True,
) -> bool:
    """Rehearse and record until all is done or the time limit is over. Returns True if all is done."""
    start = time.monotonic()
    for number, (case, config, rank) in enumerate(todo):
        spent = time.monotonic() - start
        if spent > limit_s:
            say(f"stopped after {spent:.0f} s: {len(todo) - number} of {len(todo)} are left")
            return False
        before = time.monotonic()
        try:
            result = rehearse_case(process, case, config, rank, compiles)
        except Exception as error:
            # a recipe that fails must not hide the others; the page and the exit code report it
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
    process: RehearsalProcess, case: RecipeCase, config: Config, rank: int, compiles: bool
) -> dict[str, Any]:
    """Rehearse one rank in a case, and return the values to record."""
    phase = largest_phase(config)
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
