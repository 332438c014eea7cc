"""Rows of results by hand: means, standard errors, perplexities, averages; and questions of a suite or a file."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hybridtron.cli.evaluate import SUITES as NAMED
from hybridtron.evaluate.instruments import verdict
from hybridtron.evaluate.page import page
from hybridtron.evaluate.results import AVERAGES, Evaluated, by_length_rows, main_rows, rows_of
from hybridtron.evaluate.sample_log import SampleLog
from hybridtron.evaluate.suites import SUITES, suite_of, tokens_of
from hybridtron.problems import Code, Unusable
from tests.refusals import raises_code

ABOUT = {"tokenizer": "t", "dtype": "fp32"}


def scored(task: str, value: float, index: int, depth: float | None = None) -> dict:
    line = {"key": f"{task}/8/0/{index}", "task": task, "length": 8, "index": index, "seed": 0, "written": "x" * index}
    line |= {"metrics": {"string_match_all": value, "other": 0.0}, "asked": "<a?>", "wanted": "y"}
    return line if depth is None else line | {"depth": depth}


def test_means_have_standard_errors() -> None:
    values = [1.0, 0.0, 1.0, 1.0]
    lines = [scored("needle", value, i, depth=i % 2) for i, value in enumerate(values)]
    first, second = rows_of(lines, ABOUT)
    assert (first["metric"], first["value"], first["n"], first["empty"]) == ("string_match_all", 0.75, 4, 1)
    assert first["standard_error"] == pytest.approx(0.25)  # sqrt(3/4 * 1/4 * 4/3 / 4)
    assert first["by_depth"] == [[0, 1.0, 2], [1, 0.5, 2]]
    assert first["about"] == ABOUT
    assert second["metric"] == "other"
    assert rows_of(lines[:1], ABOUT)[0]["standard_error"] is None
    assert main_rows([first, second]) == {"needle": [first]}


def test_perplexity_is_also_given_in_bits_per_byte() -> None:
    sums = [(2.0, 4, 8), (6.0, 4, 8)]
    lines = [
        {"key": f"perplexity/4/{i}", "task": "perplexity", "length": 4, "index": i, "nats": nats, "tokens": tokens}
        | {"bytes": size, "text": "rows"}
        for i, (nats, tokens, size) in enumerate(sums)
    ]
    perplexity, loss, bits = rows_of(lines, ABOUT)
    assert (loss["value"], loss["standard_error"]) == (1.0, pytest.approx(0.5))  # row means 0.5 and 1.5
    assert perplexity["value"] == pytest.approx(math.e)
    assert perplexity["standard_error"] == pytest.approx(0.5 * math.e)
    assert bits["value"] == pytest.approx(8 / math.log(2) / 16)


def test_an_average_needs_all_of_its_tasks() -> None:
    names = AVERAGES["ruler_se"]
    assert len(names) == 11
    lines = [scored(name, float(i == 0), 0) for i, name in enumerate(names)]
    averages = {row["task"]: row for row in rows_of(lines, ABOUT) if row["task"].startswith("average")}
    assert averages["average of ruler_se"]["value"] == pytest.approx(1 / 11)
    assert averages["average of NIAH-S"]["value"] == pytest.approx(1 / 3)
    assert "average of VT" not in averages
    assert "average of ruler_se" not in {row["task"] for row in rows_of(lines[1:], ABOUT)}


def test_averages_combine_tasks_with_the_same_options() -> None:
    """Tasks without the option, such as vt, count to both; a group none of whose tasks has it does not."""

    def asked(options: str, value: float) -> list[dict]:
        names = [name + (options if name.startswith("niah") else "") for name in AVERAGES["ruler_se"]]
        return [scored(name, value if name.startswith("niah") else 0.0, 0) for name in names]

    rows = rows_of([*asked("", 1.0), *asked("[essay=files:x]", 0.5)[:8]], ABOUT)
    averages = {row["task"]: row["value"] for row in rows if row["task"].startswith(("average", "effective"))}
    assert averages == pytest.approx({
        "average of NIAH-S": 1.0, "average of NIAH-M": 1.0, "average of NIAH-M-QV": 1.0, "average of CF-WE": 0.0,
        "average of ruler_se": 8 / 11, "average of NIAH-S[essay=files:x]": 0.5, "average of NIAH-M[essay=files:x]": 0.5,
        "average of NIAH-M-QV[essay=files:x]": 0.5, "average of ruler_se[essay=files:x]": 4 / 11,
        "effective length": 0, "effective length[essay=files:x]": 0,
    })  # fmt: skip


@pytest.mark.parametrize(("text", "tokens"), [("4x", 1024), ("1/4x", 64), (4096, 4096), ("16", 16), ("1/3x", 85)])
def test_lengths_of_a_suite_are_parsed(text: str | int, tokens: int) -> None:
    assert tokens_of(text, 256) == tokens


def test_named_suites_are_expanded() -> None:
    assert tuple(SUITES) == NAMED
    sizes = {name: len(suite_of(asked, 256).cells) for name, asked in SUITES.items()}
    assert sizes == {"samba": 7, "span": 33, "length": 57, "hax": 13, "all": 7 + 3 * (1 + 15 + 10)}
    (cell, *_) = suite_of(SUITES["samba"], 4096, lengths=["2x"], samples=3).cells
    assert (cell.length, cell.samples, cell.key(2)) == (8192, 3, "passkey/8192/0/2")


WRONG: list[tuple[dict[str, object], Code]] = [
    ({"tasks": [{"task": "passkye", "lengths": [8]}]}, "unknown-name"),
    ({"tasks": [{"task": "passkey", "lenghts": [8]}]}, "unknown-name"),
    ({"tasks": [{"task": "passkey", "lengths": [8], "options": {"digit": 3}}]}, "unknown-name"),
    ({"tasks": [{"task": "passkey", "lengths": ["4y"]}]}, "malformed"),
    ({"tasks": [{"task": "passkey"}]}, "wrong-type"),
    ({"samples": 0, "tasks": [{"task": "passkey", "lengths": [8]}]}, "out-of-range"),
    ({"instruments": ["tuba"]}, "unknown-name"),
    ({"perplexity": [{"context": 8, "score": "old"}]}, "unknown-name"),
    ({"perplexity": [{"context": 8, "stride": 9}]}, "out-of-range"),
    ({}, "missing"),
    ({"tasks": ["passkey"]}, "wrong-type"),
    ({"tasks": [{"task": "passkey", "lengths": [400], "options": ["digits=3"]}]}, "wrong-type"),
]


@pytest.mark.parametrize(("asked", "code"), WRONG)
def test_faulty_suites_are_refused(asked: dict[str, object], code: Code) -> None:
    with raises_code(Unusable, code):
        suite_of(asked, 256)


def test_records_continue_after_a_cut_line(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    records = SampleLog(file, ABOUT)
    records.add([scored("needle", 1.0, 0), scored("needle", 0.0, 1)])
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    again = SampleLog(file, ABOUT)
    assert list(again.lines) == ["needle/8/0/0"]
    again.add([scored("needle", 0.0, 1)])
    assert file.read_bytes() == whole
    with raises_code(Unusable, "changed"):
        SampleLog(file, ABOUT | {"dtype": "bf16"})


class Outside(HTMLParser):
    """Parser for a page's external resources and scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.found = []
        self.open = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found += [value for key, value in attrs if key in ("src", "href") and not value.startswith("data:")]
        self.found += [tag] if tag in ("script", "link", "iframe") else []
        self.open += [tag] if tag not in ("meta", "img") else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_versions_with_equal_measurements_share_records(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    SampleLog(file, ABOUT | {"hybridtron": "0.1.0"}).add([scored("needle", 1.0, 0)])
    assert len(SampleLog(file, ABOUT | {"hybridtron": "0.2.0"}).lines) == 1
    with raises_code(Unusable, "changed"):
        SampleLog(file, ABOUT | {"hybridtron": "9.9.9"})


def test_the_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    lines = [scored("needle", 1.0, 0), scored("needle", 0.0, 1)]
    first = Evaluated("a <b>", tmp_path, ABOUT, rows_of(lines, ABOUT), lines, ["cwe at 8: too short"])
    second = Evaluated("other", tmp_path, ABOUT, rows_of(lines[:1], ABOUT), lines[:1])
    read = Outside()
    read.feed(page("Side & side", [first, second], [("picture", b"\x89PNG")]))
    assert read.found == []
    assert read.open == []
    for text in ("a <b>", "Side & side", "<a?>", "wanted:  y", "0.500 ± 0.500", "cwe at 8: too short", "1.000"):
        assert text in read.text


def test_the_effective_length_is_the_longest_above_the_threshold() -> None:
    def asked(length: int, value: float) -> list[dict]:
        return [scored(task, value, 0) | {"length": length} for task in AVERAGES["ruler_se"]]

    lines = [*asked(8, 1.0), *asked(16, 0.857), *asked(32, 0.855)]
    effective = next(row for row in rows_of(lines, ABOUT) if row["task"] == "effective length")
    assert (effective["value"], effective["length"], effective["metric"], effective["n"]) == (16, 32, "tokens", 3)
    assert effective["about"] == ABOUT
    assert next(row["value"] for row in rows_of(asked(8, 0.5), ABOUT) if row["task"] == "effective length") == 0
    assert "effective length" not in by_length_rows(rows_of(lines, ABOUT))
    assert not [row for row in rows_of(lines[:5], ABOUT) if row["task"] == "effective length"]


@pytest.mark.parametrize(("beyond", "holds"), [(2.0, True), (2.03, True), (2.05, False)])
def test_length_generalization_is_judged_by_the_worst_doubling(beyond: float, holds: bool) -> None:
    """Use a context of 16 tokens in rows of 64. Text that is twice as hard for both readings makes no difference."""
    shown = [4.0] * 4 + [2.0] * 12 + [4.0] * 16 + [beyond] * 32
    within = [4.0] * 4 + [2.0] * 12 + [4.0] * 16 + [2.0] * 32
    lines = [
        {"position": position, "loss": math.log(perplexity), "loss_within": math.log(perplexity_within)}
        for position, (perplexity, perplexity_within) in enumerate(zip(shown, within, strict=True), 1)
    ]
    judged = verdict(lines, 16)
    assert judged is not None
    assert judged.holds == holds
    assert judged.most == pytest.approx(max(1.0, beyond / 2))
    assert verdict(lines[:16], 16) is None


@pytest.mark.parametrize("key", ["tasks", "perplexity", "instruments"])
@pytest.mark.parametrize("entry", ["passkey", 5, {"task": "passkey"}])
def test_suite_entries_that_are_no_lists_are_refused(key: str, entry: object) -> None:
    with raises_code(Unusable, "wrong-type"):
        suite_of({key: entry}, 16)
