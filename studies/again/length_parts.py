"""The length experiment: a trial of settings, and the runs that confirm the setting that it found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hybridtron.sweep.grid import SEED, SweepRun
from studies.long_text import Beyond, Curve, held_out_rows, spread
from studies.papers import length_runs
from studies.papers.claim import Kept
from studies.papers.length_views import SAME_TEXT, Measures, Rise, rises
from studies.papers.studies import PACKAGES
from studies.results import Part, Result, Results
from studies.study import Plan, selected

HERE = Path(__file__).parent
TRIAL = "length-trial"
CONFIRMED = "length"
LR = "phases.0.lr"
CONTEXT = "phases.0.seq_len"
TOKENS_OF_STEP = 4096
AT = 64  # contexts into the text where rises are compared
MAMBA_CONTEXT = 64  # Mamba's rate and context are those of studies/papers/length.yaml


@dataclass(frozen=True)
class Sizes:
    """Sizes for the real experiment, or for a quick one that takes minutes.

    far: contexts in each of the rows, and number of rows, of a further measurement that no claim reads
    variants: of the confirmation; None: all
    trial: settings that are tried, by variant, rate and context; None: all
    """

    measured: length_runs.Sizes
    far: tuple[int, int]
    variants: tuple[str, ...] | None = None
    trial: tuple[tuple[str, str, str], ...] | None = None
    seeds: tuple[str, ...] | None = None  # None: all
    packages: tuple[str, ...] = PACKAGES


STUDY = Sizes(length_runs.STUDY, far=(256, 16))
QUICK = Sizes(
    replace(length_runs.QUICK, multiples=AT, rows=2),
    far=(AT, 2),
    variants=("base", "zero-100", "passing-100"),
    trial=(("state-64", "2e-3", "32"), ("state-64", "2e-3", "64")),
    seeds=("4",),
    packages=(),
)


@dataclass(frozen=True)
class Setting:
    """The setting of a trial's run: its model, rate and context."""

    variant: str
    lr: str
    context: int

    @classmethod
    def of(cls, run: SweepRun) -> Setting:
        return cls(run.variant, run.values[LR], int(run.values[CONTEXT]))

    def __str__(self) -> str:
        return f"{self.variant}, rate {self.lr}, context {self.context}"


def write_text(sizes: Sizes, data: Path) -> None:
    """Write the text, if it is not there."""
    from hybridtron.data.prepare.embedded import prepare_embedded

    prepare_embedded(data / "text", sizes.measured.vocab_size, sizes.packages)


def planned(sizes: Sizes, runs: Path, data: Path, results: Results) -> Plan:
    """Return the trial, and after it the runs with the setting that it found."""
    trial = trial_part(sizes, runs, data)
    plan = {TRIAL: trial}
    if setting := chosen(trial, results):
        plan[CONFIRMED] = confirmed_part(sizes, runs, data, setting)
    return plan


def trial_part(sizes: Sizes, runs: Path, data: Path) -> Part:
    def more(run: SweepRun) -> tuple[str, ...] | None:
        setting = Setting.of(run)
        if sizes.trial is not None and (setting.variant, setting.lr, str(setting.context)) not in sizes.trial:
            return None
        return trained_settings(sizes, data, setting.context)

    sweep, folder = selected(HERE / "length_trial.yaml", runs / TRIAL, more)
    return Part(sweep, folder, lambda run, path: measure(sizes, Setting.of(run).context, True, path), asked(sizes))


def confirmed_part(sizes: Sizes, runs: Path, data: Path, setting: Setting) -> Part:
    """Return the runs that the found setting is confirmed with."""
    model = next(run for run in trial_part(sizes, runs, data).sweep.runs if Setting.of(run) == setting).settings
    layers = next(text for text in model if text.startswith("model.layers.M="))

    def more(run: SweepRun) -> tuple[str, ...] | None:
        wanted = sizes.variants is None or run.variant in sizes.variants
        if not wanted or (sizes.seeds is not None and run.values[SEED] not in sizes.seeds):
            return None
        if run.start is not None:
            return ()
        context = context_of(run.variant, setting.context)
        settings = trained_settings(sizes, data, context)
        if run.variant == "mamba":
            return (*settings, f"{CONTEXT}={context}")
        return (*settings, layers, f"{LR}={setting.lr}", f"{CONTEXT}={context}")

    def measured(run: SweepRun, path: Path) -> object:
        return measure(sizes, context_of(run.variant, setting.context), run.start is None, path)

    sweep, folder = selected(HERE / "length.yaml", runs / CONFIRMED, more)
    return Part(sweep, folder, measured, asked(sizes))


