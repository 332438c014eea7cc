"""Tables, pictures and rules for the claims of the Samba paper."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from studies.judge import Check, Seeds, Verdict, another, below, decided, within
from studies.long_text import Curve, draw_seeds, frame
from studies.papers.claim import Kept, Table
from studies.papers.samba_runs import CONTEXT
from studies.passkey.samples import LONGER

LAST = 32  # the longest evaluated rows, in training lengths
EXPLODES = 1.2  # ratio to the perplexity at the training length from which it counts as exploded
LEVEL = 1.01  # largest ratio of two perplexities that counts as level
FOUND = 0.9  # share of keys that counts as nearly all
CONVOLVED = ("samba", "sliding-gla", "sliding-gla-sc", "sliding-retnet", "sliding-retnet-sc")  # -sc: convolved
HYBRIDS = ("samba", "mamba-swa-mlp", "samba-three", "samba-order")
REACH = 2048  # tokens, four times the rows of tuning
Judge = Callable[[Kept], Verdict]


def perplexities(kept: Kept, part: str, variant: str, length: int) -> Seeds:
    """Return a variant's perplexities at a row length, by seed."""
    return kept.by_seed(part, variant, lambda found: found["perplexity"][str(length)])


def losses(kept: Kept, part: str, variant: str, length: int = CONTEXT) -> Seeds:
    """Return a variant's losses at a row length, by seed.

    Unlike perplexities they have similar deviations for all models.
    """
    return {seed: math.log(value) for seed, value in perplexities(kept, part, variant, length).items()}


def mean_loss(kept: Kept, part: str, variant: str) -> float:
    return statistics.mean(losses(kept, part, variant).values())


def shown(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.2f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.2f}"


def rows_of(part: str, variants: Sequence[str], lengths: Sequence[int]) -> Callable[[Kept], Table]:
    """Return a function that makes the table of perplexity by row length, with means and deviations over seeds."""

    def table(kept: Kept) -> Table:
        rows = []
        for variant in variants:
            if results := kept.results(part, variant):
                cells = (shown([*perplexities(kept, part, variant, length).values()]) for length in lengths)
                rows.append((variant, f"{results[0].trained.parameters:,}", str(len(results)), *cells))
        return Table(("ours", "parameters", "seeds", *map(str, lengths)), tuple(rows))

    return table


def better(part: str, *pairs: tuple[str, str]) -> Judge:
    """Return a judge of pairs: it checks that the first model has the lower loss."""

    def judge(kept: Kept) -> Verdict:
        return decided(lower(kept, part, pairs))

    return judge


def lower(kept: Kept, part: str, pairs: Sequence[tuple[str, str]]) -> list[Check]:
    """Return a check for each pair; it prints perplexities and their ratio."""
    of = partial(losses, kept, part)
    return [below(f"{low} below {high}", of(low), of(high), ratio=True) for low, high in pairs]


def better_by_loss(*pairs: tuple[str, str]) -> Judge:
    """Return the judge of a claim about benchmarks: losses stand in for them, and decide nothing."""

    def judge(kept: Kept) -> Verdict:
        return another("perplexity in place of benchmarks", lower(kept, "samba", pairs))

    return judge


def why_other_order(kept: Kept) -> str:
    """Explain a different order by the runs of Table 8.

    They have the short convolution that Mamba has and the other models of the table do not.
    """
    samba, gla, gla_sc, retnet, retnet_sc = (mean_loss(kept, "tables", name) for name in CONVOLVED)
    shares = ((gla - gla_sc) / (gla - samba), (retnet - retnet_sc) / (retnet - samba))
    return (
        "Mamba has a short convolution, and Sliding GLA and Sliding RetNet here have none, as in the paper. On half of "
        f"the tokens (table8-convolution) one brings Sliding GLA from a loss of {gla:.3f} to {gla_sc:.3f} and Sliding "
        f"RetNet from {retnet:.3f} to {retnet_sc:.3f}, where Samba has {samba:.3f}: {shares[0]:.0%} and "
        f"{shares[1]:.0%} of their distance"
    )


