"""Samples by the published rules, from given draws: written from the rules, without the package's generators.

    python -m tests.tasks.rules          writes prompt, answer and mask of every entry of golden/*.jsonl again

An entry has its draws (keys, values, places, ...). Everything else follows here by the letter of the rules: the
templates are written out in each number, a byte is a token, and the mask has a 1 for each byte of the answer.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.tasks.names import NEEDLES
from tests.tasks.rules_babilong import babilong_sample

Derived = tuple[str, str, list[str]]  # prompt, answer, outputs
GOLDEN = Path(__file__).with_name("golden")
GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ESSAY = (  # golden/essay without line breaks; the sentence with a number of 7 digits is left out
    "A garden is a slow machine.",
    "You plant a row of beans, and nothing happens for a week!",
    "Then, on one wet morning, the whole row stands there as if it had always been there.",
    "People ask what the trick is.",
    "There is none.",
    "You water it, you wait, and you keep the goats away from the fence.",
    "My neighbour keeps 2 goats.",
    "They have eaten a hat, a newspaper and most of a wooden gate.",
    '"They are young," she says.',
    "The beans were the next thing they found.",
)


def passkey(entry: dict) -> Derived:
    """Exactly `length` bytes; the filler before the key ends with a sentence, that after it starts with one."""
    key = entry["drawn"]["key"]
    depth = entry["drawn"]["depth"]
    first = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
        "I will quiz you about the important information there."
    )
    middle = f"The pass key is {key}. Remember it. {key} is the pass key."
    last = "What is the pass key? The pass key is"
    answer = f" {key}."
    filler = entry["length"] - len("\n".join([first, "", middle, "", last])) - len(answer)
    before = round(depth * filler)
    endless = " ".join([GRASS] * 100)
    prefix = endless[len(endless) - before :]
    return "\n".join([first, prefix, middle, endless[: filler - before], last]), answer, [str(key)]


def needle_prompt(entry: dict, context: str) -> Derived:
    """RULER's NIAH template: singular where one value is wanted."""
    drawn = entry["drawn"]
    kind = entry["options"].get("values", "numbers")
    wanted = [value for key in drawn["asked"] for of, value in drawn["hidden"] if of == key]
    if len(wanted) == 1:
        (key,) = drawn["asked"]
        singular = kind[:-1]
        return (
            (
                f"A special magic {singular} is hidden within the following text. Make sure to memorize it. I will "
                f"quiz you about the {singular} afterwards.\n{context}\nWhat is the special magic {singular} for {key} "
                f"mentioned in the provided text? The special magic {singular} for {key} mentioned in the provided "
                "text is"
            ),
            f" {wanted[0]}.",
            wanted,
        )
    asked = drawn["asked"]
    if len(asked) == 1:
        query = asked[0]
    else:
        query = f"{asked[0]}, {asked[1]}, {asked[2]}, and {asked[3]}"
    return (
        (
            f"Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz "
            "you "
            f"about the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in "
            f"the provided text? The special magic {kind} for {query} mentioned in the provided text are"
        ),
        f" {wanted[0]}, {wanted[1]}, {wanted[2]}, and {wanted[3]}.",
        wanted,
    )


def first_sentences(count: int) -> list[str]:
    """Return the sentences with the essay's first `count` words; the essay repeats after its end."""
    sentences: list[str] = []
    while count > 0:
        for sentence in ESSAY:
            words = sentence.split(" ")[:count]
            sentences += [" ".join(words)] if words else []
            count -= len(words)
    return sentences


def needles(entry: dict) -> Derived:
    """RULER's NIAH tasks, and one needle by depth."""
    drawn = entry["drawn"]
    options = entry["options"]
    form = f"One of the special magic {options.get('values', 'numbers')} for %s is: %s."
    if options["haystack"] == "essay":
        lines = first_sentences(drawn["units"])
        joint = " "
    elif options["haystack"] == "noise":
        lines = [GRASS] * drawn["units"]
        joint = "\n"
    else:
        lines = [form % (key, value) for key, value in drawn["distractors"]]
        joint = "\n"
    for place, (key, value) in reversed(list(zip(drawn["places"], drawn["hidden"], strict=True))):
        lines.insert(place, form % (key, value))
    return needle_prompt(entry, joint.join(lines))


def variables(drawn: dict) -> Derived:
    """Return one text of variable tracking with one chain."""
    (names,) = drawn["names"]
    (value,) = drawn["values"]
    (places,) = drawn["places"]
    lines = [GRASS] * drawn["lines"]
    for link in range(len(names) - 1, 0, -1):
        lines.insert(places[link], f"VAR {names[link]} = VAR {names[link - 1]} ")
    lines.insert(places[0], f"VAR {names[0]} = {value}")
    context = "\n".join(lines)
    return (
        (
            f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
            f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to "
            "the "
            f"chain(s) of variable assignment in the text above, 5 variables are assigned the value {value}, they are: "
        ),
        " ".join(names),
        names,
    )


