"""Training runs for the length-generalization paper (length.yaml), and the measurement of each run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtron.sweep.grid import SEED, SweepRun
from studies.long_text import Beyond, held_out_rows
from studies.results import Part
from studies.study import selected

if TYPE_CHECKING:
    from torch import Tensor

    from hybridtron.model.lm import LanguageModel

HERE = Path(__file__).parent
CONTEXT = 64
BATCH = 64
STEPS = 10_000
EIGHTHS = (1, 2, 4, 8)  # eighths of the training after which a base is measured: 2.5 to 20 times Chinchilla's tokens
CHINCHILLA = 2.5  # an eighth of the training, as a multiple of Chinchilla's tokens
REPEATED = ("base", "zero", "random", "fitted", "passing", "tbtt")  # with three seeds
# TIMES as many steps, which read the text twice
LONGER = "base-longer"
TIMES = 2.7
BASES = ("base", LONGER, "context-32", "context-128", "warmup-25", "mamba", "gla", "rwkv6", "hybrid")


@dataclass(frozen=True)
class Sizes:
    """Sizes for the real study, or for a quick one that takes minutes."""

    steps: int = STEPS
    settings: tuple[str, ...] = ()  # further settings of bases
    variants: tuple[str, ...] | None = None  # None: all
    seeds: tuple[str, ...] = ("1", "2", "3")
    vocab_size: int = 512
    multiples: int = 64  # length of evaluated rows, in multiples of CONTEXT
    rows: int = 256  # evaluated rows, spread evenly over the held-out text
    remembered: int = 32  # rows for Effective Remembrance, each of four contexts


STUDY = Sizes()
QUICK = Sizes(
    steps=16,
    settings=("model.width=32",),
    variants=("base", "passing"),
    seeds=("1",),
    multiples=4,
    rows=4,
    remembered=2,
)


def sizes_of(quick: bool) -> Sizes:
    """Return the sizes of the real study, or the quick ones."""
    return QUICK if quick else STUDY


def part_of(sizes: Sizes, runs: Path, data: Path) -> Part:
    """Return the sweep `length` with its data path and its measurement.

    `data` is the folder of prepared tokens.
    """
    rows = (f"phases.0.seq_len={CONTEXT}", f"phases.0.global_batch={BATCH}", f"phases.0.micro_batch={BATCH}")
    prepared = ("data=folder", f"data.path={data}")

    def more(run: SweepRun) -> tuple[str, ...] | None:
        known = sizes.variants is None or run.variant in sizes.variants
        again = run.values[SEED] == "1" or run.variant in REPEATED
        if not (known and again and run.values[SEED] in sizes.seeds):
            return None
        if run.variant not in BASES:
            return ()
        steps = sizes.steps
        if run.variant == LONGER:
            steps = round(steps * TIMES)
        eighth = steps // max(EIGHTHS)
        kept = (f"checkpoint.every={eighth}", f"checkpoint.keep_every={eighth}")
        shape = rows
        if run.variant.startswith("context"):
            shape = ()
        return (*sizes.settings, *shape, *prepared, f"phases.0.tokens=${{steps:{steps}}}", *kept)

    sweep, folder = selected(HERE / "length.yaml", runs / "length", more)
    asked = {name: getattr(sizes, name) for name in ("multiples", "rows", "remembered")}
    return Part(sweep, folder, lambda run, path: of_run(path, sizes, run.variant in BASES), asked)


@dataclass(frozen=True)
class Found:
    """Results of a run: perplexity by position, and the behaviour of its states.

    curve, within: perplexity of long rows, and of the same tokens read within the training context
    earlier: both curves of a base after parts of its training, by step
    remembrance: pairs of t and Effective Remembrance by total variation, over four contexts
    deviations: pairs of a position, from the context on, and the largest deviation of a layer's state there
    """

    curve: dict[str, Any]
    within: dict[str, Any]
    earlier: dict[str, dict[str, Any]]
    remembrance: list[tuple[int, float]]
    deviations: list[tuple[int, float]]


def of_run(run: Path, sizes: Sizes, base: bool, context: int = CONTEXT) -> dict[str, Any]:
    """Measure a run's last checkpoint, and a base's earlier checkpoints too.

    Rows are read at multiples of `context`.
    """
    from hybridtron.checkpoint.folder import all_of, step_of
    from hybridtron.evaluate.held_out import trained_model
    from hybridtron.inference.reader import reader

    checkpoints = {step: folder for folder in all_of(run) if (step := step_of(folder))}
    last = max(checkpoints)
    model, config, seq_len = trained_model(checkpoints[last], None)
    tokens_BT = held_out_rows(config.data, context * sizes.multiples + 1, sizes.rows)
    remembrance, deviations = behaviour(model, tokens_BT, sizes.remembered, context)
    eighths = [last * part // max(EIGHTHS) for part in EIGHTHS[:-1]] if base else []
    earlier = {}
    for step in eighths:
        unfinished, _, _ = trained_model(checkpoints[step], None)
        earlier[str(step)] = asdict(Beyond.of(reader(unfinished), tokens_BT, seq_len))
    beyond = asdict(Beyond.of(reader(model), tokens_BT, seq_len))
    return asdict(Found(**beyond, earlier=earlier, remembrance=remembrance, deviations=deviations))


def behaviour(
    model: LanguageModel, tokens_BT: Tensor, rows: int, context: int = CONTEXT
) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Return Effective Remembrance over four contexts, and deviations of states (Figures 1 and 4).

    Both are lists of pairs, with t or the position first.
    """
    from hybridtron.evaluate.length import effective_remembrance, remembrance_points, state_deviation
    from hybridtron.inference.reader import reader

    length = 4 * context
    few_BT = tokens_BT[:: max(1, len(tokens_BT) // rows)][:rows]
    remembered = effective_remembrance(reader(model), few_BT[:, :length], remembrance_points(length), 2 * context)
    whole_BL = few_BT[:, :-1]
    every = max(context, whole_BL.shape[1] // 32)
    deviations = state_deviation(reader(model), whole_BL, every, 2 * context)
    if every > context:
        deviations = [*state_deviation(reader(model), whole_BL[:, :context], context, context), *deviations]
    positions = sorted({point.position for point in deviations})
    largest = [(at, max(point.overall for point in deviations if point.position == at)) for at in positions]
    return [(point.t, point.total_variation) for point in remembered], largest