def why_other_hybrid(kept: Kept) -> str:
    """Explain Samba's distance from Mamba-SWA-MLP by two further Sambas.

    One has as many mixers as Mamba-SWA-MLP, with as many MLP parameters; the other has these in its order too.
    """
    samba, other, three, order = (mean_loss(kept, "samba", name) for name in HYBRIDS)
    by_seed = {name: ", ".join(f"{loss:.3f}" for loss in losses(kept, "samba", name).values()) for name in HYBRIDS}
    return (
        "of 2.4 million parameters Samba has two Mamba layers and two windows, and Mamba-SWA-MLP three of each. Samba "
        f"with three of each, in MLPs of half the size, has a loss of {three:.3f}, where Samba has {samba:.3f} and "
        f"Mamba-SWA-MLP {other:.3f}: {(samba - three) / (samba - other):.0%} of the distance is the number of mixers. "
        f"The same sub-layers in the order of Mamba-SWA-MLP, a window right behind its Mamba layer, have {order:.3f}: "
        f"{(three - order) / (samba - other):.0%} is the order. The rest, {(order - other) / (samba - other):.0%}, is "
        "one MLP in place of two of half its size. "
        f"Losses by seed: Samba {by_seed['samba']}; Mamba-SWA-MLP {by_seed['mamba-swa-mlp']}"
    )


def risen(kept: Kept, variant: str, *, near: int, far: int, part: str = "samba") -> tuple[Seeds, str]:
    """Return the logarithm of perplexity in rows of `far` training lengths over `near` of them, by seed, on one text.

    The text has both perplexities, as means over seeds.
    """
    first, last = (losses(kept, part, variant, CONTEXT * times) for times in (near, far))
    means = [math.exp(statistics.mean(of.values())) for of in (first, last)]
    return {seed: last[seed] - first[seed] for seed in first}, f"{means[0]:.2f} to {means[1]:.2f}"


def moved(
    kept: Kept,
    variant: str,
    *,
    near: int,
    far: int,
    low: float = 0.0,
    high: float = math.inf,
    part: str = "samba",
) -> Check:
    """Return the check that this ratio lies between two ratios."""
    by_seed, shown = risen(kept, variant, near=near, far=far, part=part)
    least = math.log(low) if low else -math.inf
    return within(f"{variant} from {near}x to {far}x", by_seed, low=least, high=math.log(high), ratio=True, shown=shown)


def explodes(kept: Kept) -> Verdict:
    """Check that full attention's perplexity rises at 4x, and no other model's."""
    level = [moved(kept, name, near=1, far=4, high=1.0) for name in ("llama-swa", "mamba", "samba")]
    return decided([moved(kept, "llama", near=1, far=4, low=EXPLODES), *level])


def falls(kept: Kept) -> Verdict:
    """Check that Samba's perplexity falls from 1x to 4x, and stays as low up to the longest rows."""
    steps = ((1, 2, 1.0), (2, 4, 1.0), (4, LAST, LEVEL))
    return decided([moved(kept, "samba", near=near, far=far, high=high) for near, far, high in steps])


def one_full_layer(kept: Kept) -> Verdict:
    """Check that every model with full attention rises from 2x to 4x, and Samba does not."""
    full = [moved(kept, name, near=2, far=4, low=1.0, part="tables") for name in FULL]
    return decided([*full, moved(kept, "samba", near=2, far=4, high=1.0, part="tables")])


FULL = ("full-0", "full-1", "full-3", "full-1-2")
SCAN = 4  # the sub-layer of the second scan of Samba, and of the third of Mamba-MLP
DEEP = ("samba-deep", "mamba-mlp-deep")


def entropies_middle(kept: Kept) -> Verdict:
    """Check that the scans in Samba's middle third select less: from a wider choice."""
    samba, mamba = (kept.by_seed("entropy", name, lambda found: middle(found["entropy"])) for name in DEEP)
    return decided([below(f"{DEEP[1]} below {DEEP[0]}", mamba, samba)])


