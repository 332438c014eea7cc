"""Tasks for lm-evaluation-harness ("the harness"): task groups with settings from papers, and additional tasks.

Groups (the option `--harness NAME`):

    samba_short     the tasks in the Samba paper's Tables 1 and 2. MMLU and GSM8K are 5-shot. Answers are greedy, with
                    three exceptions, which are sampled with top-p 0.95: HumanEval at temperature 0.2, MBPP and SQuAD at
                    temperature 0.01
    samba_instruct  the tasks in Samba's Table 4, as chats: MMLU 5-shot, GSM8K 8-shot with chain of thought, HumanEval,
                    GovReport, SQuALITY
    span_short      the short tasks in the Expansion Span paper
    span_long       the long tasks in Expansion Span
    recall          the tasks in Expansion Span's Table 9
    hax_short       the tasks in the HAX paper's Table 2
    longbench       the harness's version of LongBench
    tiny            four tasks, one for each output type, without a download; a quick test of the setup

Additional tasks (`OWN_TASKS`):

    govreport, squality                   summaries, scored by ROUGE-L; no paper gives the prompts
    qasper_scrolls, narrativeqa_scrolls   questions from SCROLLS, scored by F1; the harness's versions need a module
                                          that transformers no longer has
    tiny_...                              the tasks in the group `tiny`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybridtron.tasks.metrics import f1

if TYPE_CHECKING:
    from datasets import Dataset

Document = Mapping[str, Any]
SCROLLS = "zip://{name}/validation.jsonl::https://huggingface.co/datasets/tau/scrolls/resolve/main/{name}.zip"


@dataclass(frozen=True)
class HarnessTask:
    """A task from the harness or from `OWN_TASKS`.

    shots: how many examples a prompt has; None for the number in the task's settings
    generation: settings for generation, merged into the task's settings
    chat: format the prompt as a chat, in which each example is a user's message with an answer
    """

    name: str
    shots: int | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False


def _drawn(name: str, temperature: float, chat: bool = False) -> HarnessTask:
    """Build a task whose answers are sampled with top-p 0.95."""
    return HarnessTask(name, None, {"do_sample": True, "temperature": temperature, "top_p": 0.95}, chat)


def _plain(names: str) -> tuple[HarnessTask, ...]:
    """Build tasks from names separated by spaces, without changing their settings."""
    return tuple(map(HarnessTask, names.split()))


HARNESS_GROUPS: dict[str, tuple[HarnessTask, ...]] = {
    "samba_short": (
        *_plain("arc_easy arc_challenge piqa winogrande social_iqa hellaswag boolq openbookqa"),
        _drawn("squad_completion", 0.01),
        HarnessTask("mmlu", shots=5),
        *_plain("truthfulqa_mc1 truthfulqa_mc2"),
        HarnessTask("gsm8k", shots=5),
        _drawn("mbpp", 0.01),
        _drawn("humaneval", 0.2),
    ),
    "samba_instruct": (
        HarnessTask("mmlu", shots=5, chat=True),
        HarnessTask("gsm8k_cot", shots=8, chat=True),
        _drawn("humaneval_instruct", 0.2, chat=True),
        HarnessTask("govreport", chat=True),
        HarnessTask("squality", chat=True),
    ),
    "span_short": _plain("arc_easy arc_challenge hellaswag lambada_openai piqa winogrande"),
    "span_long": _plain("swde qasper_scrolls narrativeqa_scrolls"),
    "recall": _plain("swde squadv2 fda triviaqa nq_open drop"),
    "hax_short": _plain("lambada_openai winogrande piqa hellaswag arc_easy arc_challenge"),
    "longbench": _plain("longbench"),
    "tiny": _plain("tiny_choice tiny_word tiny_text tiny_answer"),
}


def rouge_l(document: Document, results: Sequence[str]) -> dict[str, float]:
    """Score the answer `results[0]` by ROUGE-L (F-measure on stemmed words); return the best value over references."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return {
        "rouge_l": max(scorer.score(reference, results[0])["rougeL"].fmeasure for reference in document["references"])
    }


def answer_f1(document: Document, results: Sequence[str]) -> dict[str, float]:
    """Score the answer `results[0]` by F1 over words; return the best value over references."""
    return {"f1": f1(results[0], list(document["references"]))}


def with_references(reports: Iterable[Document]) -> Dataset:
    """Add each report's summary as its only reference."""
    return _dataset([{**report, "references": [report["summary"]]} for report in reports])


def questions_of_stories(stories: Iterable[Document]) -> Dataset:
    """Make a document for each question about a story. All answers to the question are references."""
    return _dataset(
        [
            {
                "document": story["document"],
                "question": question["question_text"],
                "references": [response["response_text"] for response in question["responses"]],
            }
            for story in stories
            for question in story["questions"]
        ]
    )


