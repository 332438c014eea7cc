"""Where metrics go: the terminal, TensorBoard and wandb, each as a stand-in that keeps what it is told."""

from __future__ import annotations

import io as text_io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from hybridtron.config.load import load
from hybridtron.device import Package
from hybridtron.train import metrics as reporting
from hybridtron.train.metrics import ConsoleReport, Metrics, StepMetrics

STEP = StepMetrics(
    step=10, phase="a", tokens=640, loss=2.5, grad_norm=1.0, lr=1e-3, step_time=0.5, data_wait=0.01,
    tokens_per_second=128.0, tflops_per_device=0.1, mfu=None, skipped=0, validation={"1x": 2.75},
)  # fmt: skip


class Recorder:
    """Stands in for a TensorBoard writer and for wandb: remembers the numbers."""

    def __init__(self, *_: object) -> None:
        self.numbers: dict[str, float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert step == 10
        self.numbers[name] = value

    def init(self, **options: str) -> Recorder:
        self.options = options
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        assert step == 10
        self.numbers = numbers

    def close(self) -> None: ...

    def finish(self) -> None: ...


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A recorder behind every optional package."""
    recorder = Recorder()
    module = SimpleNamespace(SummaryWriter=lambda folder: recorder, init=recorder.init)
    monkeypatch.setattr(reporting, "optional_package", lambda name: Package(name, module, "stand-in"))
    return recorder


def test_tensorboard_and_wandb_get_every_number(recorder: Recorder, tmp_path: Path) -> None:
    config = load(["run.wandb=project", "run.name=mine"])
    metrics = Metrics(tmp_path, config, resumed_step=0, last_step=20)
    metrics.write(STEP)
    metrics.close()
    assert recorder.options["project"] == "project"
    assert recorder.options["name"] == "mine"
    assert recorder.numbers["loss"] == 2.5
    assert recorder.numbers["validation/1x"] == 2.75
    assert "mfu" not in recorder.numbers
    assert "phase" not in recorder.numbers


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = text_io.StringIO()
    monkeypatch.setattr(reporting, "Console", lambda: Console(file=screen, force_terminal=True, width=160))
    report = ConsoleReport(log_every=10, first_step=0, last_step=20)
    report.write(STEP)
    report.close()
    assert "step 10/20" in screen.getvalue()
    assert "1x 2.7500" in screen.getvalue()


def test_elsewhere_there_is_a_plain_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    report = ConsoleReport(log_every=5, first_step=0, last_step=20)
    for step in (9, 10):
        report.write(StepMetrics(**{**STEP.__dict__, "step": step, "validation": None}))
    report.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 10/20  loss 2.5000  lr 1.00e-03  grad norm 1.000  128 tokens/s"
    ]


def test_a_kill_while_the_file_is_cut_back_leaves_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = "".join(f'{{"step": {step}}}\n' for step in range(1, 9))
    (tmp_path / "metrics.jsonl").write_text(before)

    def killed(path: Path, _: str) -> None:
        path.open("w").close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        Metrics(tmp_path, load(["run.name=mine"]), resumed_step=5, last_step=20)
    assert (tmp_path / "metrics.jsonl").read_text() == before
