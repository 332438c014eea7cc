"""lm-evaluation-harness on the model itself: the numbers that it gives for the exported folder; whatever the batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridtron.cli.main import main
from tests.cli.test_evaluate import LENGTHS, lines_of, tokenizer, trained, write_data
from tests.evaluate.test_evaluate import under_torchrun

pytest.importorskip("lm_eval", reason="pip install 'hybridtron[harness]'")
pytestmark = pytest.mark.slow  # imports lm_eval

from hybridtron.evaluate import harness, harness_tasks  # noqa: E402
from hybridtron.evaluate.harness_run import wanted_tasks  # noqa: E402
from hybridtron.problems import Unusable  # noqa: E402

TINY = ["tiny_choice", "tiny_word", "tiny_text", "tiny_answer"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    return trained(folder / "run", write_data(folder / "toy", LENGTHS, tokenizer().to_str()), "M-W-S-")


def evaluated(run: Path, output: Path, *more: str) -> dict[tuple[str, str], dict]:
    arguments = ["evaluate", str(run), "--harness", "tiny", "--max-length", "24", "--output", str(output), *more]
    assert main(arguments) == 0
    rows = json.loads((output / "harness/results.json").read_text())["rows"]
    return {(row["task"], row["metric"]): row for row in rows}


@pytest.fixture(scope="module")
def rows(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict]:
    return evaluated(run, tmp_path_factory.mktemp("out"))


def test_scores_are_those_of_the_exported_model(run: Path, rows: dict, tmp_path: Path) -> None:
    """Choices, words, texts and answers, by the harness' own class for transformers."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    assert main(["export", str(run), "--output", str(tmp_path / "exported")]) == 0
    arguments = {"pretrained": str(tmp_path / "exported"), "trust_remote_code": True, "dtype": "float32"}
    found = simple_evaluate(
        model="hf",
        model_args={**arguments, "device": "cpu", "max_length": 24},
        tasks=[dict(harness_tasks.OWN_TASKS[name]) for name in TINY],
        task_manager=TaskManager(include_defaults=False),
        batch_size=1,
        bootstrap_iters=0,
    )
    theirs = {
        (task, key.split(",")[0]): value
        for task, metrics in found["results"].items()
        for key, value in metrics.items()
        if "," in key and "_stderr" not in key
    }
    assert theirs.keys() == rows.keys()
    assert {key: row["value"] for key, row in rows.items()} == pytest.approx(theirs, rel=1e-4)
    written = [one["filtered_resps"][0] for one in found["samples"]["tiny_answer"]]
    assert [line["result"] for line in lines_of_task(run, tmp_path / "again", "tiny_answer")] == written
    texts = [one["filtered_resps"][0][0] for one in found["samples"]["tiny_word"]]
    ours = [line["result"][0] for line in lines_of_task(run, tmp_path / "words", "tiny_word")]
    assert ours == pytest.approx(texts, abs=1e-4)


def lines_of_task(run: Path, output: Path, task: str) -> list[dict]:
    arguments = ["evaluate", str(run), "--harness", task, "--max-length", "24", "--output", str(output)]
    assert main(arguments) == 0
    return sorted(lines_of(output / "harness/samples.jsonl")[1:], key=lambda line: line["index"])


def test_a_batch_changes_nothing_and_what_was_killed_continues(run: Path, rows: dict, tmp_path: Path) -> None:
    values = {key: pytest.approx(row["value"], rel=1e-5) for key, row in rows.items()}
    assert {key: row["value"] for key, row in evaluated(run, tmp_path, "--batch", "1").items()} == values
    file = tmp_path / "harness/samples.jsonl"
    kept = file.read_text().splitlines(keepends=True)
    file.write_text("".join(kept[:9]) + kept[9][:20])
    first = {line["key"]: line for line in map(json.loads, kept[1:])}
    assert {key: row["value"] for key, row in evaluated(run, tmp_path).items()} == values
    again = {line["key"]: line for line in lines_of(file)[1:]}
    assert again.keys() == first.keys()
    assert len(again) == 7 * (2 + 1 + 2 + 1)  # two choices, a word, two windows of a text, an answer: for each day


@pytest.mark.gloo
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", ["", "parallel.tensor=2", "parallel.pipeline=2"])
def test_two_processes_find_what_one_does(layout: str, run: Path, rows: dict, tmp_path: Path) -> None:
    arguments = ["evaluate", run, "--harness", "tiny", "--max-length", "24", "--output", tmp_path, *layout.split()]
    under_torchrun(*arguments, "--batch", "4")
    found = json.loads((tmp_path / "harness/results.json").read_text())["rows"]
    assert [row["value"] for row in found] == pytest.approx([row["value"] for row in rows.values()], rel=1e-4)