def vt(entry: dict) -> Derived:
    """An example with names of 3 letters, a newline, and the text with names of 5 letters."""
    example = entry["drawn"]["example"]
    main = entry["drawn"]["main"]
    assert [len(name) for name in example["names"][0] + main["names"][0]] == [3] * 5 + [5] * 5
    assert all(10000 <= text["values"][0] <= 99998 for text in (example, main))
    shown, answer, _ = variables(example)
    prompt, wanted, outputs = variables(main)
    return f"{shown}{answer}\n{prompt}", wanted, outputs


def common_words(words: list[str], often: int, seldom: int) -> tuple[str, set[str]]:
    """The prompt for a list, and the words that appear often: 10, all others appear seldom."""
    counts = Counter(words)
    common = {word for word, count in counts.items() if count == often}
    assert len(common) == 10
    assert {counts[word] for word in counts.keys() - common} == {seldom}
    context = " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
    return (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The "
        "top "
        "10 words that appear most often in the list are:"
    ), common


def cwe(entry: dict) -> Derived:
    """An example with its answer, a newline, and the list; 6 and 1 times (example: 20 words, 3 and 1 times)."""
    drawn = entry["drawn"]
    often, seldom, example = {"small": (6, 1, (3, 1, 20)), "large": (30, 3, (10, 3, 40))}[drawn["setting"]]
    shown, shown_common = common_words(drawn["example_list"], *example[:2])
    assert len(set(drawn["example_list"])) == example[2]
    prompt, common = common_words(drawn["list"], often, seldom)
    assert len(set(drawn["list"])) == drawn["units"]
    assert (set(drawn["example"]), set(drawn["common"])) == (shown_common, common)
    answers = [
        "".join(f" {place}. {word}" for place, word in enumerate(words, 1))
        for words in (drawn["example"], drawn["common"])
    ]
    return f"{shown}{answers[0]}\n{prompt}", answers[1], drawn["common"]


def fwe(entry: dict) -> Derived:
    """floor(N k^-2 / zeta(2)) words of rank k; rank 1 is dots; ranks 2 to 4 are wanted."""
    text = entry["drawn"]["text"]
    number = entry["drawn"]["units"]
    ranked = Counter(text).most_common()
    kinds = (entry["length"] - 50) // 50
    expected = [int(number * 6 / math.pi**2 / rank**2) for rank in range(1, kinds + 1)]
    assert [count for _, count in ranked] == [count for count in expected if count]
    assert ranked[0][0] == "..."
    assert all(len(word) == 6 for word, _ in ranked[1:])
    wanted = [word for word, _ in ranked[1:4]]
    return (
        (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {' '.join(text)}\nQuestion: Do not provide any explanation. Please ignore the dots "
            "'....'. What are the three most frequently appeared words in the above coded text? Answer: According to "
            "the "
            "coded text above, the three most frequently appeared words are:"
        ),
        f" {wanted[0]}, {wanted[1]}, and {wanted[2]}.",
        wanted,
    )


def documents_prompt(texts: list[str], question: str, answers: list[str]) -> Derived:
    """RULER's QA template."""
    context = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(texts, 1))
    return (
        (
            "Answer the question based on the given documents. Only give me the answer and do not output any other "
            "words."
            f"\n\nThe following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. "
            f"Only give me the answer and do not output any other words.\n\nQuestion: {question} Answer:"
        ),
        f" {answers[0]}",
        answers,
    )