def context_of(variant: str, context: int) -> int:
    """Return a variant's training context; `context` is the one that the trial found."""
    if variant.startswith("mamba"):
        return MAMBA_CONTEXT
    return {"context-half": context // 2, "context-double": 2 * context}.get(variant, context)


def trained_settings(sizes: Sizes, data: Path, context: int) -> tuple[str, ...]:
    """Return the settings that all models share that are trained from new weights: text, tokens, rows."""
    rows = TOKENS_OF_STEP // context
    eighth = sizes.measured.steps // max(length_runs.EIGHTHS)
    return (
        *sizes.measured.settings,
        "data=folder",
        f"data.path={data / 'text'}",
        f"phases.0.global_batch={rows}",
        f"phases.0.micro_batch={rows}",
        f"phases.0.tokens=${{steps:{sizes.measured.steps}}}",
        f"checkpoint.every={eighth}",
        f"checkpoint.keep_every={eighth}",
    )


def measure(sizes: Sizes, context: int, base: bool, run: Path) -> dict[str, Any]:
    return {**length_runs.of_run(run, sizes.measured, base, context), "far": measure_far(sizes, context, run)}


def measure_far(sizes: Sizes, context: int, run: Path) -> dict[str, Any]:
    """Measure perplexity of the last checkpoint in fewer rows, which are longer."""
    from hybridtron.cli.arguments import newest_checkpoint
    from hybridtron.evaluate.held_out import trained_model
    from hybridtron.inference.reader import reader

    model, config, seq_len = trained_model(newest_checkpoint(run), None)
    multiples, rows = sizes.far
    tokens_BT = held_out_rows(config.data, context * multiples + 1, rows)
    return asdict(Beyond.of(reader(model), tokens_BT, seq_len))


def asked(sizes: Sizes) -> dict[str, Any]:
    """Return the sizes of the measurement, which recognise a stored result."""
    usual = {name: getattr(sizes.measured, name) for name in ("multiples", "rows", "remembered")}
    return {**usual, "far": list(sizes.far)}


def chosen(trial: Part, results: Results) -> Setting | None:
    """Return the setting whose perplexity rises most far beyond its context; None while the trial has runs left."""
    by_setting = tried(trial, results)
    if len(by_setting) < len(trial.sweep.runs):
        return None
    return max(by_setting, key=by_setting.__getitem__)


def tried(trial: Part, results: Results) -> dict[Setting, float]:
    """Return the rise of each setting that was tried, as a logarithm."""
    by_setting: dict[Setting, float] = {}
    for run in trial.sweep.runs:
        result: Result | None = results.of(TRIAL, trial, run)
        if result is not None:
            setting = Setting.of(run)
            by_setting[setting] = risen(setting.context, AT, result.measured)
    return by_setting


def risen(context: int, at: int, measures: Measures) -> float:
    """Return the logarithm of a ratio: perplexity at some contexts over that of the same tokens within one."""
    return beyond_of(measures).risen(context * at)


def beyond_of(measures: Measures) -> Beyond:
    return Beyond(Curve(**measures["curve"]), Curve(**measures["within"]))


def rise_of(context: int, at: int = AT) -> Rise:
    """Return the rise of runs of the confirmation, for tables and rules of studies/papers."""
    return Rise(CONFIRMED, context, at, SAME_TEXT, partial(risen, context, at))


def trial_rows(by_setting: dict[Setting, float]) -> list[tuple[str, str]]:
    """Return table rows: each setting that was tried with the logarithm of its rise, the largest first."""
    first_largest = sorted(by_setting.items(), key=lambda pair: -pair[1])
    return [(str(setting), f"{rise:+.4f}") for setting, rise in first_largest]


def confirmed_header(sizes: Sizes) -> tuple[str, ...]:
    far, _ = sizes.far
    return ("model", "seeds", "at its context", f"at {AT}", f"rise at {AT}", f"at {far}", f"rise at {far}")


def confirmed_rows(sizes: Sizes, part: Part, context: int, kept: Kept) -> Iterator[tuple[str, ...]]:
    """Yield table rows: perplexity of every model, by contexts into the text, and its rises.

    The last two columns are those of the further measurement.
    """
    far, _ = sizes.far
    for variant in dict.fromkeys(run.variant for run in part.sweep.runs):
        trained_context = context_of(variant, context)
        if results := kept.found(CONFIRMED, variant):
            usual = [beyond_of(measures) for measures in results]
            further = [beyond_of(measures["far"]) for measures in results]
            yield (
                variant,
                str(len(results)),
                spread([beyond.curve.near(trained_context) for beyond in usual]),
                spread([beyond.curve.near(trained_context * AT) for beyond in usual]),
                spread([math.exp(rise) for rise in rises(kept, variant, rise_of(trained_context)).values()], 3),
                spread([beyond.curve.near(trained_context * far) for beyond in further]),
                spread([math.exp(beyond.risen(trained_context * far)) for beyond in further], 3),
            )