def test_what_can_t_be_asked_is_left_out_with_its_reason(run: Path, tmp_path: Path, capsys) -> None:
    tasks = {"absent": {"dataset_path": "nobody/absent"}, "code": {"dataset_path": "nobody/code", "unsafe_code": True}}
    (tmp_path / "tasks").mkdir()
    for name, about in tasks.items():
        config = {"task": name, "test_split": "test", "output_type": "generate_until", "doc_to_text": "x", **about}
        (tmp_path / f"tasks/{name}.yaml").write_text(json.dumps({**config, "doc_to_target": "y"}))
    command = ["evaluate", str(run), "--include", str(tmp_path / "tasks"), "--output", str(tmp_path), "--harness"]
    assert main([*command, "absent", "code"]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("nobody/absent", "--run-code", "--harness tiny"))
    assert main([*command, "absent", "tiny_choice", "code", "--max-length", "4", "--samples", "3"]) == 0
    record = json.loads((tmp_path / "harness/results.json").read_text())
    assert [row["task"] for row in record["rows"]] == ["tiny_choice"] * 2
    assert [row["n"] for row in record["rows"]] == [3, 3]
    absent, code, cut = record["left_out"]
    assert ("nobody/absent" in absent, "--run-code" in code, "6 of its prompts" in cut) == (True, True, True)
    page = (tmp_path / "harness/index.html").read_text()
    assert "tiny_choice: " in page
    assert "nobody/absent" in page


def test_the_groups_name_tasks_of_the_harness() -> None:
    """Building its list takes seconds, so once; one that no list has is named."""
    names = [*harness_tasks.HARNESS_GROUPS, "no_such_task"]
    with pytest.raises(Unusable, match="no_such_task"):
        harness.known_tasks(wanted_tasks(names), None)
    with pytest.raises(Unusable, match="no_such_folder"):
        harness.known_tasks(wanted_tasks(["tiny"]), Path("no_such_folder"))


@pytest.mark.parametrize("wrong", [["--max-length", "8"], ["--harness", "tiny", "--suite", "samba"]])
def test_options_that_do_not_fit(wrong: list[str], run: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", str(run), *wrong])
    assert wrong[0] in capsys.readouterr().err


def test_an_answer_that_leaves_no_room_is_refused(run: Path, tmp_path: Path, capsys) -> None:
    command = ["evaluate", str(run), "--harness", "tiny_answer", "--max-length", "8", "--output", str(tmp_path)]
    assert main(command) == 2
    assert "--max-length is 8" in capsys.readouterr().err


def test_summaries_and_answers_are_compared_with_the_best_reference() -> None:
    """ROUGE-L of `the cat sat` with `the cat ran fast`: 2 words in order, of 3 and of 4, so 2 * 2 / 7."""
    document = {"references": ["a dog", "the cat ran fast"]}
    assert harness_tasks.rouge_l(document, ["The cat sat."]) == {"rouge_l": pytest.approx(4 / 7)}
    assert harness_tasks.answer_f1(document, ["the dog"]) == {"f1": 1.0}


def test_documents_are_made_of_what_is_published() -> None:
    from datasets import Dataset

    story = {
        "document": "Once.",
        "questions": [
            {"question_text": "Who?", "responses": [{"response_text": "A."}, {"response_text": "B."}]},
            {"question_text": "Why?", "responses": [{"response_text": "C."}]},
        ],
    }
    assert harness_tasks.questions_of_stories(Dataset.from_list([story])).to_list() == [
        {"document": "Once.", "question": "Who?", "references": ["A.", "B."]},
        {"document": "Once.", "question": "Why?", "references": ["C."]},
    ]
    lines = [{"id": one, "input": f"{one}?\n\nText\n\nmore.", "output": answer} for one, answer in ("ax", "ay", "bz")]
    assert harness_tasks.questions_of_papers(Dataset.from_list(lines)).to_list() == [
        {"question": "a?", "document": "Text\n\nmore.", "references": ["x", "y"]},
        {"question": "b?", "document": "Text\n\nmore.", "references": ["z"]},
    ]
    report = harness_tasks.with_references(Dataset.from_list([{"report": "R", "summary": "S"}]))
    assert report[0]["references"] == ["S"]
