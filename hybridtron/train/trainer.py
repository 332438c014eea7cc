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
from hybridtron.config.architecture import parameter_table
from hybridtron.config.count import count
from hybridtron.config.layout import launched
from hybridtron.config.problems import ConfigError
from hybridtron.config.schema import Config
from hybridtron.config.units import parse_steps, readable
from hybridtron.data.batch import Batch
from hybridtron.data.loader import Loader, build_loader
from hybridtron.data.sources import reading_plan
from hybridtron.device import describe_device, megatron_context, synchronize
from hybridtron.engine.engine import Engine
from hybridtron.ops.dispatch import choices
from hybridtron.parallel.groups import Groups, barrier
from hybridtron.parallel.groups import start as start_groups
from hybridtron.parallel.groups import stop as stop_groups
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
        if launched().rank == 0:
            print(
                f"{config.run.dir} has finished: {start} is at step {done} of {last_step(config)}, "
                "nothing left to do.\n"
                f"To train further raise phases or run.max_steps; to start anew set run.dir=FOLDER, "
                f"or run.name=NAME for {Path(config.run.dir).parent}/NAME."
            )
        return
    if start is not None:
        check_same_model(start, config)
    with megatron_context():
        groups = start_groups(config.parallel)
        run_dir = Path(config.run.dir)
        if groups.is_first:
            open_run_folder(config)
        barrier()
        try:
            with outcome(run_dir, groups.is_first):
                Trainer(config, run_dir, start, groups).fit()
        finally:
            stop_groups()


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
    """One run, on one process or as one rank of many. Only the first rank speaks and writes metrics."""

    def __init__(self, config: Config, run_dir: Path, start: Path | None, groups: Groups) -> None:
        self.config, self.run_dir, self.start, self.groups = config, run_dir, start, groups
        torch.manual_seed(config.run.seed)
        weights = None if start is None else io.stored(start, "model.safetensors", parameter_table(config.model))
        self.engine = Engine(config, groups, weights)
        self.resumed = None if start is None else io.restore_optimizer(start, self.engine)
        self.first = 0 if self.resumed is None else self.resumed.step
        self.last = last_step(config)
        self.skipped = 0

    def fit(self) -> None:
        """Walk through the phases from where the run stands to its end."""
        if self.groups.is_first:
            self.announce()
        if self.config.run.compile:
            self.engine.compile()
        self.metrics = Metrics(self.run_dir, self.config, self.first, self.last) if self.groups.is_first else None
        try:
            for stretch in stretches(self.config):
                if stretch.last > self.first and stretch.first < self.last:
                    self.train_phase(stretch)
        finally:
            if self.metrics is not None:
                self.metrics.close()
        if self.groups.is_first:
            self.conclude(io.folder_of(self.run_dir, self.last))

    def train_phase(self, stretch: Stretch) -> None:
        """Train the steps of one phase that are still to be done; a phase ends with an evaluation and a checkpoint."""
        loader = self.loader_of(stretch)
        first, last = max(self.first, stretch.first), min(self.last, stretch.last)
        self.check_same_data(loader, stretch)
        self.engine.start_phase(stretch.index, loader.lanes)
        if self.start is not None and stretch.first < self.first:
            io.restore_states(self.start, self.engine)
        if self.groups.is_first:
            announce_reading(loader, stretch)
        self.flops_per_token = count(self.config.model, stretch.phase.seq_len).flops_per_token
        eval_every = parse_steps(self.config.run.eval_every, stretch.phase.tokens_per_step)
        save_every = parse_steps(self.config.checkpoint.every, stretch.phase.tokens_per_step)
        with closing(loader.iterate(first - stretch.first, last - stretch.first)) as steps:
            for step in range(first + 1, last + 1):
                asked = time.perf_counter()
                batches = next(steps)
                with profiled(step, self.config.run.profile, self.run_dir / "logs", self.groups.rank):
                    metrics = self.train_step(step, stretch, batches, asked)
                if step % eval_every == 0 or step == last:
                    losses = evaluate(self.engine, loader.sources, self.config, stretch.phase)
                    metrics = replace(metrics, validation=losses)
                if self.metrics is not None:
                    self.metrics.write(metrics)
                if step % save_every == 0 or step == last:
                    tokenizer = loader.sources.tokenizer_file
                    io.save(self.run_dir, step, self.config, self.engine, loader.fingerprint, tokenizer)

    def train_step(self, step: int, stretch: Stretch, batches: list[Batch], asked: float) -> StepMetrics:
        """One optimizer step; `asked` is when its data was asked for."""
        arrived = time.perf_counter()
        phase, optim = stretch.phase, self.config.optim
        lr = learning_rate(stretch.phase_tokens_at(step), phase, optim)
        loss = self.engine.forward_backward(batches, step - stretch.first - 1)
        layers = self.engine.optimizer.norms() if self.config.run.layer_norms else None
        grad_norm, accepted = self.engine.step(lr)
        synchronize()
        self.skipped += not accepted
        step_time = time.perf_counter() - asked
        speed = phase.tokens_per_step / step_time
        tflops = speed * self.flops_per_token / 1e12 / self.groups.world_size
        peak = self.config.cluster.peak_tflops
        return StepMetrics(
            step=step,
            phase=phase.name,
            tokens=stretch.tokens_at(step),
            loss=loss.mean.item(),
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

    def loader_of(self, stretch: Stretch) -> Loader:
        """This rank's loader; a corpus that must be prepared first is prepared once."""
        mine = (self.config, stretch.index, self.groups.data_rank, self.groups.data_size)
        loader = build_loader(*mine) if self.groups.is_first else None
        barrier()
        return loader or build_loader(*mine)

    def check_same_data(self, loader: Loader, stretch: Stretch) -> None:
        """A phase resumed in its middle must find the data in the order that it left."""
        if self.resumed is None or not stretch.first < self.first < stretch.last:
            return
        held, found = self.resumed.data, loader.fingerprint
        cure = f"at step {self.first} of {stretch.phase.name}; set it back, or start anew with run.resume=never"
        differences = [
            Problem(key, f"is {found[key]}, was {held[key]} {cure}") for key in found if held[key] != found[key]
        ]
        if differences:
            raise ConfigError(differences)

    def announce(self) -> None:
        """What runs, on what, with which kernels and why."""
        parameters = sum(parameter.size for parameter in self.engine.optimizer.table.values())
        print(
            f"{self.config.run.name}: {readable(parameters)} parameters, {self.config.precision.name}, "
            f"{describe_device()}, steps {self.first + 1} to {self.last}, folder {self.run_dir}"
        )
        if self.groups.world_size > 1:
            parallel = self.config.parallel
            print(
                f"{self.groups.world_size} processes: tensor {parallel.tensor}{' with sequence' * parallel.sequence}, "
                f"pipeline {parallel.pipeline} x {parallel.virtual_pipeline}, data {self.groups.data_size}"
            )
        table = Table("op", "form", "why", box=None, title="kernels", title_justify="left")
        for row in choices(self.engine.device.type):
            table.add_row(*row)
        Console().print(table)

    def conclude(self, checkpoint: Path) -> None:
        """Where the checkpoint is, and a sample of text where one process holds the whole model."""
        print(f"finished at step {self.last}; checkpoint: {checkpoint}")
        run = self.config.run
        if run.sample_tokens and self.groups.world_size == 1:
            print(sample_text(self.engine.stages[0].model, checkpoint, run.sample_prompt, run.sample_tokens))


def announce_reading(loader: Loader, stretch: Stretch) -> None:
    """What a phase reads: tokens and epochs of each source, and how long an unbroken stretch of text is."""
    phase = stretch.phase
    table = Table("source", "share", "tokens", "epochs", box=None, title_justify="left")
    reading = loader.reading
    kind = f"{reading.order.value} of {phase.seq_len} tokens, documents {reading.documents.value}"
    table.title = f"{phase.name} reads {kind}"
    for line in reading_plan(loader.sources, (stretch.last - stretch.first) * phase.tokens_per_step):
        table.add_row(line.source, f"{line.share:.1%}", readable(line.tokens), f"{line.epochs:.3g}")
    Console().print(table)
    print(f"text runs on for {readable(loader.mean_stretch)} tokens on average; every row is full")
