"""Text from a small model's checkpoint, and every reason for which there is none."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from hybridtron.checkpoint.folder import folder_of
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.cli import generate
from hybridtron.cli.arguments import newest_checkpoint
from hybridtron.cli.generate import prompt_or_start
from hybridtron.cli.main import main
from hybridtron.config.load import load
from hybridtron.config.pipeline_layout import ProcessLaunch
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config
from hybridtron.data.prepare.embedded import END_OF_TEXT, train_tokenizer
from hybridtron.device import megatron_context
from hybridtron.engine.engine import Engine
from hybridtron.parallel import groups
from hybridtron.problems import Code
from tests.refusals import problem_codes, refusal, usage_error

ROOT = Path(__file__).parents[2]
SMALL = ["model.width=32", "model.vocab_size=320", "model.pattern=M-W-", "model.layers.W.window=8"]


def write_checkpoint(run_dir: Path, step: int, config: Config) -> Path:
    tokenizer = run_dir / "tokenizer.json"
    run_dir.mkdir(exist_ok=True)
    train_tokenizer(["the cat sat on the mat. " * 20], 320).save(str(tokenizer))
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, seed=step))
    with megatron_context():
        engine = Engine(resolve(config)[0], groups.start(config.parallel, launch=ProcessLaunch(0, 1)))
        Saver(RunPlan.of(config), run_dir, engine.groups).save(engine, meta_of(engine, step, {}), tokenizer)
        groups.stop()
    return folder_of(run_dir, step)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = load([*SMALL, "precision=bf16", "checkpoint.keep=3"])
    for step in (2, 10):
        write_checkpoint(folder, step, config)
    return folder


def reported(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    assert main(["generate", *arguments]) == 0
    return capsys.readouterr().out


def test_folder_of_a_run_means_its_newest_checkpoint(run_dir: Path, capsys) -> None:
    newest = folder_of(run_dir, 10)
    assert newest_checkpoint(run_dir) == newest
    text = reported(capsys, [str(run_dir), "--prompt", "the cat", "--tokens", "12"])
    assert text.startswith("the cat")
    assert text == reported(capsys, [str(newest), "--prompt", "the cat", "--tokens", "12"])


def test_seed_and_temperature_change_the_text(run_dir: Path, capsys) -> None:
    options = [str(run_dir), "--prompt", "the", "--tokens", "20"]
    texts = [reported(capsys, [*options, "--seed", seed]) for seed in "001"]
    assert texts[0] == texts[1] != texts[2]
    likeliest = [reported(capsys, [*options, "--temperature", "0", "--seed", seed]) for seed in "01"]
    assert likeliest[0] == likeliest[1]


def test_empty_prompt_starts_a_document(run_dir: Path, capsys) -> None:
    checkpoint = folder_of(run_dir, 10)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert prompt_or_start(checkpoint, tokenizer, "") == END_OF_TEXT
    assert tokenizer.encode(END_OF_TEXT).ids == [tokenizer.token_to_id(END_OF_TEXT)]
    text = reported(capsys, [str(checkpoint), "--tokens", "12", "--temperature", "0"])
    assert text.strip()
    assert END_OF_TEXT not in text


def test_prompts_of_a_batch_continue_as_they_do_alone(run_dir: Path, tmp_path: Path, capsys) -> None:
    """A row draws by its number, so the first row's text is the same alone and in a batch."""
    (tmp_path / "long.txt").write_text("the mat. " * 30)
    long = ("--prompt-file", str(tmp_path / "long.txt"))
    options = [str(run_dir), "--tokens", "15", "--top-k", "30", "--top-p", "0.9", "--past-end"]
    both = reported(capsys, [*options, "--prompt", "the cat", *long, "--chunk", "7"])
    alone = reported(capsys, [*options, "--prompt", "the cat"])
    assert both.startswith(f"--- 1 of 2\n{alone}--- 2 of 2\n{'the mat. ' * 30}")


def test_text_ends_before_a_stop_string_and_at_the_end_of_a_document(run_dir: Path, capsys, monkeypatch) -> None:
    options = [str(run_dir), "--prompt", "the", "--tokens", "30", "--temperature", "0"]
    whole = reported(capsys, [*options, "--past-end"])
    stop = whole[10:14]
    assert reported(capsys, [*options, "--past-end", "--stop", stop]) == whole[: whole.index(stop, 3)] + "\n"
    second = Tokenizer.from_file(str(folder_of(run_dir, 10) / "tokenizer.json")).encode(whole[3:]).ids[0]
    monkeypatch.setattr("hybridtron.evaluate.loaded_model.end_of", lambda checkpoint: second)
    assert reported(capsys, options) == "the\n"


def test_unusable_prompts_and_layouts_are_refused_before_computing(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridtron.model.lm.LanguageModel.forward", None)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    small = write_checkpoint(tmp_path / "small", 3, load([*SMALL, "model.vocab_size=64"]))
    for name, code in {"empty.txt": "missing", "latin.txt": "unreadable", "nowhere.txt": "unreadable"}.items():
        error = refusal(generate.main, [run_dir, "--prompt-file", tmp_path / name])
        assert error.code == code
        assert name in str(error)
    assert refusal(generate.main, [small, "--prompt", "the cat"]).code == "mismatch"
    assert refusal(generate.main, [run_dir, "parallel.data=2"]).code == "unknown-name"
    assert problem_codes(generate.main, [run_dir, "parallel.tensor=2"]) == {"parallel.tensor": "not-divisible"}


def test_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, code in {"nowhere": "no-file", "file": "unreadable", "empty": "no-file"}.items():
        assert refusal(generate.main, [tmp_path / name]).code == code


@pytest.mark.parametrize("missing", ["model-00000.safetensors", "config.yaml", "tokenizer.json"])
def test_incomplete_checkpoint_is_refused(run_dir: Path, missing: str, tmp_path: Path) -> None:
    broken = tmp_path / "step-00000010"
    broken.mkdir()
    for file in folder_of(run_dir, 10).iterdir():
        if file.name != missing:
            (broken / file.name).write_bytes(file.read_bytes())
    for prompt in ([], ["--prompt", "the"]):
        error = refusal(generate.main, [broken, *prompt])
        assert error.code == "unreadable"
        assert missing in str(error)


def test_damaged_checkpoint_is_refused(run_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "step-00000010"
    broken.mkdir()
    for file in folder_of(run_dir, 10).iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert refusal(generate.main, [broken]).code == "unreadable"


WRONG: list[tuple[str, str, Code]] = [
    ("--tokens", "-1", "malformed"),
    ("--tokens", "0", "malformed"),
    ("--chunk", "0", "malformed"),
    ("--temperature", "-1", "out-of-range"),
    ("--seed", "-5", "out-of-range"),
    ("--top-k", "-1", "out-of-range"),
    ("--top-p", "0", "out-of-range"),
    ("--top-p", "1.5", "out-of-range"),
    ("--top-p", "nan", "out-of-range"),
    ("--stop", "", "out-of-range"),
]


@pytest.mark.parametrize(("option", "value", "code"), WRONG)
def test_numbers_out_of_range_are_refused(option: str, value: str, code: Code) -> None:
    assert usage_error(generate.main, ["nowhere", option, value]) == (option, code)


def test_wrong_path_is_refused_without_importing_torch(tmp_path: Path) -> None:
    """A wrong path is answered at once: neither torch nor anything else slow is imported for it."""
    code = "import sys; sys.modules['torch'] = None; "
    code += "from hybridtron.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "generate", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 2
    assert str(tmp_path / "nowhere") in done.stderr
    assert "Traceback" not in done.stderr