def squad(entry: dict) -> Derived:
    """Sample i asks the i-th question that can be answered; its paragraph is among the documents."""
    articles = json.loads((GOLDEN / "squad.json").read_text())["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    asked = [(p["context"], qa) for p in paragraphs for qa in p["qas"] if not qa["is_impossible"]]
    gold, question = asked[entry["index"]]
    texts = [paragraphs[number]["context"] for number in entry["drawn"]["documents"]]
    assert gold in texts
    return documents_prompt(texts, question["question"], list(dict.fromkeys(a["text"] for a in question["answers"])))


def hotpotqa(entry: dict) -> Derived:
    """Titles stand above their paragraphs; all paragraphs of the question are among the documents."""
    asked = json.loads((GOLDEN / "hotpotqa.json").read_text())
    texts = [title + "\n" + "".join(lines) for one in asked for title, lines in one["context"]]
    texts = list(dict.fromkeys(texts))
    question = asked[entry["index"]]
    chosen = [texts[number] for number in entry["drawn"]["documents"]]
    assert {title for title, _ in question["context"]} <= {text.split("\n")[0] for text in chosen}
    return documents_prompt(chosen, question["question"], [question["answer"]])


def qa_synth(entry: dict) -> Derived:
    """The answer is read from the documents: of the person, or of the partner that the person's document names."""
    drawn = entry["drawn"]
    person = entry["drawn"]["who"]
    who = person
    texts = " ".join(drawn["documents"])
    if entry["options"]["hops"] == 2:
        who = f"the partner of {person}"
        person = re.search(rf"The partner of {person} is ([A-Z]\w+ [A-Z]\w+)\.", texts)[1]
    facts = {
        "profession": (f"What does {who} work as?", rf"{person} works as a (\w+)\."),
        "city": (f"Which city does {who} live in?", rf"{person} lives in (\w+)\."),
        "instrument": (f"Which instrument does {who} play?", rf"{person} plays the (\w+)\."),
        "animal": (f"What is the favourite animal of {who}?", rf"The favourite animal of {person} is the (\w+)\."),
        "dish": (f"What is the favourite dish of {who}?", rf"The favourite dish of {person} is (\w+)\."),
        "colour": (f"What is the favourite colour of {who}?", rf"The favourite colour of {person} is (\w+)\."),
    }
    question, fact = facts[drawn["kind"]]
    return documents_prompt(drawn["documents"], question, re.findall(fact, texts))


RULES = {
    "passkey": passkey,
    "needle": needles,
    "vt": vt,
    "cwe": cwe,
    "fwe": fwe,
    "qa_1": squad,
    "qa_2": hotpotqa,
    "qa_synth_1": qa_synth,
    "qa_synth_2": qa_synth,
} | {f"niah_{name}": needles for name in NEEDLES}


TokenRow = tuple[list[int], list[int]]  # tokens, and 1 for each that is learned
LETTERS = "abcdefghijklmnopqrstuvwxyz$|.*"


def copying(entry: dict) -> TokenRow:
    """`$ s | s .`, the copy and the period are learned; packed: back to back, the last one cut and not learned."""
    tokens = []
    mask = []
    for string in entry["drawn"]["strings"]:
        tokens += [LETTERS.index(letter) for letter in f"${string}|{string}."]
        mask += [0] * (len(string) + 2) + [1] * (len(string) + 1)
    if len(tokens) > entry["length"]:
        mask[-2 * len(string) - 3 :] = [0] * (2 * len(string) + 3)
    return tokens[: entry["length"]], mask[: entry["length"]]


def recall(entry: dict) -> TokenRow:
    """1, the table, 4, the table again; the values (10 to 25) of the second one are learned."""
    shown, asked = (leaves(part) for part in entry["drawn"]["parts"])
    assert sorted(shown) == sorted(asked)  # the same values of the same paths
    assert len({tuple(path) for *path, _ in shown}) == len(shown)  # each path once
    levels = [{path[level] for path in shown} for level in range(len(shown[0]) - 1)]
    assert len(shown) == math.prod(map(len, levels))  # all combinations
    flat = [list(flattened(part)) for part in entry["drawn"]["parts"]]
    tokens = [1, *flat[0], 4, *flat[1]]
    return tokens, [0] * (len(flat[0]) + 2) + [int(10 <= token <= 25) for token in flat[1]]


def leaves(block: list) -> list[list[int]]:
    """[[context, [[key, value], ...]], ...] -> [[context, key, value], ...]."""
    rows = []
    for token, inside in block:
        if isinstance(inside, int):
            rows.append([token, inside])
        else:
            rows += [[token, *row] for row in leaves(inside)]
    return rows


def flattened(block: list | int) -> Iterator[int]:
    if isinstance(block, int):
        yield block
    else:
        for inside in block:
            yield from flattened(inside)


def mqar(entry: dict) -> tuple[list[int], list[int], list[int]]:
    """Pairs; later each key again, where its value is the target."""
    drawn = entry["drawn"]
    length = entry["length"]
    tokens = [token for pair in zip(drawn["keys"], drawn["values"], strict=True) for token in pair]
    tokens += drawn["rest"]  # ids at the places without a key, zeros where keys belong
    targets = [-100] * length
    for key, value, place in zip(drawn["keys"], drawn["values"], drawn["places"], strict=True):
        assert tokens[place] == 0
        assert place % 2 == 0
        assert 1 <= key < 4096 <= value < 8192
        tokens[place] = key
        targets[place] = value
    return tokens, [int(target != -100) for target in targets], targets


TOKEN_RULES = {
    "copying": copying,
    "joint_recall": recall,
    "multilevel_joint_recall": recall,
    "associative_recall": recall,
}


def derived(task: str, entry: dict) -> dict:
    """Return the entry with the values that follow from its draws; the mask as numbers of zeros and ones."""
    if task == "mqar":
        return entry | dict(zip(("tokens", "mask", "targets"), mqar(entry), strict=True))
    if task in TOKEN_RULES:
        tokens, mask = TOKEN_RULES[task](entry)
        after = [token if learned else -100 for token, learned in zip(tokens[1:], mask[1:], strict=True)]
        return entry | {"tokens": tokens, "mask": mask, "targets": [*after, -100]}
    if task.startswith("babilong_"):
        prompt, answer, outputs = babilong_sample(task, entry)
    else:
        prompt, answer, outputs = RULES[task](entry)
    mask = [len(prompt.encode()), len(answer.encode())]
    return entry | {"prompt": prompt, "answer": answer, "outputs": outputs, "mask": mask}


def read(task: str) -> list[dict]:
    return [json.loads(line) for line in (GOLDEN / f"{task}.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    for file in sorted(GOLDEN.glob("*.jsonl")):
        lines = [json.dumps(derived(file.stem, entry)) + "\n" for entry in read(file.stem)]
        file.write_text("".join(lines))
