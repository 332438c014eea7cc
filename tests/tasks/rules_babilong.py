"""BABILong's golden samples, from the facts, their gaps and the position where the text begins.

The prompts up to the text are golden/babilong/qa*.prompt, taken letter by letter from the published ones. The answer
follows from the facts by the reader of `solvers.py`; the sentence around it has the form of the prompt's examples.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.tasks.solvers import babilong

GOLDEN = Path(__file__).with_name("golden")
LONG = (  # sentences of the golden essay that have 10 words
    "You plant a row of beans, and nothing happens for a week!",
    "Then, on one wet morning, the whole row stands there as if it had always been there.",
    "You water it, you wait, and you keep the goats away from the fence.",
    "They have eaten a hat, a newspaper and most of a wooden gate.",
)
SENTENCES = {
    "qa1": (r"Where is (\w+)\?", "The most recent location of {0} is {answer}."),
    "qa2": (r"Where is the (\w+)\?", "The {0} is in the {answer}."),
    "qa3": (r"Where was the (\w+) before the (\w+)\?", "Before the {1} the {0} was in the {answer}."),
}


def babilong_sample(task: str, entry: dict) -> tuple[str, str, list[str]]:
    """Prompt, answer, outputs."""
    story = task.removeprefix("babilong_")
    drawn = entry["drawn"]
    sentences: list[str] = []
    words = drawn["units"]
    while words > 0:
        sentence = LONG[(drawn["start"] + len(sentences)) % len(LONG)].split(" ")[:words]
        sentences.append(" ".join(sentence))
        words -= len(sentence)
    assert drawn["gaps"] == sorted(drawn["gaps"])
    context = []
    for gap in range(len(sentences) + 1):
        context += [fact for fact, at in zip(drawn["facts"], drawn["gaps"], strict=True) if at == gap]
        context += sentences[gap : gap + 1]
    head = (GOLDEN / "babilong" / f"{story}.prompt").read_text()
    prompt = f"{head}\n\n<context>\n{' '.join(context)}\n</context>\n\nQuestion: {drawn['question']}"
    answer = babilong(prompt)
    form, sentence = SENTENCES.get(story, ("", "{answer}"))
    about = re.fullmatch(form, drawn["question"]) if form else None
    full = sentence.format(*(about.groups() if about else ()), answer=answer)
    return prompt, f"\nAnswer: {full}", [answer]
