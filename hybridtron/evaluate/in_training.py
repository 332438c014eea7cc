"""Evaluation during training (`run.evaluate`): the tasks and perplexities of a suite, on the run's processes.

A second model is evaluated. It shares the weights of the model that is trained, but uses no FP8, no sequence
parallelism and no recomputation. So the results equal the results of `hybridtron evaluate` on a checkpoint of the same
step. The second model has its own recurrent states and draws no random numbers. So training gives the same bits with
and without evaluation.

A suite's instruments (such as the loss by position) are not measured during training, since they write files instead of
metrics. `hybridtron evaluate` measures them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from hybridtron.config.resolve import RunPlan
from hybridtron.config.units import parse_steps
from hybridtron.data.tokenizer_file import read_tokenizer
from hybridtron.evaluate import perplexity
from hybridtron.evaluate.answers import ask
from hybridtron.evaluate.loaded_model import LoadedModel
from hybridtron.evaluate.results import rows_of
from hybridtron.evaluate.sample_log import Lines
from hybridtron.evaluate.suites import SUITES, Suite, fitting, named_or_file, suite_of
from hybridtron.parallel.mesh import ONE_RANK
from hybridtron.problems import ConfigError, Problem, Unusable
from hybridtron.tasks.tokens import open_tokens
from hybridtron.train.hooks import Hook, StepContext
from hybridtron.train.metrics import StepMetrics

if TYPE_CHECKING:
    from hybridtron.engine.engine import Engine

LOG = logging.getLogger(__name__)
Result = TypeVar("Result")
BATCH = 16  # samples or rows that are read together


class InTraining(Hook):
    """Hook that evaluates the suite in `run.evaluate`, at the interval `run.evaluate_every` and at each phase's end.

    The constructor raises ConfigError if the suite is faulty.
    """

    def __init__(self, plan: RunPlan) -> None:
        run = plan.config.run
        assert run.evaluate is not None
        self.name = run.evaluate
        self.samples = run.evaluate_samples
        self.plan = plan
        with_error(lambda: [self._suite(phase.settings.seq_len) for phase in plan.phases])

    def _suite(self, seq_len: int) -> Suite:
        """Build the suite for a training length, without its instruments."""
        definition = {key: value for key, value in named_or_file(self.name).items() if not key.startswith("instrument")}
        return suite_of(definition, seq_len, samples=self.samples)

    def on_phase_start(self, context: StepContext) -> None:
        """Prepare the suite for a phase: check that its samples fit, and read the held-out rows.

        The first process logs the tasks that are left out, each with the reason.
        """
        sources = context.loader.sources
        self.phase = context.phase
        self.folder = sources.tokenizer_file.parent
        self.eos = sources.eos
        left_out = with_error(self._open)
        if context.run.groups.is_first:
            for reason in left_out:
                LOG.info("run.evaluate leaves out %s", reason)

    def on_step(self, context: StepContext, metrics: StepMetrics) -> StepMetrics:
        """Evaluate if an evaluation is due, and return the step's metrics with the results."""
        every = parse_steps(self.phase.config.run.evaluate_every, self.phase.settings.tokens_per_step)
        if not context.ends_phase and context.step % every:
            return metrics
        context.run.beat(f"run.evaluate at step {context.step}")
        return replace(metrics, evaluation=self.measure(context.engine, context.step, context.run.beat))

    def _open(self) -> list[str]:
        seq_len = self.phase.settings.seq_len
        vocab_size = self.phase.model.vocab_size
        self.tokens = open_tokens(str(self.folder))
        self.suite = fitting(self._suite(seq_len), self.tokens, vocab_size, lenient=self.name in SUITES)
        read_rows = partial(perplexity.rows_of, self.folder, self.phase.data, seq_len=seq_len, path=None)
        self.texts = [(wanted, *read_rows(wanted)) for wanted in self.suite.perplexities]
        return self.suite.left_out

    def measure(self, engine: Engine, step: int, beat: Callable[[str], None]) -> dict[str, float]:
        """Measure the suite, and return `TASK/LENGTH/METRIC` -> value. All processes call this together.

        `beat` is called with progress messages, so that the watchdog does not end the run.
        """
        groups = engine.groups
        readers = groups.data
        if groups.tensor.expert_ranks.expert.size > 1:
            readers = ONE_RANK  # ranks that divide the experts read the same tokens
        config = replace(engine.config, data=self.phase.data)
        tokenizer = read_tokenizer((self.folder / "tokenizer.json").read_bytes())
        model = LoadedModel(
            folder=self.folder,
            plan=self.plan,
            config=config,
            arch=engine.arch,
            step=step,
            tokenizer=tokenizer,
            end=self.eos,
            read=engine.reader(),
            replica=readers.rank,
            replicas=readers.size,
            first=groups.is_first,
            alone=groups.world_size == 1,
        )
        lines = Lines()
        moved = partial(_beat, beat, step)
        ask(model, self.suite.cells, self.tokens, lines, BATCH, moved)
        for wanted, rows_BT, described in self.texts:
            perplexity.measure(model, wanted, rows_BT, described, lines, BATCH, moved)
        rows = rows_of(lines.lines.values(), {})
        return {f"{row['task']}/{row['length']}/{row['metric']}": row["value"] for row in rows}


def _beat(beat: Callable[[str], None], step: int, done: int, total: int) -> None:
    beat(f"run.evaluate at step {step}: {done} of {total}")


def with_error(work: Callable[[], Result]) -> Result:
    """Return a function's result. If it raises Unusable, raise ConfigError for the key `run.evaluate` instead."""
    try:
        return work()
    except Unusable as error:
        raise ConfigError([Problem("run.evaluate", error.code, str(error))]) from error
