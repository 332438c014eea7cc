"""The length experiment: a trial of settings, and the runs that confirm the setting that it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hybridtron.sweep.grid import SweepRun
from studies.long_text import Beyond, Curve
from studies.papers import length_runs
from studies.papers.length_views import SAME_TEXT, Found, Rise
from studies.papers.studies import PACKAGES
from studies.results import Part, Result, Results
from studies.study import Plan, selected

HERE = Path(__file__).parent
TRIAL = "length-trial"
CONFIRMED = "length"
LR = "phases.0.lr"
CONTEXT = "phases.0.seq_len"
TOKENS_OF_STEP = 4096
AT = 64  # contexts into the text where the trial's rises are compared


@dataclass(frozen=True)
class Sizes:
    """Sizes for the real experiment, or for a quick one that takes minutes.

    variants: of the confirmation; None: all
    trial: settings that are tried, by variant, rate and context; None: all
    """

    measured: length_runs.Sizes
    variants: tuple[str, ...] | None = None
    trial: tuple[tuple[str, str, str], ...] | None = None
    seeds: tuple[str, ...] = ("1", "2", "3")
    packages: tuple[str, ...] = PACKAGES


STUDY = Sizes(replace(length_runs.STUDY, multiples=256, rows=16))
QUICK = Sizes(
    replace(length_runs.QUICK, multiples=64, rows=2),
    variants=("base", "zero-100", "passing-100"),
    trial=(("state-64", "2e-3", "32"), ("state-64", "2e-3", "64")),
    seeds=("1",),
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
    contexts = {"context-half": setting.context // 2, "context-double": 2 * setting.context, "mamba": MAMBA_CONTEXT}

    def more(run: SweepRun) -> tuple[str, ...] | None:
        known = sizes.variants is None or run.variant in sizes.variants
        if not known or run.values["run.seed"] not in sizes.seeds:
            return None
        if run.start is not None:
            return ()
        context = contexts.get(run.variant, setting.context)
        settings = trained_settings(sizes, data, context)
        if run.variant == "mamba":
            return (*settings, f"{CONTEXT}={context}")
        return (*settings, layers, f"{LR}={setting.lr}", f"{CONTEXT}={context}")

    def found(run: SweepRun, path: Path) -> object:
        context = setting.context
        if run.variant.startswith("mamba"):
            context = MAMBA_CONTEXT
        return measure(sizes, contexts.get(run.variant, context), run.start is None, path)

    sweep, folder = selected(HERE / "length.yaml", runs / CONFIRMED, more)
    return Part(sweep, folder, found, asked(sizes))


MAMBA_CONTEXT = 64  # Mamba's rate and context are those of studies/papers/length.yaml


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


def measure(sizes: Sizes, context: int, base: bool, run: Path) -> dict[str, object]:
    return length_runs.of_run(run, sizes.measured, base, context)


def asked(sizes: Sizes) -> dict[str, int]:
    return {name: getattr(sizes.measured, name) for name in ("multiples", "rows", "remembered")}


def chosen(trial: Part, results: Results) -> Setting | None:
    """Return the setting whose perplexity rises most far beyond its context; None while the trial has runs left."""
    rises = tried(trial, results)
    if len(rises) < len(trial.sweep.runs):
        return None
    return max(rises, key=rises.__getitem__)


def tried(trial: Part, results: Results) -> dict[Setting, float]:
    """Return the rise of each setting that was tried, as a logarithm."""
    found: dict[Setting, float] = {}
    for run in trial.sweep.runs:
        result: Result | None = results.of(TRIAL, trial, run)
        if result is not None:
            setting = Setting.of(run)
            found[setting] = risen(setting.context, AT, result.measured)
    return found


def risen(context: int, at: int, found: Found) -> float:
    """Return the logarithm of a ratio: perplexity at some contexts over that of the same tokens within one."""
    return Beyond(Curve(**found["curve"]), Curve(**found["within"])).risen(context * at)


def rise_of(context: int, at: int = AT) -> Rise:
    """Return the rise of runs of the confirmation, for tables and rules of studies/papers."""
    return Rise(CONFIRMED, context, at, SAME_TEXT, partial(risen, context, at))


def rows_of(rises: dict[Setting, float]) -> Sequence[tuple[Setting, float]]:
    return sorted(rises.items(), key=lambda pair: -pair[1])
