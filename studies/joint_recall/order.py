"""HAX's Table 5, compared with our accuracies.

The page's tables show claims about pairs of models, decided by the judge of all studies, the full order for each
recurrence, and further experiments that explain differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from studies.joint_recall.runs import CHANCE, kind_of, variant_of
from studies.judge import Seeds, Verdict, below, decided, within

PAPER = {
    "mamba": {"": 16.3, "D": 7.8, "SW": 18.7, "SW+D": 16.6, "A": 16.4, "LSH": 11.6, "KS": 36.6, "HAX": 38.0},
    "mamba2": {"": 36.6, "D": 19.6, "SW": 70.6, "SW+D": 48.6, "A": 49.3, "LSH": 13.5, "KS": 60.1, "HAX": 74.3},
    "samba": {"": 6.3},
}
"""The paper's accuracy in percent after 400,000 steps, on 5 to 16 contexts with 5 to 16 keys; chance is 6.25."""
CLAIMS = (
    ("mamba+KS", "mamba"),
    ("mamba+HAX", "mamba"),
    ("mamba", "mamba+LSH"),
    ("mamba", "mamba+D"),
    ("mamba2+KS", "mamba2"),
    ("mamba2+HAX", "mamba2"),
    ("mamba2", "mamba2+LSH"),
    ("mamba2", "mamba2+D"),
    ("mamba2+SW", "mamba2+KS"),
)
"""Pairs (better, worse) on which the paper bases its conclusions. Besides, Samba is at chance."""
NEAR_CHANCE = 1.2
REASONS = (
    (
        "HAX beside Mamba: it is short of keys that are chosen by scores, half of its 16",
        ("mamba+KS-8", "mamba+HAX", "mamba+KS", "mamba+HAX-32"),
    ),
    (
        "beside Mamba-2: queries and keys need a projection of their own; the recurrence's serve its state",
        ("mamba2+full-shared", "mamba2+full", "mamba2+KS-shared", "mamba2+KS", "mamba2+HAX-shared", "mamba2+HAX"),
    ),
    (
        "Samba above chance: with a quarter of the state it falls to the third that windows and hashes alone reach",
        ("samba", "samba+small-state", "mamba+SW", "mamba+LSH"),
    ),
)
"""Explanations of a different order, each with the models that show it."""
WHY = ("reason", "accuracy, %")
HERE = ("claim", "the paper's, %", "ours, %", "verdict")
ORDERS = ("beside", "the paper's order", "ours", "pairs in the same order")


def of_paper(variant: str) -> float | None:
    base, attention = kind_of(variant)
    return PAPER[base].get(attention)


def recalls_more(better: str, worse: str, accuracies: Mapping[str, Seeds]) -> Verdict:
    """Judge the claim that the first model recalls more than the second; accuracies are in percent, by seed."""
    return decided([below(f"{worse} below {better}", accuracies[worse], accuracies[better])])


def at_chance(accuracies: Seeds) -> Verdict:
    """Judge the claim that Samba is at chance, with its accuracies in percent."""
    over = {seed: accuracy / (100 * CHANCE) for seed, accuracy in accuracies.items()}
    return decided([within("Samba's accuracy over chance", over, high=NEAR_CHANCE)])


def claims(accuracies: Mapping[str, Seeds]) -> Iterator[tuple[str, str, str, str]]:
    """Yield table rows: a claim of the paper about two models, with the paper's accuracies, ours, and the verdict."""
    for better, worse in CLAIMS:
        if better in accuracies and worse in accuracies:
            theirs = f"{of_paper(better)} > {of_paper(worse)}"
            verdict = recalls_more(better, worse, accuracies)
            yield f"{better} above {worse}", theirs, verdict.numbers, verdict.said.value
    if "samba" in accuracies:
        verdict = at_chance(accuracies["samba"])
        yield "samba at chance", "6.3, chance 6.25", verdict.numbers, verdict.said.value


def orders(means: Mapping[str, float]) -> Iterator[tuple[str, str, str, str]]:
    """Yield table rows: the models of each recurrence from best to worst, in the paper and in our runs."""
    for base, of_base in PAPER.items():
        kinds = [kind for kind in of_base if variant_of(base, kind) in means]
        if len(kinds) > 1:
            theirs = {kind or "alone": of_base[kind] for kind in kinds}
            ours = {kind or "alone": means[variant_of(base, kind)] for kind in kinds}
            pairs = list(combinations(theirs, 2))
            same = sum((theirs[left] > theirs[right]) == (ours[left] > ours[right]) for left, right in pairs)
            yield base, _best_first(theirs), _best_first(ours), f"{same} of {len(pairs)}"


def reasons(means: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield table rows: an explanation of a different order, with the accuracies that support it."""
    for reason, models in REASONS:
        if all(model in means for model in models):
            yield reason, ", ".join(f"{model} {100 * means[model]:.1f}" for model in models)


def _best_first(values: Mapping[str, float]) -> str:
    return " > ".join(sorted(values, key=lambda name: -values[name]))
