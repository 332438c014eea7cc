"""The study of adapted hybrids at a size of a minute, stopped and resumed; its runs; its page of made-up numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hybridtron.architecture.table import architecture
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.planning.count import count
from hybridtron.proving.measuring import Timing
from hybridtron.tasks.tokens import ByteTokens
from studies.judge import Said
from studies.span_study.asked import DISTANCES, LENGTHS, PAIRS, Asked, Readings, answers, readings_of, task
from studies.span_study.claims import CLAIMS, FULL, TRAINED, Claim, score, verdict
from studies.span_study.cost import Cost, step_times
from studies.span_study.pages import page
from studies.span_study.runs import ALONE, BASE, QUICK, REPEATED, ROWS, STUDY, part_of
from studies.span_study.study import main
from tests.studies.quick import assert_nothing_is_left, written_quickly


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_study_is_written_and_resumes(tmp_path: Path) -> None:
    times = written_quickly(main, tmp_path)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"span_study.md", "span_study.png"}
    assert len(times) == len(QUICK.variants or ())
    reported = (tmp_path / "out/span_study.md").read_text().splitlines()
    assert_nothing_is_left(main, tmp_path, times)
    again = (tmp_path / "out/span_study.md").read_text().splitlines()
    rows = [line for line in reported if line.startswith(("| base ", "| full ", "| SW ", "| SE ", "| 2(a) "))]
    assert len(rows) == 2 * 4 + 2 * 2 + 4 + 2  # all, those with another attention, needles; claims
    assert set(rows) <= set(again)


LONGER = ("SE-long", "full-long")


@pytest.mark.slow
def test_variants_keep_the_size_and_schedule_of_the_base(tmp_path: Path) -> None:
    """At most a million parameters, two layers of attention, 60 to 100 steps of 16 rows that are 4 times as long."""
    runs = part_of(STUDY, tmp_path, tmp_path).sweep.runs
    by_variant = {run.variant: [one for one in runs if one.variant == run.variant] for run in runs}
    assert {name: len(of) for name, of in by_variant.items()} == {
        name: 3 if name in REPEATED else 1 for name in by_variant
    }
    assert all(of[-1].values["run.seed"] == ALONE for of in by_variant.values())
    for name, of in by_variant.items():
        config = load(list(of[0].settings))
        assert check(RunPlan.of(config)) == [], name
        assert count(architecture(config.model), 512).parameters <= 1_000_000
        assert config.model.layers["X"]["rope"] == {"base": 2500}
        if name == BASE:
            assert [phase.seq_len - 1 for phase in config.phases] == list(ROWS)[:2]
            continue
        (phase,) = config.phases
        assert (phase.seq_len - 1, phase.global_batch) == (512, 16)
        if name in LONGER:
            assert RunPlan.of(config).last_step == 300
        else:
            assert 60 <= RunPlan.of(config).last_step <= 100
        assert phase.adapters is not None
        assert phase.adapters.alpha == 2 * phase.adapters.rank
        assert of[0].start == f"{BASE}-seed={of[0].values['run.seed']}"


@pytest.mark.slow
def test_variants_set_attention_and_adapters(tmp_path: Path) -> None:
    runs = {run.variant: load(list(run.settings)) for run in part_of(STUDY, tmp_path, tmp_path).sweep.runs}
    letters = {name: config.model.layers["X"] for name, config in runs.items()}
    adapters = {name: config.phases[-1].adapters for name, config in runs.items()}
    sizes = ("chunk", "block", "blocks", "memory")
    assert letters["full"] == letters[BASE]
    assert letters["SW"] == letters["full"] | {"window": 256}
    spans = {name: tuple(letter.get(size) for size in sizes) for name, letter in letters.items() if "block" in letter}
    drawn = [128, 256]
    assert spans == {
        "S2": (128, 4, 4, "shifted"), "S2-lr=2e-4": (128, 4, 4, "shifted"), "NoMem": (drawn, 4, 4, "none"),
        "random": (drawn, 4, 4, "random"), "LM": (drawn, 4, 4, "landmark"), "chunk=128": (128, 4, 4, None),
        "SE-16x4": (drawn, 4, 16, None),
        "SE-long": (drawn, 4, 4, None), "chunk=256": (256, 4, 4, None), "8x2": (drawn, 2, 8, None),
        "2x8": (drawn, 8, 2, None),
        **dict.fromkeys(("SE", "SE-lora", "SE-lora_plus", "SE-lr=1e-3", "SE-lr=4e-3"), (drawn, 4, 4, None)),
        **dict.fromkeys(("rank=4", "rank=16", "rank=64"), (drawn, 4, 4, None)),
    }  # fmt: skip
    learning = {name: adapter.preset.value for name, adapter in adapters.items() if adapter is not None}
    assert {name for name, preset in learning.items() if preset == "lora"} == {"SE-lora", "full-lora"}
    assert {name for name, preset in learning.items() if preset == "lora_plus"} == {"SE-lora_plus", "full-lora_plus"}
    assert set(letters) >= {name for claim in CLAIMS for name in (claim.first, claim.second)}


def test_answers_have_losses_and_distances_to_their_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss of a made-up model is the label itself, and labels that are even are right."""

    def made_up(_: object, tokens_BT: torch.Tensor, *__: object) -> torch.Tensor:
        labels_LB = tokens_BT[:, 1:].T.double()
        return torch.stack((labels_LB, labels_LB % 2 == 0), dim=-1)

    monkeypatch.setattr("hybridtron.evaluate.length.of_labels", made_up)
    config = load(list(part_of(STUDY, Path("runs"), Path("data")).sweep.runs[0].settings))
    model = SimpleNamespace(config=config, arch=architecture(config.model), read=None)
    answered = list(answers(cast(Any, model), 256, 20))
    samples = [task().sample(7, index, ByteTokens(), 256) for index in range(20)]
    expected = []
    for sample in samples:
        for key, value, place in zip(*(sample.meta[name] for name in ("keys", "values", "places")), strict=True):
            expected.append((place - sample.tokens.index(key), float(value), value % 2 == 0))
    assert answered == expected
    assert len(answered) == 20 * PAIRS