def middle(entropies: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean entropy over the middle third of the scans, as a share of a uniform choice's."""
    scans = [layer["entropy"] / layer["bound"] for layer in entropies if layer["kind"] == "selection"]
    third = len(scans) // 3
    return statistics.mean(scans[third : len(scans) - third])


def why_more_selective(kept: Kept) -> str:
    """Explain the outcome by the models of Table 2.

    They are twice as wide and have read three times as many tokens.
    """
    samba, mamba = (
        statistics.mean(
            layer["entropy"] / layer["bound"]
            for found in kept.found("samba", name)
            for layer in found["entropy"]
            if layer["layer"] == SCAN and layer["kind"] == "selection"
        )
        for name in ("samba", "mamba-mlp")
    )
    return (
        "it is neither the width nor the tokens: of the models of table2-hybrids, twice as wide on three times as many "
        f"tokens, in the scan at sub-layer {SCAN} Samba chooses from {samba:.3f} of a uniform choice, and Mamba-MLP "
        f"from {mamba:.3f}. Of as many sub-layers Samba has half as many scans, and at this size each selects more"
    )


def entropy_rows(kept: Kept) -> Table:
    rows = [
        (variant, str(row["layer"]), row["kind"], f"{row['entropy']:.3f}", f"{row['entropy'] / row['bound']:.3f}")
        for variant in DEEP
        if (first := kept.first("entropy", variant)) is not None
        for row in first["entropy"]
    ]
    return Table(("ours, first seed", "layer", "of", "entropy, nats", "of a uniform choice's"), tuple(rows))


def draw_lengths(variants: Sequence[str]) -> Callable[[Kept, Path], None]:
    """Return a function that draws perplexity by position."""

    def draw(kept: Kept, path: Path) -> None:
        from hybridtron.evaluate.pictures import picture

        with picture(path) as axes:
            shown: list[Curve] = []
            for number, variant in enumerate(name for name in variants if kept.results("samba", name)):
                curves = [Curve(**found["curve"]) for found in kept.found("samba", variant)]
                draw_seeds(
                    axes,
                    curves[0].ends,
                    [curve.perplexities for curve in curves],
                    color=f"C{number}",
                    label=variant,
                    style="-",
                )
                shown += curves
            frame(axes, shown, CONTEXT, CONTEXT // 8)

    return draw


def draw_entropies(kept: Kept, path: Path) -> None:
    from hybridtron.evaluate.pictures import entropy_curves

    entropy_curves({name: kept.first("entropy", name)["entropy"] for name in DEEP}, path)


def asked(kept: Kept, variant: str) -> list[tuple[int, float, float, float]]:
    """Return rows of the passkey study: length, share of keys found, standard error, and the worst depth's share."""
    return [
        (row["length"], row["value"], row["standard_error"], min(value for _, value, _ in row["by_depth"]))
        for row in kept.first("passkey", variant)["last"]
    ]


def passkey_rows(kept: Kept) -> Table:
    results = {name: asked(kept, name) for name in ("samba", "swa") if kept.results("passkey", name)}
    lengths = tuple(str(length) for length, *_ in next(iter(results.values()), []))
    rows = tuple((name, *(f"{value:.3f} ± {error:.3f}" for _, value, error, _ in of)) for name, of in results.items())
    return Table(("keys found at tokens", *lengths), rows)


def found_at(kept: Kept, variant: str, length: int) -> Seeds:
    """Return the share of keys that a variant finds in texts of this length, by seed."""
    return kept.by_seed("passkey", variant, lambda found: _row(found, length)["value"])


def _row(found: Mapping[str, Any], length: int) -> Mapping[str, Any]:
    return next(row for row in found["last"] if row["length"] == length)


def recalls(kept: Kept) -> Verdict:
    """Check that Samba finds more than windows alone at every length.

    At the tuned length it must also find nearly all keys at every depth.
    """
    lengths = [length for length, *_ in asked(kept, "samba")]
    above = [
        below(f"windows below Samba at {length}", found_at(kept, "swa", length), found_at(kept, "samba", length))
        for length in lengths
    ]
    worst = kept.by_seed(
        "passkey", "samba", lambda found: min(share for _, share, _ in _row(found, lengths[0])["by_depth"])
    )
    return decided([*above, within(f"Samba's worst depth at {lengths[0]}", worst, low=FOUND)])


def recalls_all(kept: Kept) -> Verdict:
    """Check that Samba finds nearly all keys at 16 times the tuned length."""
    length, *_ = asked(kept, "samba")[-1]
    return decided([within(f"keys found at {length} tokens", found_at(kept, "samba", length), low=FOUND)])


def why_not_perfect(kept: Kept) -> str:
    """Explain lost keys by their distance, and by more training."""
    last = kept.first("passkey", "samba")["last"][-1]
    near, far = (
        statistics.mean(
            share for depth, share, _ in last["by_depth"] if ((1 - depth) * last["length"] <= REACH) is within
        )
        for within in (True, False)
    )
    _, longer, error, _ = asked(kept, LONGER)[-1]
    return (
        f"keys are lost by their distance: of those in the last {REACH} of {last['length']} tokens {near:.2f} are "
        f"found, and {far:.2f} of those further back (the paper's state is many times as large). With three times as "
        f"many steps on keys it finds {longer:.3f} ± {error:.3f} there, of {last['value']:.3f}"
    )


def draw_passkey(kept: Kept, path: Path) -> None:
    from hybridtron.evaluate.pictures import heat_map

    rows = kept.first("passkey", "samba")["last"]
    heat_map("keys found by Samba", rows, rows[0]["length"], path)