def questions_of_papers(lines: Iterable[Document]) -> Dataset:
    """Merge each question's lines into a document with all answers as references.

    A question's lines have the same `id` and differ only in `output`, the answer. Their `input` has the question, an
    empty line, and the text.
    """
    documents: dict[str, dict[str, Any]] = {}
    for line in lines:
        question, _, text = line["input"].partition("\n\n")
        document = documents.setdefault(line["id"], {"question": question, "document": text, "references": []})
        document["references"].append(line["output"])
    return _dataset(list(documents.values()))


def _dataset(documents: list[dict[str, Any]]) -> Dataset:
    from datasets import Dataset

    return Dataset.from_list(documents)


def _metrics(names: str) -> list[dict[str, Any]]:
    """Define metrics from names separated by spaces. The metrics are averaged over samples, and higher is better."""
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names.split()]


def _generated(name: str, about: dict[str, Any]) -> dict[str, Any]:
    """Define a task whose answers are generated and compared with `references`; `about` has more task fields."""
    kind = {"output_type": "generate_until", "doc_to_target": "{{references[0]}}", "num_fewshot": 0}
    return {"task": name, **kind, "metadata": {"version": 1}, **about}


def _of_scrolls(name: str) -> dict[str, Any]:
    """Return the fields of a question-answering task from SCROLLS."""
    return {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": SCROLLS.format(name=name)}},
        "validation_split": "validation",
        "process_docs": questions_of_papers,
        "doc_to_text": "{{document}}\n\nQuestion: {{question}}\nAnswer:",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 128, "do_sample": False},
        "process_results": answer_f1,
        "metric_list": _metrics("f1"),
    }


def _summary(tokens: int) -> dict[str, Any]:
    """Return the fields of a summarization task with answers of at most `tokens` tokens."""
    return {
        "test_split": "test",
        "generation_kwargs": {"until": [], "max_gen_toks": tokens, "do_sample": False},
        "process_results": rouge_l,
        "metric_list": _metrics("rouge_l"),
    }


ROLLING = {
    "word_perplexity": "weighted_perplexity",
    "byte_perplexity": "weighted_perplexity",
    "bits_per_byte": "bits_per_byte",
}
WEEK = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
TINY = [
    {"day": day, "next": after, "other": before, "text": f"{day} comes before {after}.", "references": [after]}
    for before, day, after in zip([WEEK[-1], *WEEK], WEEK, [*WEEK[1:], WEEK[0]], strict=False)
]


def _tiny(name: str, output_type: str, about: dict[str, Any]) -> dict[str, Any]:
    """Define a task about weekdays, for the group `tiny`."""
    kind = {"output_type": output_type, "custom_dataset": tiny_documents, "test_split": "test", "num_fewshot": 0}
    return {"task": name, **kind, "doc_to_text": "The day after {{day}} is", "metadata": {"version": 1}, **about}


def tiny_documents(version: int, config_source: str = "") -> dict[str, Dataset]:
    """Return the tiny tasks' documents. The harness calls this with a task's metadata."""
    return {"test": _dataset(TINY)}


_OWN = (
    _generated(
        "govreport",
        {
            "dataset_path": "ccdv/govreport-summarization",
            "process_docs": with_references,
            "doc_to_text": "{{report}}\n\nA summary of this report in one page:\n",
            **_summary(512),
        },
    ),
    _generated(
        "squality",
        {
            "dataset_path": "pszemraj/SQuALITY-v1.3",
            "process_docs": questions_of_stories,
            "doc_to_text": "{{document}}\n\nQuestion: {{question}}\nAn answer in several sentences:\n",
            **_summary(512),
        },
    ),
    _generated("qasper_scrolls", _of_scrolls("qasper")),
    _generated("narrativeqa_scrolls", _of_scrolls("narrative_qa")),
    _tiny(
        "tiny_choice",
        "multiple_choice",
        {"doc_to_choice": "{{[next, other]}}", "doc_to_target": 0, "metric_list": _metrics("acc acc_norm")},
    ),
    _tiny("tiny_word", "loglikelihood", {"doc_to_target": "{{next}}", "metric_list": _metrics("acc")}),
    _tiny(
        "tiny_text",
        "loglikelihood_rolling",
        {
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [
                {"metric": metric, "aggregation": aggregation, "higher_is_better": False}
                for metric, aggregation in ROLLING.items()
            ],
        },
    ),
    _tiny(
        "tiny_answer",
        "generate_until",
        {
            "doc_to_target": "{{next}}",
            "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 8, "do_sample": False},
            "process_results": answer_f1,
            "metric_list": _metrics("f1"),
        },
    ),
)
OWN_TASKS: dict[str, dict[str, Any]] = {task["task"]: task for task in _OWN}
