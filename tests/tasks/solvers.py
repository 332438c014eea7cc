"""Solvers that read a prompt and answer it, as a reader would: they know neither generator nor draws."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

Solver = Callable[[str], str]


def passkey(prompt: str) -> str:
    return re.findall(r"The pass key is (\d+)\.", prompt)[0] + "."


def needle(prompt: str) -> str:
    """All values of the keys that the question names."""
    question = prompt.rsplit("special magic", 1)[1]
    facts = re.findall(r"One of the special magic \w+ for (.+?) is: (\S+)\.", prompt)
    return ", ".join(value for key, value in facts if re.search(rf" {re.escape(key)}[ ,]", question))


def variables(prompt: str) -> str:
    """Follows the chain that starts with the value in the last question."""
    text = prompt[prompt.rindex("Memorize and track") :]
    (value,) = set(re.findall(r"assigned the value (\d+)", text))
    (first,) = re.findall(rf"VAR (\w+) = {value}$", text, re.MULTILINE)
    chain = [first]
    for name, before in re.findall(r"VAR (\w+) = VAR (\w+)", text):
        chain += [name] if before == chain[-1] else []
    return " ".join(chain)


def common_words(prompt: str) -> str:
    words = re.findall(r"\d+\. (\S+)", prompt[prompt.rindex("Below is") :])
    return " ".join(word for word, _ in Counter(words).most_common(10))


def coded_words(prompt: str) -> str:
    text = prompt.split("coded words. ")[1].split("\nQuestion")[0].split(" ")
    return " ".join([word for word, _ in Counter(text).most_common() if word != "..."][:3])


READ = {  # where the answers stand in the documents of golden/
    "How far does the tide": r"rises (\w+ \w+) twice",
    "What do boats": r"have (\w+ \w+), so",
    "For how long was": r"fired for (\w+ \w+)",
    "What did potters": r"threw (\w+) into",
    "In which country": r"born in (\w+)",
    "Which river does": r"spans the river (\w+)",
    "How many inns": r"and (\w+) inns",
}
ATTRIBUTES = {
    "work as": "{} works as a ",
    "Which city": "{} lives in ",
    "Which instrument": "{} plays the ",
    "animal": "animal of {} is the ",
    "dish": "dish of {} is ",
    "colour": "colour of {} is ",
}


def question(prompt: str) -> str:
    asked = prompt.rsplit("Question: ", 1)[1]
    (pattern,) = (pattern for start, pattern in READ.items() if asked.startswith(start))
    return re.findall(pattern, prompt)[0]


def synthetic_question(prompt: str) -> str:
    asked = prompt.rsplit("Question: ", 1)[1]
    who = re.findall(r"[A-Z]\w+ [A-Z]\w+", asked)[0].removeprefix("What ")
    if "partner" in asked:
        who = re.findall(rf"The partner of {who} is ([A-Z]\w+ [A-Z]\w+)", prompt)[0]
    (form,) = (form for word, form in ATTRIBUTES.items() if word in asked)
    return re.findall(form.format(who) + r"(\w+)\.", prompt)[0]


SOLVERS: dict[str, Solver] = {
    "passkey": passkey,
    "needle": needle,
    "vt": variables,
    "cwe": common_words,
    "fwe": coded_words,
    "qa_1": question,
    "qa_2": question,
    "qa_synth_1": synthetic_question,
    "qa_synth_2": synthetic_question,
} | {
    f"niah_{name}": needle
    for name in (
        "single_1",
        "single_2",
        "single_3",
        "multikey_1",
        "multikey_2",
        "multikey_3",
        "multivalue",
        "multiquery",
    )
}
