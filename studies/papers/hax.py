"""The HAX paper's claims: joint recall, needles before and after tuning, and losses of grown models."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hybridtron.sweep.grid import SEED
from studies.grown.runs import TUNED
from studies.joint_recall.order import NEAR_CHANCE, REASONS, at_chance
from studies.joint_recall.order import PAPER as ACCURACY
from studies.joint_recall.order import recalls_more as more_recalled
from studies.joint_recall.runs import CHANCE, FIRST_SEED, RATE, REPEATED, variant_of
from studies.judge import Seeds, Verdict, below, decided
from studies.papers.claim import EMPTY, Claim, Kept, OnGpu, Paper, Table, Written, nothing, unseen
from studies.papers.columns import in_rows, tasks

BASES = ("mamba", "mamba2")
NAMES = {"mamba": "Mamba", "mamba2": "Mamba-2"}
TABLE_5 = Table(
    ("joint recall, %", "alone", *(kind for kind in ACCURACY["mamba"] if kind)),
    tuple((base, *(f"{value}" for value in ACCURACY[base].values())) for base in BASES),
)
TABLE_1 = Table(
    ("RULER, average of 12 tasks", "%"),
    (
        ("Mamba", "26.7"), ("+D", "23.1"), ("+SW", "28.7"), ("+SW+D", "26.9"), ("+A", "27.5"), ("+LSH", "25.9"),
        ("+KS", "28.6"), ("+HAX", "32.9"),
    ),
)  # fmt: skip
RECALLED = tasks("joint_recall", "accuracy", (1058,), options={"sizes": "5-16,5-16"}, samples=500)
RULER = tasks("ruler_se", "string_match_all", (3072,), samples=100)
GROWN = OnGpu("hax/chat", ("none-chat", "HAX-chat"), column=RULER)


def cells(*models: str) -> OnGpu:
    """Select the given models' runs at one rate and from one seed, among the table's 153 runs."""
    only = tuple(f"{model}-lr=1e-3-seed=1" for model in models)
    return OnGpu("hax/joint_recall", only, column=RECALLED, hours=3.2)


def accuracies(kept: Kept, variant: str) -> Seeds:
    """Return a variant's accuracy in percent, by seed, at the rate that was best with the first seed."""
    first = [
        (result.measured, run.values[RATE]) for run, result in kept.measured.get("rates", ()) if run.variant == variant
    ]
    if not first:
        return {}
    best, rate = max(first)
    more = {
        run.values[SEED]: result.measured
        for run, result in kept.measured.get("seeds", ())
        if run.variant == variant and run.values[RATE] == rate
    }
    return {seed: 100 * accuracy for seed, accuracy in {FIRST_SEED: best, **more}.items()}


def mean_accuracy(kept: Kept, variant: str) -> float:
    return statistics.mean(accuracies(kept, variant).values())


def recall_rows(kept: Kept) -> Table:
    """Return our accuracies in the form of the paper's table: means and deviations over seeds."""
    rows = []
    for base in BASES:
        cells = (accuracies(kept, variant_of(base, kind)) for kind in ACCURACY[base])
        rows.append((base, *(_shown([*of.values()]) for of in cells)))
    return Table(
        (f"ours, %; chance is {100 * CHANCE:.1f}", "alone", *(kind for kind in ACCURACY["mamba"] if kind)), tuple(rows)
    )


def _shown(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:.1f}" for value in values)
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def recalls_more(better: str, worse: str, kept: Kept) -> Verdict:
    return more_recalled(better, worse, {name: accuracies(kept, name) for name in (better, worse)})


def samba_at_chance(kept: Kept) -> Verdict:
    return at_chance(accuracies(kept, "samba"))


def reason(number: int) -> partial[str]:
    """Return the reason of that number: a further experiment that explains a different order."""
    return partial(_reason, number)


def _reason(number: int, kept: Kept) -> str:
    why, models = REASONS[number]
    return f"{why}: " + ", ".join(f"{model} {mean_accuracy(kept, model):.1f}" for model in models)


def recall_claims(
    name: str, says: str, more: str, less: str, *, bases: Sequence[str] = BASES, why: int | None = None
) -> list[Claim]:
    """Return one claim for each recurrence about two kinds of attention.

    An empty string stands for the recurrence alone.
    """
    explained = None
    if why is not None:
        explained = reason(why)
    claims = []
    for base in bases:
        better = variant_of(base, more)
        worse = variant_of(base, less)
        seeds = tuple(model for model, kind in ((better, more), (worse, less)) if kind in REPEATED)
        claim = Claim(
            f"figure5-{name}-{base}",
            "Figure 5 (joint recall)",
            f"Beside {NAMES[base]}: {says}",
            TABLE_5,
            f"accuracy on tables that are not trained on: {better} above {worse}; the first seed, on which the rate "
            "was chosen, counts too",
            {"rates": (better, worse), "seeds": seeds},
            recall_rows,
            partial(recalls_more, better, worse),
            reason=explained,
            on_gpu=cells(better, worse),
        )
        claims.append(claim)
    return claims


