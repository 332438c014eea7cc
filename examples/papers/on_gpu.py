"""What shows a claim on one H100: its runs, their expected hours, and the page's third column.

Hours are a model, corrected by what steps of six recipes took on an H200; no run of these was made on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from examples.papers import speed
from examples.papers.claim import Claim, OnGpu, Table
from examples.papers.material import MATERIAL
from examples.results import ROOT, commit
from hybridtron.config.schema import Config
from hybridtron.planning.rates import BESIDE_S, LAUNCH_S
from hybridtron.problems import Unusable, did_you_mean
from hybridtron.sweep.grid import SweepRun, narrowed, read, with_starts
from hybridtron.train.records import read_lines, read_record

RUNS = {False: "runs/gpu", True: "runs/full"}
"""Where sweeps stand: smaller than the paper's, and of its size."""
SWEEPS = ROOT / "examples/sweep"
WEIGHTS = "run.weights="
MICRO_BATCH = "phases.0.micro_batch="


def runs_of(on_gpu: OnGpu, full: bool = False) -> list[SweepRun]:
    """All that is trained: what is read, and what that starts from."""
    settings = () if full else on_gpu.smaller
    return list(narrowed(read(SWEEPS / f"{on_gpu.sweep}.yaml", settings), on_gpu.only).runs)


def read_runs(on_gpu: OnGpu) -> list[SweepRun]:
    """Those that the claim is about."""
    return [run for run in runs_of(on_gpu) if run.variant in on_gpu.only or run.name in on_gpu.only]


Chain = tuple[tuple[str, ...], ...]


def chain_of(run: SweepRun, runs: Sequence[SweepRun]) -> Chain:
    """Settings of the run that all begins with, and so on to this one's."""
    by_name = {one.name: one for one in runs}
    return tuple(reversed([one.settings for one in with_starts(run, by_name)]))


@cache
def config_of(chain: Chain) -> Config:
    """The checked configuration of the last run; weights that are not here are stood in for by configurations."""
    from hybridtron.config.check import require
    from hybridtron.config.load import load

    with TemporaryDirectory() as folder:
        config = load(loadable(chain, Path(folder)))
        require(config)
        return config


def loadable(chain: Chain, folder: Path) -> list[str]:
    """Settings of the last run, with stand-ins in this folder for the weights that it starts from."""
    *before, last = chain
    given = [_stood_in(text, folder) for text in last]
    return [*given, f"{WEIGHTS}{saved(config_of(tuple(before)), folder / 'before')}"] if before else given


def saved(config: Config, path: Path) -> Path:
    """In the place of a run's folder, or of an imported model's."""
    from hybridtron.config.load import to_yaml

    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(config))
    return path


def _stood_in(setting: str, folder: Path) -> str:
    """Imported weights by the configuration of a recipe whose model is the same."""
    from hybridtron.config.load import load

    name = setting.removeprefix(WEIGHTS)
    if name == setting:
        return setting
    path = folder / name
    if not path.exists():
        saved(load([f"recipe={MATERIAL[name].like}"]), path)
    return f"{WEIGHTS}{path}"


def hours(on_gpu: OnGpu) -> dict[str, float]:
    """By run, on one H100."""
    runs = runs_of(on_gpu)
    return {run.name: on_gpu.hours or expected(chain_of(run, runs)) for run in runs}


@cache
def expected(chain: Chain) -> float:
    """Of a run: by the planner's model of its fastest layout, or as a rehearsal on an H200 expects.

    The longer one counts: the planner knows no launches, an H200 has more bandwidth than an H100.
    """
    from hybridtron.config.resolve import resolve
    from hybridtron.planning.fit import fit
    from hybridtron.planning.rates import GPUS

    config = config_of(chain)
    (phase,) = resolve(config)
    layouts = fit(config, 1, GPUS["h100"].memory)
    if not layouts:
        raise Unusable(f"{' '.join(chain[-1])} fits into no layout of one H100")
    recipe = next(text.removeprefix("recipe=") for text in chain[-1] if text.startswith("recipe="))
    rate, launches = rehearsed(recipe)
    launches *= recipes_micro_batch(chain) / phase.settings.micro_batch
    rehearsal = phase.end_step * phase.settings.tokens_per_step * (1 / rate + BESIDE_S * launches)
    return max(layouts[0].seconds * phase.end_step, rehearsal) / 3600


