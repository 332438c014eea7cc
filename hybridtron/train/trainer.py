"""The training loop: phases, steps, evaluations, checkpoints. It knows no mixer and no layout."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from hybridtron.checkpoint import io
from hybridtron.config.count import count
from hybridtron.config.problems import ConfigError
from hybridtron.config.schema import Config
from hybridtron.config.units import parse_steps, readable
from hybridtron.data.batch import Batch
from hybridtron.data.loader import Loader, build_loader
from hybridtron.device import DTYPES, compute_device, describe_device, synchronize
from hybridtron.engine.optim import Optimizer
from hybridtron.engine.schedule import forward_backward
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.dispatch import choices
from hybridtron.specs.base import Problem
from hybridtron.train.evaluate import evaluate
from hybridtron.train.lr import learning_rate
from hybridtron.train.metrics import Metrics, StepMetrics
from hybridtron.train.phases import Stretch, last_step, stretches
from hybridtron.train.profile import profiled
from hybridtron.train.run_folder import open_run_folder, outcome
from hybridtron.train.sample import sample_text


def run(config: Config) -> None:
    """Train what the configuration asks for, from the newest checkpoint of its run folder if there is one."""
    start = starting_point(config)
    if start is not None and (done := io.read_meta(start).step) >= last_step(config):
        print(
            f"{config.run.dir} has finished: {start} is at step {done} of {last_step(config)}, nothing left to do.\n"
            f"To train further raise phases or run.max_steps; to start anew set run.dir=FOLDER, "
            f"or run.name=NAME for {Path(config.run.dir).parent}/NAME."
        )
        return
    if start is not None:
        check_same_model(start, config)
    run_dir = open_run_folder(config)
    with outcome(run_dir):
        Trainer(config, run_dir, start).fit()


def starting_point(config: Config) -> Path | None:
    """The checkpoint that run.resume names."""
    if config.run.resume == "never":
        return None
    if config.run.resume == "auto":
        return io.newest(Path(config.run.dir))
    return Path(config.run.resume)


def check_same_model(start: Path, config: Config) -> None:
    """A checkpoint can only be continued by the model that it holds."""
    held, wanted = asdict(io.read_config(start).model), asdict(config.model)
    differences = [
        Problem(f"model.{key}", f"is {wanted[key]!r}, but {start} holds {held[key]!r}: set it so, or run.resume=never")
        for key in wanted
        if held[key] != wanted[key]
    ]
    if differences:
        raise ConfigError(differences)


class Trainer:
    """One run on one process."""

    def __init__(self, config: Config, run_dir: Path, start: Path | None) -> None:
        self.config, self.run_dir = config, run_dir
        self.device = compute_device()
        torch.manual_seed(config.run.seed)
        self.model = LanguageModel(config.model).to(self.device)
        if start is None:
            initialise(self.model, config.run.seed)
        self.model.cast(DTYPES[config.precision.name])
        self.optimizer = Optimizer(self.model, config.optim)
        self.resumed = None if start is None else io.restore(start, self.model, self.optimizer)
        self.first = 0 if self.resumed is None else self.resumed.step
        self.last = last_step(config)
        self.skipped = 0

    def fit(self) -> None:
        """Walk through the phases from where the run stands to its end."""
        self.announce()
        if self.config.run.compile:
            self.model.compile()
        self.metrics = Metrics(self.run_dir, self.config, self.first, self.last)
        try:
            for stretch in stretches(self.config):
                if stretch.last > self.first and stretch.first < self.last:
                    self.train_phase(stretch)
        finally:
            self.metrics.close()
        checkpoint = io.folder_of(self.run_dir, self.last)
        print(f"finished at step {self.last}; checkpoint: {checkpoint}")
        if self.config.run.sample_tokens:
            print(sample_text(self.model, checkpoint, self.config.run.sample_prompt, self.config.run.sample_tokens))

    def train_phase(self, stretch: Stretch) -> None:
        """Train the steps of one phase that are still to be done; a phase ends with an evaluation and a checkpoint."""
        loader = build_loader(self.config, stretch.index)
        first, last = max(self.first, stretch.first), min(self.last, stretch.last)
        self.check_same_data(loader, stretch)
        self.flops_per_token = count(self.config.model, stretch.phase.seq_len).flops_per_token
        eval_every = parse_steps(self.config.run.eval_every, stretch.phase.tokens_per_step)
        save_every = parse_steps(self.config.checkpoint.every, stretch.phase.tokens_per_step)
        with closing(loader.iterate(first - stretch.first, last - stretch.first)) as steps:
            for step in range(first + 1, last + 1):
                asked = time.perf_counter()
                batches = next(steps)
                with profiled(step, self.config.run.profile, self.run_dir / "logs"):
                    metrics = self.train_step(step, stretch, batches, asked)
                if step % eval_every == 0 or step == last:
                    losses = evaluate(self.model, loader.folder, self.config, stretch.phase, self.device)
                    metrics = replace(metrics, validation=losses)
                self.metrics.write(metrics)
                if step % save_every == 0 or step == last:
                    self.save(step, loader)

    def train_step(self, step: int, stretch: Stretch, batches: list[Batch], asked: float) -> StepMetrics:
        """One optimizer step; `asked` is when its data was asked for."""
        arrived = time.perf_counter()
        phase, optim = stretch.phase, self.config.optim
        lr = learning_rate(stretch.phase_tokens_at(step), phase, optim)
        loss = forward_backward(self.model, batches, optim.z_loss, self.device)
        layers = self.optimizer.norms() if self.config.run.layer_norms else None
        grad_norm, accepted = self.optimizer.step(lr)
        synchronize()
        self.skipped += not accepted
        step_time = time.perf_counter() - asked
        speed = phase.tokens_per_step / step_time
        tflops = speed * self.flops_per_token / 1e12
        peak = self.config.cluster.peak_tflops
        return StepMetrics(
            step=step,
            phase=phase.name,
            tokens=stretch.tokens_at(step),
            loss=loss.item(),
            grad_norm=grad_norm,
            lr=lr,
            step_time=step_time,
            data_wait=arrived - asked,
            tokens_per_second=speed,
            tflops_per_device=tflops,
            mfu=None if peak is None else tflops / peak,
            skipped=self.skipped,
            layers=layers,
        )

    def save(self, step: int, loader: Loader) -> None:
        """Write the checkpoint of a step."""
        tokenizer = loader.folder.tokenizer_file
        io.save(self.run_dir, step, self.config, self.model, self.optimizer, loader.fingerprint, tokenizer)

    def check_same_data(self, loader: Loader, stretch: Stretch) -> None:
        """A phase resumed in its middle must find the data in the order that it left."""
        if self.resumed is None or not stretch.first < self.first < stretch.last:
            return
        if self.resumed.data_fingerprint != loader.fingerprint:
            raise ValueError(
                f"the data of phase {stretch.phase.name} is not what step {self.first} was trained on: its tokens, "
                "seed, seq_len, global_batch or documents changed. Set them back, or start anew with run.resume=never."
            )

    def announce(self) -> None:
        """What runs, on what, with which kernels and why."""
        parameters = sum(weight.numel() for weight in self.model.parameters())
        print(
            f"{self.config.run.name}: {readable(parameters)} parameters, {self.config.precision.name}, "
            f"{describe_device()}, steps {self.first + 1} to {self.last}, folder {self.run_dir}"
        )
        table = Table("op", "form", "why", box=None, title="kernels", title_justify="left")
        for row in choices(self.device.type):
            table.add_row(*row)
        Console().print(table)