def needle_rows(kept: Kept) -> Table:
    """Return a table with the share of keys found, by digits and length, and the held-out loss."""
    results = {name: first for name in _GROWN if (first := kept.first("grown", name)) is not None}
    if not results:
        return EMPTY
    places = [(row["digits"], row["length"]) for row in next(iter(results.values()))["needles"]]
    rows = [
        (name, *(f"{row['value']:.3f} ± {row['standard_error']:.3f}" for row in run["needles"]), f"{run['loss']:.3f}")
        for name, run in results.items()
    ]
    return Table(("ours", *(f"{digits} digits, {length}" for digits, length in places), "held-out loss"), tuple(rows))


_GROWN = ("base", "mamba", "hax", f"mamba{TUNED}", f"hax{TUNED}")


def finds_more(kept: Kept) -> Verdict:
    """Check that the grown model finds more keys after tuning, over all tasks and lengths."""
    mamba, hax = (kept.by_seed("grown", f"{name}{TUNED}", _average) for name in ("mamba", "hax"))
    return decided([below("keys found without HAX below those with it", mamba, hax, one_start=True)])


def _average(found: Mapping[str, Any]) -> float:
    return statistics.mean(row["value"] for row in found["needles"])


def lower_loss(kept: Kept) -> Verdict:
    mamba, hax = (kept.by_seed("grown", name, lambda found: found["loss"]) for name in ("mamba", "hax"))
    return decided([below("hax below mamba", hax, mamba, one_start=True, ratio=True)])


CLAIMS = (
    *recall_claims("ks", "keys that are chosen by scores help recall.", "KS", ""),
    *recall_claims("hax", "HAX helps recall.", "HAX", "", why=0),
    *recall_claims("dilated", "dilated attention, which does not look at content, costs recall.", "", "D"),
    *recall_claims("lsh", "hashing alone costs recall.", "", "LSH"),
    *recall_claims("window", "a window recalls more than keys by scores.", "SW", "KS", bases=("mamba2",), why=1),
    Claim(
        "figure5-samba",
        "Figure 5 (joint recall)",
        "Samba does not learn joint recall.",
        Table(("joint recall, %", "accuracy", "chance"), (("Samba", "6.3", "6.25"),)),
        f"accuracy at most {NEAR_CHANCE} times chance",
        {"rates": ("samba",)},
        lambda kept: Table(
            ("ours, %", "accuracy", "chance"),
            (("samba", _shown([*accuracies(kept, "samba").values()]), f"{100 * CHANCE}"),),
        ),
        samba_at_chance,
        reason=reason(2),
        further={"rates": ("samba+small-state",)},
        on_gpu=cells("samba", "mamba"),
        written=Written.KNOWN,
    ),
    Claim(
        "table1-needles",
        "Table 1",
        "Grown beside a Mamba and tuned, HAX retrieves more than the Mamba alone.",
        TABLE_1,
        "the share of keys found after tuning, over both numbers of digits at the tuned length and twice that: with "
        "HAX above without, seed by seed",
        {"grown": (f"mamba{TUNED}", f"hax{TUNED}")},
        needle_rows,
        finds_more,
        on_gpu=GROWN,
        written=Written.KNOWN,
    ),
    Claim(
        "figure4-loss",
        "Figure 4",
        "Continued, a Mamba with HAX has a lower held-out loss than without.",
        EMPTY,
        "the held-out loss after the continuation: with HAX below without, seed by seed",
        {"grown": ("mamba", "hax")},
        needle_rows,
        lower_loss,
        on_gpu=OnGpu("hax/chat", ("none", "HAX"), column=in_rows(3072)),
    ),
    Claim(
        "tables2-3-benchmarks",
        "Tables 2 and 3",
        "HAX is better on LongBench, and not worse on short benchmarks.",
        EMPTY,
        "the average of LongBench's English tasks with HAX above that without",
        {},
        nothing,
        unseen("models of 0.6 million parameters answer at chance"),
        seen_at="from the paper's 130M on, continued and tuned: studies/sweeps/hax/chat.yaml, 4.3 hours a model by the "
        "model",
        on_gpu=OnGpu("hax/chat", ("none-chat", "HAX-chat"), reads="--harness hax_short longbench"),
    ),
)
PAPER = Paper(
    "hax", "Overcoming Long-Context Limitations of State-Space Models via Context-Dependent Sparse Attention", CLAIMS
)
