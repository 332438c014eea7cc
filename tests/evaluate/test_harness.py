"""lm-evaluation-harness on the model itself: the numbers that it gives for the exported folder; whatever the batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridtron.cli.main import main
from tests.cli.test_evaluate import LENGTHS, lines_of, tokenizer, trained, write_data
from tests.evaluate.test_evaluate import under_torchrun
from tests.interop.test_chat_template import BOS, TEMPLATE, with_tokens

pytest.importorskip("lm_eval", reason="pip install 'hybridtron[harness]'")
pytestmark = pytest.mark.slow  # imports lm_eval

from hybridtron.evaluate import harness, harness_tasks  # noqa: E402
from hybridtron.evaluate.harness_run import wanted_tasks  # noqa: E402
from hybridtron.problems import Unusable  # noqa: E402
from tests.refusals import raises_code  # noqa: E402

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


def test_scores_equal_those_of_the_exported_model(run: Path, rows: dict, tmp_path: Path) -> None:
    """Choices, words, texts and answers, by the harness' own class for transformers."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    assert main(["export", str(run), "--output", str(tmp_path / "exported")]) == 0
    arguments = {"pretrained": str(tmp_path / "exported"), "trust_remote_code": True, "dtype": "float32"}
    reference = simple_evaluate(
        model="hf",
        model_args={**arguments, "device": "cpu", "max_length": 24},
        tasks=[dict(harness_tasks.OWN_TASKS[name]) for name in TINY],
        task_manager=TaskManager(include_defaults=False),
        batch_size=1,
        bootstrap_iters=0,
    )
    theirs = {
        (task, key.split(",")[0]): value
        for task, metrics in reference["results"].items()
        for key, value in metrics.items()
        if "," in key and "_stderr" not in key
    }
    assert theirs.keys() == rows.keys()
    assert {key: row["value"] for key, row in rows.items()} == pytest.approx(theirs, rel=1e-4)
    written = [document["filtered_resps"][0] for document in reference["samples"]["tiny_answer"]]
    assert [line["result"] for line in lines_of_task(run, tmp_path / "again", "tiny_answer")] == written
    texts = [document["filtered_resps"][0][0] for document in reference["samples"]["tiny_word"]]
    ours = [line["result"][0] for line in lines_of_task(run, tmp_path / "words", "tiny_word")]
    assert ours == pytest.approx(texts, abs=1e-4)


def lines_of_task(run: Path, output: Path, task: str) -> list[dict]:
    arguments = ["evaluate", str(run), "--harness", task, "--max-length", "24", "--output", str(output)]
    assert main(arguments) == 0
    return sorted(lines_of(output / "harness/samples.jsonl")[1:], key=lambda line: line["index"])


def test_a_killed_evaluation_continues_with_another_batch(run: Path, rows: dict, tmp_path: Path) -> None:
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
@pytest.mark.parametrize("layout", ["", "parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2"])
def test_two_processes_score_as_one(layout: str, run: Path, rows: dict, tmp_path: Path) -> None:
    options = ["--harness", "tiny", "--max-length", "24", "--output", tmp_path, "--batch", "4"]
    under_torchrun(["evaluate", run, *options, *layout.split()])
    measured = json.loads((tmp_path / "harness/results.json").read_text())["rows"]
    assert [row["value"] for row in measured] == pytest.approx([row["value"] for row in rows.values()], rel=1e-4)