def made_up(recall: float, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """Make up results with this share of right answers among 1,000 in each distance bin; inside the window all are
    right.
    """
    right = [1000 if last <= 256 else round(1000 * recall) for last in DISTANCES]
    bins = {"asked": [1000] * len(DISTANCES), "right": right, "nats": [0.0] * 2 + [1000.0] * 3}
    return {str(length): bins for length in lengths}


def read(full: float, trained: float | None = None) -> Readings:
    return readings_of({"full": made_up(full)} | ({} if trained is None else {"trained": made_up(trained)}))


def test_recall_and_perplexity_are_counted_by_distance() -> None:
    """2 of 5 bins within the window, all right there, a quarter beyond it; 3000 nats of 5000 answers."""
    asked = read(0.25)[FULL][512]
    assert asked.recall == pytest.approx((2 + 3 * 0.25) / 5)
    assert (asked.within(True), asked.within(False)) == (1.0, 0.25)
    assert asked.perplexity == pytest.approx(math.exp(0.6))
    assert Asked([4, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0.0] * 5).within(False) is None
    same = read(0.25)
    assert same[TRAINED] is same[FULL]


@pytest.mark.parametrize(
    ("kind", "first", "second", "said"),
    [
        ("above", [0.5, 0.6, 0.7], [0.4, 0.5, 0.62], Said.AGREES),
        ("above", [0.5, 0.6, 0.7], [0.4, 0.5, 0.75], Said.UNDECIDED),  # higher in the mean, and one seed says otherwise
        ("above", [0.5, 0.6, 0.7], [0.52, 0.62, 0.72], Said.NOT),  # by little, and in every seed
        ("above", [0.5], [0.4], Said.ONE_SEED),
        ("not_above", [0.5, 0.6, 0.7], [0.49, 0.59, 0.69], Said.AGREES),
        ("not_above", [0.5, 0.6, 0.7], [0.4, 0.5, 0.6], Said.NOT),
        ("level", [0.5, 0.6, 0.7], [0.48, 0.61, 0.69], Said.AGREES),
        ("level", [0.5, 0.6, 0.7], [0.3, 0.4, 0.5], Said.NOT),
        ("level", [0.5, 0.6, 0.7], [0.3, 0.55, 0.5], Said.UNDECIDED),
    ],
)
def test_claims_are_judged_seed_by_seed(kind: str, first: list[float], second: list[float], said: Said) -> None:
    """Three of five answers are beyond the window, so that a difference there counts three fifths."""
    models = {
        name: {str(seed): read(value) for seed, value in enumerate(values)}
        for name, values in {"first": first, "second": second}.items()
    }
    of_claim = verdict(models, Claim("0", "made up", "first", "second", kind))
    assert of_claim is not None
    assert of_claim.said is said
    points = ", ".join(f"{60 * (one - other):+.1f}" for one, other in zip(first, second, strict=True))
    assert of_claim.numbers.startswith(f"points by seed {points}: ")


def test_a_claim_compares_two_readings_of_one_model() -> None:
    claim = Claim("11", "made up", "SE", "SE", reads=(FULL, TRAINED))
    of_claim = verdict({"SE": {"1": read(0.75, 0.25)}}, claim)
    assert of_claim is not None
    assert of_claim.numbers == "points by seed +30.0: 55 and 85 (one seed)"
    assert score(read(0.75, 0.25), TRAINED) == pytest.approx(0.55)
    assert verdict({}, claim) is None


def costs() -> dict[int, dict[str, Cost]]:
    seconds = {
        512: {"full": 1.0, "SW": 1.0, "S2": 1.0, "SE": 1.0},
        8192: {"full": 3.0, "SW": 1.0, "S2": 1.5, "SE": 1.25},
    }
    return {
        length: {name: Cost(Timing((fastest, fastest + 1)), 10.0 * fastest) for name, fastest in of.items()}
        for length, of in seconds.items()
    }


@pytest.mark.parametrize(("window", "reached"), [(0.25, "yes"), (0.9, "**no**")])
def test_the_page_marks_claims_that_agree(window: float, reached: str) -> None:
    seeds = (0.0, 0.001, 0.002)
    measured: Mapping[str, Mapping[str, Readings]] = {
        BASE: {"1": read(1.0)},
        "full": {str(seed): read(1.0 - by) for seed, by in enumerate(seeds)},
        "SW": {str(seed): read(window - 2 * by, 0.0) for seed, by in enumerate(seeds)},
        "SE": {str(seed): read(0.95 + by, 0.5) for seed, by in enumerate(seeds)},
    }
    rows = page(measured, costs(), ["made up"]).splitlines()
    above = next(row for row in rows if row.startswith("| 2(a) | SE above SW |"))
    assert f"points by seed {60 * (0.95 - window):+.1f}, " in above
    assert above.endswith("| agrees |")
    level = next(row for row in rows if row.startswith("| 2(a) | SE level with full attention |"))
    assert "points by seed -3.0, -2.9, -2.8: " in level
    assert level.endswith("| agrees |")
    lowest = next(row for row in rows if row.startswith("| Table 2 |"))
    assert lowest.endswith("| undecided |")
    fast = "| 4 | steps with SE as fast as with SW, at 8192 tokens | 1.25x **(does not hold)** | does not agree |"
    assert fast in rows
    slower = "| 4 | full slower than SE, and the more the longer the rows | 1.00x at 512, 2.40x at 8192 | agrees |"
    assert slower in rows
    assert "| SE | 1.000 ± 0.000 | 0.951 ± 0.001 | 1.000 ± 0.000 | 0.500 ± 0.000 |" in rows
    assert rows[-2].endswith(f"| {reached} |")
    assert rows[-1].endswith("| 0.999 | yes |")


@pytest.mark.slow
def test_steps_of_every_attention_are_timed_at_a_length(tmp_path: Path) -> None:
    runs = {run.variant: run.settings for run in part_of(QUICK, tmp_path, tmp_path).sweep.runs}
    times = step_times({name: runs[name] for name in ("SW", "full")}, [512])
    window = times[512]["SW"]
    full = times[512]["full"]
    assert window.timing.fastest > 0
    # two layers of 4 * width a pair: a token sees 256 - 256 * 255 / 1024 keys of a window of 256, and 513 / 2 of all
    assert (window.flops, full.flops) == (2 * 4 * 32 * 192.25, 2 * 4 * 32 * 256.5)
