"""The test of a claim on one H100: its runs, their expected hours, and the page's third column.

Hours are modelled (`hybridtron rehearse`), not measured: none of these runs was made on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config
from hybridtron.planning.rates import HOST_S
from hybridtron.problems import Unusable, did_you_mean
from hybridtron.sweep.grid import SweepRun, narrow, read, with_starts
from hybridtron.train.jsonl import read_lines, read_record
from studies.papers import speed
from studies.papers.claim import Claim, OnGpu, Table
from studies.papers.material import MATERIAL
from studies.results import ROOT, commit

OLD_LAUNCH_S = 6e-6  # host seconds per launch in records that do not name them
RUNS = {False: "runs/gpu", True: "runs/full"}
"""The folders of sweeps: of runs shorter than the paper's (False), and of its size (True)."""
SWEEPS = ROOT / "studies/sweeps"
WEIGHTS = "run.weights="
MICRO_BATCH = "phases.0.micro_batch="


def runs_of(on_gpu: OnGpu, full: bool = False) -> list[SweepRun]:
    """Return all runs to train: those that the claim reads, and those that they start from.

    With `full` they have the paper's size.
    """
    settings = on_gpu.smaller
    if full:
        settings = ()
    return list(narrow(read(SWEEPS / f"{on_gpu.sweep}.yaml", settings), on_gpu.only).runs)


def read_runs(on_gpu: OnGpu) -> list[SweepRun]:
    """Return the runs that the claim reads."""
    return [run for run in runs_of(on_gpu) if run.variant in on_gpu.only or run.name in on_gpu.only]


Chain = tuple[tuple[str, ...], ...]


def chain_of(run: SweepRun, runs: Sequence[SweepRun]) -> Chain:
    """Return the settings of a run and its predecessors, beginning with the first run."""
    by_name = {other.name: other for other in runs}
    return tuple(reversed([other.settings for other in with_starts(run, by_name)]))


@cache
def config_of(chain: Chain) -> Config:
    """Return the checked configuration of a chain's last run.

    Weights that are not on this machine are replaced by configurations of the same model.
    """
    from hybridtron.config.check import require
    from hybridtron.config.load import load

    with TemporaryDirectory() as folder:
        config = load(loadable(chain, Path(folder)))
        require(RunPlan.of(config))
        return config


def loadable(chain: Chain, folder: Path) -> list[str]:
    """Return the last run's settings, in which its starting weights are replaced by stand-ins in `folder`."""
    *before, last = chain
    settings = [_stood_in(text, folder) for text in last]
    if before:
        settings.append(f"{WEIGHTS}{saved(config_of(tuple(before)), folder / 'before')}")
    return settings


def saved(config: Config, path: Path) -> Path:
    """Write a configuration to `path`, in place of a run's folder or an imported model's. Returns the path."""
    from hybridtron.config.load import to_yaml

    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(config))
    return path


def _stood_in(setting: str, folder: Path) -> str:
    """Replace imported weights in a setting by a configuration of a recipe with the same model."""
    from hybridtron.config.load import load

    name = setting.removeprefix(WEIGHTS)
    if name == setting:
        return setting
    path = folder / name
    if not path.exists():
        saved(load([f"recipe={MATERIAL[name].like}"]), path)
    return f"{WEIGHTS}{path}"


def hours(on_gpu: OnGpu) -> dict[str, float]:
    """Return the expected hours of each run on one H100."""
    runs = runs_of(on_gpu)
    return {run.name: on_gpu.hours or expected(chain_of(run, runs)) for run in runs}


@cache
def expected(chain: Chain) -> float:
    """Return the expected hours of a chain's last run.

    Three estimates are made, and the longest one counts: the planner's, for its fastest layout; a rehearsal's of the
    device, which is for an H200, with more bandwidth than an H100; and the host's, which launches the rehearsed
    kernels. Raises Unusable if no layout fits.
    """
    from hybridtron.config.resolve import resolve
    from hybridtron.planning.fit import fit
    from hybridtron.planning.rates import GPUS

    config = config_of(chain)
    (phase,) = resolve(config)
    layouts = fit(RunPlan.of(config), 1, GPUS["h100"].memory)
    if not layouts:
        raise Unusable(f"{' '.join(chain[-1])} fits into no layout of one H100", code="does-not-fit")
    recipe = next(text.removeprefix("recipe=") for text in chain[-1] if text.startswith("recipe="))
    rate, launches = rehearsed(recipe)
    launches *= recipes_micro_batch(chain) / phase.settings.micro_batch
    rehearsal = phase.end_step * phase.settings.tokens_per_step * max(1 / rate, HOST_S * launches)
    return max(layouts[0].seconds * phase.end_step, rehearsal) / 3600