def test_tasks_that_cannot_run_are_left_out_with_a_reason(run: Path, tmp_path: Path, capsys) -> None:
    tasks = {"absent": {"dataset_path": "nobody/absent"}, "code": {"dataset_path": "nobody/code", "unsafe_code": True}}
    (tmp_path / "tasks").mkdir()
    for name, about in tasks.items():
        config = {"task": name, "test_split": "test", "output_type": "generate_until", "doc_to_text": "x", **about}
        (tmp_path / f"tasks/{name}.yaml").write_text(json.dumps({**config, "doc_to_target": "y"}))
    command = ["evaluate", str(run), "--include", str(tmp_path / "tasks"), "--output", str(tmp_path), "--harness"]
    assert main([*command, "absent", "code"]) == 2
    message = capsys.readouterr().err
    assert all(name in message for name in ("nobody/absent", "--run-code", "--harness tiny"))
    assert main([*command, "absent", "tiny_choice", "code", "--max-length", "4", "--samples", "3"]) == 0
    record = json.loads((tmp_path / "harness/results.json").read_text())
    assert [row["task"] for row in record["rows"]] == ["tiny_choice"] * 2
    assert [row["n"] for row in record["rows"]] == [3, 3]
    absent, code, cut = record["left_out"]
    assert ("nobody/absent" in absent, "--run-code" in code, "the beginnings of 6 prompts" in cut) == (True, True, True)
    page = (tmp_path / "harness/index.html").read_text()
    assert "tiny_choice: " in page
    assert "nobody/absent" in page


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on conversations, whose template takes no system prompt."""
    folder = tmp_path_factory.mktemp("talker")
    with_tokens(folder / "tokenizer")
    refusing = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = TEMPLATE.replace("{{ bos_token }}", refusing + "{{ bos_token }}", 1)
    (folder / "tokenizer/chat_template.jinja").write_text(template)
    answer = {"role": "assistant", "content": "mat."}
    chats = [{"messages": [{"role": "user", "content": f"{number}?"}, answer]} for number in range(60)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    command = ["--input", str(folder / "chats.jsonl"), "--learn", "messages", "--validation", "30%"]
    command += ["--tokenizer", str(folder / "tokenizer"), "--output", str(folder / "data")]
    assert main(["data", "prepare", *command]) == 0
    return trained(folder / "run", folder / "data", "M-W-", "model.vocab_size=320")


def shot_tasks(folder: Path) -> list[str]:
    """Tasks with examples: choices below a system prompt, and answers of which the beginning is given."""
    folder.mkdir()
    days = [{"day": day["day"], "next": day["next"], "other": day["other"]} for day in harness_tasks.TINY]
    (folder / "days.jsonl").write_text("".join(json.dumps(day) + "\n" for day in days))
    about = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "days.jsonl")}},
        "test_split": "test", "num_fewshot": 2, "doc_to_text": "The day after {{day}} is",
    }  # fmt: skip
    kinds = {
        "chosen_day": {"output_type": "multiple_choice", "doc_to_choice": "{{[next, other]}}", "doc_to_target": 0,
                       "description": "Days of a week."},
        "written_day": {"output_type": "generate_until", "doc_to_target": "{{next}}", "gen_prefix": "It is",
                        "generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False}},
    }  # fmt: skip
    for name, kind in kinds.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **about, **kind}))
    return list(kinds)


def test_chats_equal_those_of_the_exported_model(talker: Path, tmp_path: Path) -> None:
    """Compare prompts and results: template, examples as turns, an answer's beginning, and no system prompt."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    names = shot_tasks(tmp_path / "tasks")
    command = ["evaluate", str(talker), "--include", str(tmp_path / "tasks"), "--max-length", "400", "--chat"]
    assert main([*command, "--output", str(tmp_path / "out"), "--harness", *names, "tiny_text"]) == 0
    assert main(["export", str(talker), "--output", str(tmp_path / "exported")]) == 0
    model = {"pretrained": str(tmp_path / "exported"), "trust_remote_code": True, "dtype": "float32"}
    reference = simple_evaluate(
        model="hf",
        model_args={**model, "device": "cpu", "max_length": 400},
        tasks=[*names, dict(harness_tasks.OWN_TASKS["tiny_text"])],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        batch_size=1,
        bootstrap_iters=0,
        apply_chat_template=True,
        fewshot_as_multiturn=True,
    )
    record = json.loads((tmp_path / "out/harness/results.json").read_text())
    rows = {(row["task"], row["metric"]): row for row in record["rows"]}
    for (task, metric), row in rows.items():
        assert row["value"] == pytest.approx(reference["results"][task][f"{metric},none"], rel=1e-4)
        assert row["length"] == ("0-shot chat" if task == "tiny_text" else "2-shot chat")
    assert record["left_out"] == ["chosen_day: the system prompts of its chats, since the chat template accepts none"]
    lines = lines_of(tmp_path / "out/harness/samples.jsonl")[1:]
    chosen, written = (sorted(part, key=lambda line: line["index"]) for part in (lines[:14], lines[14:21]))
    scored = [response[0] for document in reference["samples"]["chosen_day"] for response in document["filtered_resps"]]
    assert [line["result"][0] for line in chosen] == pytest.approx(scored, rel=1e-4)
    assert [line["result"] for line in written] == [
        document["filtered_resps"][0] for document in reference["samples"]["written_day"]
    ]
    prompt = reference["samples"]["written_day"][0]["arguments"][0][0]
    assert prompt.count(f"{BOS}user") == prompt.count(f"{BOS}assistant") == 3
    assert prompt.endswith("assistant\nIt is")


def test_models_without_a_chat_template_skip_chats(run: Path, tmp_path: Path, capsys) -> None:
    for harness_options in (["samba_instruct"], ["tiny_word", "--chat"]):
        assert main(["evaluate", str(run), "--output", str(tmp_path), "--harness", *harness_options]) == 2
        assert "--learn messages" in capsys.readouterr().err
    asked = {(task.name, task.chat) for task in wanted_tasks(["samba_short", "samba_instruct"])}
    assert {("mmlu", False), ("mmlu", True), ("humaneval", False), ("humaneval_instruct", True)} < asked


def test_groups_name_tasks_of_the_harness() -> None:
    """Building its list takes seconds, so once; one that no list has is named."""
    names = [*harness_tasks.HARNESS_GROUPS, "no_such_task"]
    with raises_code(Unusable, "unknown-name"):
        harness.known_tasks(wanted_tasks(names), None)
    with raises_code(Unusable, "no-file"):
        harness.known_tasks(wanted_tasks(["tiny"]), Path("no_such_folder"))


@pytest.mark.parametrize("wrong", [["--max-length", "8"], ["--harness", "tiny", "--suite", "samba"]])
def test_conflicting_options_are_refused(wrong: list[str], run: Path, capsys) -> None:
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


def test_documents_are_built_from_published_fields() -> None:
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
    lines = [
        {"id": name, "input": f"{name}?\n\nText\n\nmore.", "output": answer} for name, answer in ("ax", "ay", "bz")
    ]
    assert harness_tasks.questions_of_papers(Dataset.from_list(lines)).to_list() == [
        {"question": "a?", "document": "Text\n\nmore.", "references": ["x", "y"]},
        {"question": "b?", "document": "Text\n\nmore.", "references": ["z"]},
    ]
    report = harness_tasks.with_references(Dataset.from_list([{"report": "R", "summary": "S"}]))
    assert report[0]["references"] == ["S"]