def rehearsed(recipe: str) -> tuple[float, float]:
    """Tokens a second of one GPU, without end where the recipe was not rehearsed, and launches a token.

    One of eight data-parallel GPUs counts. Where rows don't share out to eight, as of small batches, the two stages of
    a pipeline do, one behind the other on one GPU: with their waits for each other, so that hours are rather too long.
    """
    lines = read_lines(ROOT / "benchmarks/rehearse.jsonl")
    ran = [line for line in lines if line["recipe"] == recipe and "tokens_per_second" in line]
    alone = [line for line in ran if line["layout"] == "DP8"]
    stages = {line["rank"]: line for line in ran if line["layout"] == "PP2"}
    parts = [min(alone, key=lambda line: line["tokens_per_second"])] if alone else [*stages.values()]
    if not parts:
        return math.inf, 0.0
    seconds = sum(1 / line["tokens_per_second"] for line in parts)  # a token's
    # the share is of the device's time, which is nearly all of it
    launches = sum(line["launch_share"] / line["tokens_per_second"] for line in parts) / LAUNCH_S
    return 1 / seconds, launches


def recipes_micro_batch(chain: Chain) -> int:
    """What the rehearsed recipe has, of which the last run may have more."""
    *before, last = chain
    own = tuple(text for text in last if not text.startswith(MICRO_BATCH))
    return config_of((*before, own)).phases[0].micro_batch


def path_of(folder: Path, claim: Claim) -> Path:
    return folder / f"gpu-{claim.name}.json"


def column(folder: Path, claim: Claim) -> Table | None:
    """What was found at the paper's size, where that has been measured."""
    record = read_record(path_of(folder, claim))
    return Table(tuple(record["header"]), tuple(map(tuple, record["rows"]))) if record else None


def fill(claim: Claim, given: Sequence[str], runs: Path, folder: Path) -> Path:
    """Read these runs (NAME=RUN) as the claim is read, or all of its sweep in `runs`, or time it. Returns the file."""
    if claim.timed:
        if given:
            raise Unusable(f"{claim.name} reads no run: it times {', '.join(claim.timed_models) or 'attention alone'}")
        speed.write(speed.measured_on_gpu(claim), path_of(folder, claim))
        return path_of(folder, claim)
    on_gpu = claim.on_gpu
    if on_gpu is None or on_gpu.column is None:
        what = f"hybridtron evaluate RUN {on_gpu.reads}" if on_gpu else "nothing: no run on a GPU shows it"
        raise Unusable(f"{claim.name} has no column to fill; what shows it is {what}")
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
    """NAME=RUN, where names and paths can have more of that sign."""
    for name in sorted(known, key=len, reverse=True):
        if text.startswith(f"{name}=") and text != f"{name}=":
            return name, Path(text[len(name) + 1 :])
    unknown = text.partition("=")[0]
    cure = f"{did_you_mean(unknown, known)}; give NAME=RUN of {', '.join(known)}"
    raise Unusable(f"{claim.name} is not read from {text!r}{cure}")


def _places(name: str, run: Path, every: bool) -> Iterator[tuple[str, Path]]:
    """What is read of a run, which must be there before anything is read."""
    from hybridtron.cli.given import checkpoints_at

    found = checkpoints_at(run)
    if not every:
        yield name, run
        return
    from hybridtron.checkpoint.folder import step_of

    for checkpoint in found:
        yield f"{name}, step {step_of(checkpoint)}", checkpoint