def rehearsed(recipe: str) -> tuple[float, float]:
    """Return a recipe's tokens per second on one GPU, and its kernel launches per token, by the rehearsal.

    A recipe without a rehearsal gives infinity and 0. One of eight data-parallel GPUs counts. If small batches do not
    divide by eight, the two stages of a pipeline count, one after the other on one GPU: they include waits for each
    other, so that hours are rather too long.
    """
    lines = read_lines(ROOT / "benchmarks/rehearse.jsonl")
    ran = [line for line in lines if line["recipe"] == recipe and "tokens_per_second" in line]
    alone = [line for line in ran if line["layout"] == "DP8"]
    stages = {line["rank"]: line for line in ran if line["layout"] == "PP2"}
    parts = [*stages.values()]
    if alone:
        parts = [min(alone, key=lambda line: line["tokens_per_second"])]
    if not parts:
        return math.inf, 0.0
    seconds = sum(1 / line["tokens_per_second"] for line in parts)  # a token's
    # the share is the host's time at the seconds a launch of the record, divided by the device's time, which is nearly
    # all of the step
    launches = sum(
        line["launch_share"] / line["tokens_per_second"] / line.get("launch_s", OLD_LAUNCH_S) for line in parts
    )
    return 1 / seconds, launches


def recipes_micro_batch(chain: Chain) -> int:
    """Return the micro-batch of the rehearsed recipe, which the chain's last run may override."""
    *before, last = chain
    settings = tuple(text for text in last if not text.startswith(MICRO_BATCH))
    return config_of((*before, settings)).phases[0].micro_batch


def path_of(folder: Path, claim: Claim) -> Path:
    return folder / f"gpu-{claim.name}.json"


def column(folder: Path, claim: Claim) -> Table | None:
    """Return the stored third column of a claim, or None."""
    record = read_record(path_of(folder, claim))
    if not record:
        return None
    return Table(tuple(record["header"]), tuple(map(tuple, record["rows"])))


def fill(claim: Claim, given: Sequence[str], runs: Path, folder: Path) -> Path:
    """Measure the third column of a claim and write it. Returns the file.

    Reads the `given` runs (NAME=RUN), or without them all of the claim's runs in `runs`; a claim about speed is timed
    instead. Raises Unusable if the claim has no column.
    """
    if claim.timed:
        if given:
            raise Unusable(
                f"{claim.name} reads no run: it times {', '.join(claim.timed_models) or 'attention alone'}",
                code="no-effect",
            )
        speed.write(speed.measured_on_gpu(claim), path_of(folder, claim))
        return path_of(folder, claim)
    on_gpu = claim.on_gpu
    if on_gpu is None or on_gpu.column is None:
        cure = "no run on a GPU shows it"
        if on_gpu:
            cure = f"hybridtron evaluate RUN {on_gpu.reads} shows it"
        raise Unusable(f"{claim.name} has no column to fill; {cure}", code="no-effect")
    known = {run.name: runs / on_gpu.sweep / run.name for run in read_runs(on_gpu)}
    chosen = dict(_named(text, known, claim) for text in given) or known
    places = [place for name, run in chosen.items() for place in _places(name, run, on_gpu.every)]
    rows = [(name, *on_gpu.column.cells(path)) for name, path in places]
    record = {
        "header": ("on a GPU", *on_gpu.column.titles),
        "rows": rows,
        "command": " ".join(["--fill", claim.name, *(f"{name}={run.name}" for name, run in chosen.items())]),
        "commit": commit(),
    }
    speed.write(record, path_of(folder, claim))
    return path_of(folder, claim)


def _named(text: str, known: Collection[str], claim: Claim) -> tuple[str, Path]:
    """Split NAME=RUN by the known names, as names and paths may contain further equals signs."""
    for name in sorted(known, key=len, reverse=True):
        if text.startswith(f"{name}=") and text != f"{name}=":
            return name, Path(text[len(name) + 1 :])
    unknown = text.partition("=")[0]
    cure = f"{did_you_mean(unknown, known)}; give NAME=RUN of {', '.join(known)}"
    raise Unusable(f"{claim.name} is not read from {text!r}{cure}", code="unknown-name")


def _places(name: str, run: Path, every: bool) -> Iterator[tuple[str, Path]]:
    """Yield the places to read of a run, with names; raises at once if it has no checkpoint."""
    from hybridtron.cli.arguments import checkpoints_at

    checkpoints = checkpoints_at(run)
    if not every:
        yield name, run
        return
    from hybridtron.checkpoint.folder import step_of

    for checkpoint in checkpoints:
        yield f"{name}, step {step_of(checkpoint)}", checkpoint
