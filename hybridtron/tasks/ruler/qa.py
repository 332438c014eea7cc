"""RULER's question answering among documents: qa_1 (SQuAD) and qa_2 (HotpotQA).

The prompt has the documents that answer the question. As far as the length allows, it also has other documents from the
same article, and then random documents. All documents are in random order. Sample i asks question i of the data set.
The data set is a file: SQuAD's dev-v2.0.json or HotpotQA's hotpot_dev_distractor_v1.json. `hybridtron tasks download`
stores this file where the task looks for it; the option `data` names another path. Similar tasks that need no download
are in qa_synth.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import ClassVar

from hybridtron.nested import json_of
from hybridtron.safe_open import Unreadable, read_regular
from hybridtron.tasks.base import Sample, TaskError, TextTokens
from hybridtron.tasks.fitted import TaskText, fitted
from hybridtron.tasks.metrics import exact_match, f1, string_match_part
from hybridtron.tasks.ruler.base import RulerTask
from hybridtron.tasks.ruler.data_sets import FOLDER, PUBLISHED

ASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
QUESTION = ASK + "\n\nThe following are given documents.\n\n{context}\n\n" + ASK + "\n\nQuestion: {question}"
PREFIX = " Answer:"
MAX_DATA_BYTES = 2**30  # maximum size of a data set's file


@dataclass(frozen=True)
class AskedQuestion:
    """A question, its accepted answers, and the indices of its documents.

    gold  documents that must be in the prompt
    near  other documents from the same article, which are preferred to random documents
    """

    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class DocumentSet:
    """A data set: documents, and questions about them."""

    documents: list[str] = field(default_factory=list)
    questions: list[AskedQuestion] = field(default_factory=list)


@dataclass(frozen=True)
class QuestionAnswering(RulerTask):
    """RULER's QA task; texts grow by documents.

    source    squad or hotpotqa
    data      path of the data set's file; "" stands for the path at which `hybridtron tasks download` stores the file
    faithful  also reproduce unintended properties of the public generator (base.py)
    """

    generate: ClassVar[int] = 32

    name: str
    source: str
    data: str = ""
    faithful: bool = False

    @property
    def about(self) -> str:
        return f"RULER: a question about documents ({PUBLISHED[self.source].title})"

    def steps(self, length: int) -> tuple[int, int]:
        fewest = max(len(question.gold) for question in self.known().questions)
        step = 10 if self.faithful else 1
        return max(fewest, step), step

    def known(self) -> DocumentSet:
        """Return the data set, which is read once. Raises TaskError if its file is missing or can't be read."""
        return _data_set(self.name, self.source, self.file.absolute())

    @property
    def file(self) -> Path:
        """Path of the data set's file."""
        if self.data:
            return Path(self.data)
        return FOLDER / PUBLISHED[self.source].file.name

    def asked(self, random: Random, index: int) -> AskedQuestion:
        """Return question `index`. Raises TaskError if there are fewer questions."""
        questions = self.known().questions
        if index >= len(questions):
            raise TaskError(
                f"{self.name}: there is no question {index}: {self.file} has {len(questions)} questions",
                code="out-of-range",
            )
        return questions[index]

    def sample(self, seed: int, index: int, tokenizer: TextTokens, length: int) -> Sample:
        self.check(length)
        if fitted(self, tokenizer, length) > (count := len(self.known().documents)):
            raise TaskError(
                f"{self.name}: a length of {length} has room for more than all {count} documents of the data set; "
                "choose a smaller length",
                code="does-not-fit",
            )
        return super().sample(seed, index, tokenizer, length)

    def text_of(self, random: Random, units: int, index: int, length: int) -> TaskText:
        asked_question = self.asked(random, index)
        documents = self.known().documents
        near = random.sample(
            asked_question.near, min(len(asked_question.near), max(units - len(asked_question.gold), 0))
        )
        chosen_documents = [*asked_question.gold, *near]
        other_documents = sorted(set(range(len(documents))) - set(chosen_documents))
        chosen_documents += random.sample(
            other_documents, min(max(units - len(chosen_documents), 0), len(other_documents))
        )
        chosen_documents = self.shuffled(chosen_documents, random)
        context = "\n\n".join(
            f"Document {place}:\n{documents[number]}" for place, number in enumerate(chosen_documents, 1)
        )
        question = QUESTION.format(context=context, question=asked_question.question)
        meta = {
            "documents": chosen_documents,
            "gold": list(asked_question.gold),
            "question": asked_question.question,
            "source": self.source,
        }
        return TaskText(question, PREFIX, f" {asked_question.answers[0]}", asked_question.answers, meta)

    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        return question_scores(sample, answer)


def question_scores(sample: Sample, answer: str) -> dict[str, float]:
    """Return RULER's metric for an answer, and two stricter metrics: exact match and F1."""
    return {
        "string_match_part": string_match_part(answer, sample.outputs),
        "exact": exact_match(answer, sample.outputs),
        "f1": f1(answer, sample.outputs),
    }


@cache
def _data_set(name: str, source: str, file: Path) -> DocumentSet:
    if not file.exists():
        cure = f"run `hybridtron tasks download {source}`, or set data=FILE to a copy of {PUBLISHED[source].file.name}"
        substitute = f"the similar task qa_synth_{name[-1]} needs no download"
        raise TaskError(f"{name}: {file} does not exist: {cure}; {substitute}", code="no-file")
    try:
        content = json_of(read_regular(file, MAX_DATA_BYTES))
        data_set = {"squad": _squad, "hotpotqa": _hotpotqa}[source](content)
    except (Unreadable, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise TaskError(
            f"{name}: {file} can't be read as {PUBLISHED[source].file.name}: {error!r}", code="unreadable"
        ) from error
    if not data_set.questions:
        raise TaskError(f"{name}: {file} has no question that can be answered", code="missing")
    return data_set


def _squad(content: dict) -> DocumentSet:
    """Return the data set from SQuAD's JSON: each paragraph is a document; unanswerable questions are left out."""
    data_set = DocumentSet()
    for article in content["data"]:
        first = len(data_set.documents)
        article_numbers = range(first, first + len(article["paragraphs"]))
        for number, paragraph in enumerate(article["paragraphs"], first):
            data_set.documents.append(paragraph["context"])
            near = tuple(other for other in article_numbers if other != number)
            for entry in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in entry["answers"]))
                if answers and not entry.get("is_impossible"):
                    data_set.questions.append(AskedQuestion(entry["question"], answers, (number,), near))
    return data_set


def _hotpotqa(content: list) -> DocumentSet:
    """Return the data set from HotpotQA's JSON: each distinct paragraph with its title is a document.

    All paragraphs that the data set lists for a question (usually ten) are gold.
    """
    data_set = DocumentSet()
    numbers: dict[str, int] = {}
    for entry in content:
        texts = [f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]]
        for text in texts:
            if text not in numbers:
                numbers[text] = len(data_set.documents)
                data_set.documents.append(text)
        gold = tuple(dict.fromkeys(numbers[text] for text in texts))
        data_set.questions.append(AskedQuestion(entry["question"], (entry["answer"],), gold))
    return data_set
