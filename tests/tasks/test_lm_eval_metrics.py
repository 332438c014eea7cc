"""Metrics agree with lm-evaluation-harness's own functions on a hundred continuations each.

Continuations are made of expected words and others: in other cases, in parts, with control characters, empty. One
difference remains: `string_match_part` is a mean over references there, so that it is compared with one reference.
"""

from __future__ import annotations

import random
import sys
from types import ModuleType

import pytest

from hybridtron.tasks import metrics
from hybridtron.tasks.base import Sample
from hybridtron.tasks.options import named

pytestmark = pytest.mark.slow  # imports lm_eval
WORDS = ["the", "A", "1234567", "apple,milk", "blue-sky.", "Nothing", "an", "(42)", "kitchen", "no", "One", "is"]
JOINTS = [" ", "\n", "\t", "\x01", ", ", "", ". "]


@pytest.fixture(scope="module")
def continuations() -> list[tuple[str, list[str]]]:
    """Return continuations, each with its expected words."""
    pytest.importorskip("lm_eval")
    rng = random.Random(0)
    texts_and_wanted = []
    for number in range(100):
        wanted = rng.sample(WORDS, rng.randint(1, 4))
        parts = rng.sample(wanted, rng.randint(0, len(wanted))) + rng.sample(WORDS, rng.randint(0, 3))
        changed = [rng.choice([str, str.upper, str.lower, lambda word: word[:-1]])(part) for part in parts]
        rng.shuffle(changed)
        text = "".join(rng.choice(JOINTS) + part for part in changed) + rng.choice(JOINTS)
        texts_and_wanted.append(("" if number == 0 else text, wanted))
    return texts_and_wanted


def test_string_match_equals_lm_eval(continuations: list[tuple[str, list[str]]]) -> None:
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all, string_match_part

    ours = [metrics.string_match_all(text, wanted) for text, wanted in continuations]
    theirs = [string_match_all(postprocess_pred([text]), [wanted]) for text, wanted in continuations]
    assert ours == pytest.approx(theirs)
    assert len(set(ours)) > 3
    ours = [metrics.string_match_part(text, wanted[:1]) for text, wanted in continuations]
    assert ours == [string_match_part(postprocess_pred([text]), [wanted[:1]]) for text, wanted in continuations]
    assert set(ours) == {0.0, 1.0}


def test_f1_equals_lm_eval(continuations: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, attribute in (("jieba", "cut"), ("fuzzywuzzy", "fuzz"), ("rouge", "Rouge")):  # other metrics use them
        absent = ModuleType(name)
        setattr(absent, attribute, None)
        monkeypatch.setitem(sys.modules, name, absent)
    from lm_eval.tasks.longbench.metrics import get_qa_f1_score

    ours = [metrics.f1(text, wanted) for text, wanted in continuations]
    theirs = [get_qa_f1_score({"answers": wanted}, [text])["qa_f1_score"] for text, wanted in continuations]
    assert ours == pytest.approx(theirs)
    assert len(set(ours)) > 5


def test_exact_match_equals_lm_eval(continuations: list[tuple[str, list[str]]]) -> None:
    from lm_eval.api.metrics import exact_match_hf_evaluate

    pairs = [(text, wanted[0]) for text, wanted in continuations] + [(f" {one}\n", one) for one in WORDS]
    for text, wanted in pairs:
        theirs = exact_match_hf_evaluate([text.strip()], [wanted])["exact_match"]
        assert metrics.exact_match(text, [wanted]) == theirs


def test_babilong_contains_equals_lm_eval(continuations: list[tuple[str, list[str]]]) -> None:
    from lm_eval.tasks.babilong.common_utils import process_results

    task = named("babilong_qa1")
    scores = []
    for text, wanted in continuations:
        sample = Sample(task.name, 0, 0, "", "", (), (), (wanted[0],), 0, 0, meta={"question": "Where is Mary?"})
        scores.append(task.score(sample, text)["contains"])
        (theirs,) = process_results({"target": wanted[0]}, [text]).values()
        assert scores[-1] == theirs
    assert set(scores) == {0.0, 1.0}
