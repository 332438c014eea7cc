"""Text from a small model's checkpoint, and every reason for which there is none."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from hybridtron.checkpoint.folder import folder_of
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.cli.generate import prompt_or_start
from hybridtron.cli.given import newest_checkpoint
from hybridtron.cli.main import main
from hybridtron.config.layout import ProcessLaunch
from hybridtron.config.load import load
from hybridtron.config.schema import Config
from hybridtron.data.prepare.embedded import END_OF_TEXT, train_tokenizer
from hybridtron.device import megatron_context
from hybridtron.engine.engine import Engine
from hybridtron.parallel import groups

ROOT = Path(__file__).parents[2]
SMALL = ["model.width=32", "model.vocab_size=320", "model.pattern=M-W-", "model.layers.W.window=8"]


def write_checkpoint(run_dir: Path, step: int, config: Config) -> Path:
    tokenizer = run_dir / "tokenizer.json"
    run_dir.mkdir(exist_ok=True)
    train_tokenizer(["the cat sat on the mat. " * 20], 320).save(str(tokenizer))
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, seed=step))
    with megatron_context():
        engine = Engine(config, groups.start(config.parallel, launch=ProcessLaunch(0, 1)))
        Saver(config, run_dir, engine.groups).save(engine, meta_of(engine, step, {}), tokenizer)
        groups.stop()
    return folder_of(run_dir, step)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = load([*SMALL, "precision=bf16", "checkpoint.keep=3"])
    for step in (2, 10):
        write_checkpoint(folder, step, config)
    return folder


def reported(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["generate", *arguments]) == 0
    return capsys.readouterr().out


def test_a_run_stands_for_its_newest_checkpoint(run_dir: Path, capsys) -> None:
    newest = folder_of(run_dir, 10)
    assert newest_checkpoint(run_dir) == newest
    text = reported(capsys, str(run_dir), "--prompt", "the cat", "--tokens", "12")
    assert text.startswith("the cat")
    assert text == reported(capsys, str(newest), "--prompt", "the cat", "--tokens", "12")


def test_seed_and_temperature_count(run_dir: Path, capsys) -> None:
    options = [str(run_dir), "--prompt", "the", "--tokens", "20"]
    texts = [reported(capsys, *options, "--seed", seed) for seed in "001"]
    assert texts[0] == texts[1] != texts[2]
    likeliest = [reported(capsys, *options, "--temperature", "0", "--seed", seed) for seed in "01"]
    assert likeliest[0] == likeliest[1]


def test_without_a_prompt_a_document_starts(run_dir: Path, capsys) -> None:
    checkpoint = folder_of(run_dir, 10)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert prompt_or_start(checkpoint, tokenizer, "") == END_OF_TEXT
    assert tokenizer.encode(END_OF_TEXT).ids == [tokenizer.token_to_id(END_OF_TEXT)]
    text = reported(capsys, str(checkpoint), "--tokens", "12", "--temperature", "0")
    assert text.strip()
    assert END_OF_TEXT not in text


def test_several_prompts_are_a_batch_of_which_each_is_as_alone(run_dir: Path, tmp_path: Path, capsys) -> None:
    """A row draws by its number, so the first row's text is the same alone and in a batch."""
    (tmp_path / "long.txt").write_text("the mat. " * 30)
    long = ("--prompt-file", str(tmp_path / "long.txt"))
    options = [str(run_dir), "--tokens", "15", "--top-k", "30", "--top-p", "0.9", "--past-end"]
    both = reported(capsys, *options, "--prompt", "the cat", *long, "--chunk", "7")
    alone = reported(capsys, *options, "--prompt", "the cat")
    assert both.startswith(f"--- 1 of 2\n{alone}--- 2 of 2\n{'the mat. ' * 30}")


def test_text_ends_before_a_stop_string_and_after_a_document(run_dir: Path, capsys, monkeypatch) -> None:
    options = [str(run_dir), "--prompt", "the", "--tokens", "30", "--temperature", "0"]
    whole = reported(capsys, *options, "--past-end")
    stop = whole[10:14]
    assert reported(capsys, *options, "--past-end", "--stop", stop) == whole[: whole.index(stop, 3)] + "\n"
    second = Tokenizer.from_file(str(folder_of(run_dir, 10) / "tokenizer.json")).encode(whole[3:]).ids[0]
    monkeypatch.setattr("hybridtron.evaluate.served.end_of", lambda checkpoint: second)
    assert reported(capsys, *options) == "the\n"


def test_bad_input_is_refused_before_anything_is_computed(run_dir: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("hybridtron.model.lm.LanguageModel.forward", None)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    small = write_checkpoint(tmp_path / "small", 3, load([*SMALL, "model.vocab_size=64"]))
    refused = {
        "empty.txt": [run_dir, "--prompt-file", tmp_path / "empty.txt"],
        "latin.txt": [run_dir, "--prompt-file", tmp_path / "latin.txt"],
        "nowhere.txt": [run_dir, "--prompt-file", tmp_path / "nowhere.txt"],
        "model.vocab_size=64": [small, "--prompt", "the cat"],
        "parallel.data=2": [run_dir, "parallel.data=2"],
        "2 ranks a model": [run_dir, "parallel.tensor=2"],
    }
    for said, arguments in refused.items():
        assert main(["generate", *map(str, arguments)]) == 2
        assert said in capsys.readouterr().err


def test_a_path_without_a_checkpoint_is_refused(run_dir: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    reasons = {"nowhere": "does not exist", "file": "is not a folder", "empty": "has no checkpoint"}
    for name, said in reasons.items():
        assert main(["generate", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["model-00000.safetensors", "config.yaml", "tokenizer.json"])
def test_an_incomplete_checkpoint_is_said(run_dir: Path, missing: str, tmp_path: Path, capsys) -> None:
    broken = tmp_path / "step-00000010"
    broken.mkdir()
    for file in folder_of(run_dir, 10).iterdir():
        if file.name != missing:
            (broken / file.name).write_bytes(file.read_bytes())
    for prompt in ([], ["--prompt", "the"]):
        assert main(["generate", str(broken), *prompt]) == 2
        assert missing in capsys.readouterr().err


def test_a_damaged_checkpoint_is_said(run_dir: Path, tmp_path: Path, capsys) -> None:
    broken = tmp_path / "step-00000010"
    broken.mkdir()
    for file in folder_of(run_dir, 10).iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert main(["generate", str(broken)]) == 2
    assert "is not as it was written" in capsys.readouterr().err


WRONG = [
    *(["--tokens", "-1"], ["--tokens", "0"], ["--temperature", "-1"], ["--seed", "-5"], ["--top-k", "-1"]),
    *(["--top-p", "0"], ["--top-p", "1.5"], ["--top-p", "nan"], ["--stop", ""], ["--chunk", "0"]),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_numbers_are_said(run_dir: Path, wrong: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(run_dir), *wrong])
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_as_a_person_runs_it(tmp_path: Path) -> None:
    """A wrong path is answered at once: neither torch nor anything else slow is imported for it."""
    code = "import sys; sys.modules['torch'] = None; "
    code += "from hybridtron.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "generate", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("does not exist")
