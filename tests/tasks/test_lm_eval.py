"""RULER's samples by lm-evaluation-harness equal ours, once its draws are used and its differences undone.

Its generators are called directly, for the tasks that need no download. Differences that are undone here: `vt` spells
"assgined", joins its lines by spaces and sets no example before these; `cwe` gives its example apart; the answer's
prefix follows a space that it leaves to the harness. Remaining differences: lengths (it counts special tokens and
answers, and searches in steps), the order of its random numbers, and `string_match_part`, where it takes the mean over
references.
"""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from hybridtron.tasks.haystack import NOISE
from hybridtron.tasks.metrics import string_match_all
from hybridtron.tasks.options import named
from hybridtron.tasks.ruler import cwe, fwe
from hybridtron.tasks.ruler.niah import NEEDLE, Needles, inserted
from hybridtron.tasks.ruler.vt import Drawn

pytestmark = pytest.mark.slow  # imports lm_eval


class Bytes:
    """A tokenizer as lm-evaluation-harness calls it."""

    def __init__(self, text: str) -> None:
        self.input_ids = list(text.encode())


@pytest.fixture(scope="module", autouse=True)
def harness() -> None:
    pytest.importorskip("lm_eval")
    random.seed(5)


def test_variable_tracking_prompts_equal_lm_eval() -> None:
    from lm_eval.tasks.ruler import vt_utils

    for lines in (8, 12):  # from 5 on down it cuts lines
        text, names = vt_utils.generate_input_output(lines, 1, 4)
        text = text.replace("assgined", "assigned")
        parts = re.findall(rf"{re.escape(NOISE)}|VAR \w+ = (?:VAR )?\w+", text)
        links = [place for place, part in enumerate(parts) if part.startswith("VAR")]
        places = [place - before for before, place in enumerate(links)]
        value = int(parts[links[0]].split()[-1])
        question, prefix, answer = Drawn([names], [value], [places], lines).texts()
        assert text.split() == (question + prefix).split()
        assert answer.split() == names


@pytest.mark.parametrize("length", [2000, 8000])
def test_common_word_prompts_equal_lm_eval(length: int) -> None:
    from lm_eval.tasks.ruler import cwe_utils

    setting = "small" if length < 4096 else "large"
    repeats, example_repeats, example_words = cwe.REPEATS[setting]
    example, text, common = cwe_utils.generate_input_output(30, length)
    words = re.findall(r"\d+\. (.+?)(?= \d+\. |\n)", text)
    assert text == cwe.QUESTION.format(context=cwe.numbered(words).strip()) + cwe.PREFIX
    assert Counter(Counter(words).values()) == {repeats[0]: 10, repeats[1]: 20}
    assert {word for word, count in Counter(words).items() if count == repeats[0]} == set(common)
    shown = re.findall(r"\d+\. (.+?)(?= \d+\. |\n)", example.split("\nQuestion")[0] + "\n")
    answers = re.findall(r"\d+\. (.+?)(?= \d+\. |\n)", example.split("list are:")[1] + "\n")
    expected = cwe.QUESTION.format(context=cwe.numbered(shown).strip()) + cwe.PREFIX + cwe.numbered(answers).strip()
    assert example == expected
    assert Counter(Counter(shown).values()) == {example_repeats[0]: 10, example_repeats[1]: example_words - 10}


@pytest.mark.parametrize("number", [200, 1000])
def test_frequent_word_prompts_equal_lm_eval(number: int) -> None:
    from lm_eval.tasks.ruler import fwe_utils

    text, answer, used = fwe_utils.generate_input_output(20000, Bytes, num_words=number, vocab_size=81)
    context = text.split("coded words. ")[1].split("\nQuestion")[0]
    assert used == number
    assert text == fwe.QUESTION.format(context=context) + fwe.PREFIX
    ours = named("fwe").text_of(random.Random(0), number, 0, 4100)  # type: ignore[attr-defined]
    ranked = Counter(context.split(" ")).most_common()
    assert sorted(ours.meta["counts"]) == sorted(count for _, count in ranked)
    assert ranked[0][0] == fwe.DOTS
    assert [word for word, _ in ranked[1:4]] == answer


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "niah_multikey_3"])
def test_needle_prompts_equal_lm_eval(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "find", lambda *_: "")  # it looks for a model that these tasks don't need
    from lm_eval.tasks.ruler import prepare_niah
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE

    task = named(name)
    assert isinstance(task, Needles)
    kind = "repeat" if task.haystack == "noise" else "needle"
    for lines in (3, 20):
        text, answers, query = prepare_niah.generate_input_output(
            lines,
            prepare_niah.get_haystack(kind),
            type_haystack=kind,
            num_needle_k=1,
            type_needle_k=task.keys,
            num_needle_v=1,
            type_needle_v=task.values,
            template=TEMPLATE,
        )
        context = text.split("\n")[1:-1]
        fact = NEEDLE.format(kind=task.values, key=query, value=answers[0])
        place = context.index(fact)
        assert inserted(context[:place] + context[place + 1 :], [place], [fact]) == context
        assert len(context) == lines + 1
        ours = task.asked_about("\n".join(context), [query], tuple(answers), {})
        assert ours.question == text
        assert string_match_all(ours.answer, answers) == 1.0
