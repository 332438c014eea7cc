"""Log messages of the first rank: at the start of a run and of each phase, and at the end, with a sample of text."""

from __future__ import annotations

import io
import logging
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Config, RunConfig
from hybridtron.config.units import readable
from hybridtron.data.loader import Loader
from hybridtron.data.mixture_spec import reading_plan
from hybridtron.data.tokenizer_file import read_tokenizer
from hybridtron.device import describe_device
from hybridtron.engine.engine import Engine
from hybridtron.mixers.base import mixer_class
from hybridtron.mixers.norm import RMSNorm
from hybridtron.model.generate import Prompts, continued, reader
from hybridtron.model.lm import LanguageModel
from hybridtron.model.sampling import Sampling
from hybridtron.model.stack import Residual
from hybridtron.model.text import TextOfRow, write
from hybridtron.ops.dispatch import Op
from hybridtron.ops.dropout import dropout
from hybridtron.ops.loss import linear_cross_entropy
from hybridtron.ops.native.library import missing
from hybridtron.ops.registry import choices
from hybridtron.ops.softmax import softmax_gradients, softmax_sums
from hybridtron.train.outcome import Progress, clock

LOSS = (linear_cross_entropy, softmax_sums, softmax_gradients)

SAMPLING = Sampling(temperature=0.8, seed=0)
LOG = logging.getLogger(__name__)


def announce_run(config: Config, engine: Engine, first: int, last: int) -> None:
    """Log a run's model, device, layout, steps and folder, and each op's implementation with the reason for it.

    The run trains the steps after `first`, up to `last`.
    """
    parameters = sum(parameter.size for parameter in engine.optimizer.table.values())
    LOG.info(
        f"{config.run.name}: {readable(parameters)} parameters, {engine.config.precision.name}, "
        f"{describe_device()}, steps {first + 1} to {last}, folder {config.run.dir}"
    )
    parallel = config.parallel
    groups = engine.groups
    if groups.world_size > 1:
        LOG.info(
            f"{groups.world_size} processes: tensor {parallel.tensor}{' with sequence' * parallel.sequence}, "
            f"pipeline {parallel.pipeline} x {parallel.virtual_pipeline}, data {groups.data.size}"
        )
    if parallel.offload and engine.device.type == "cpu":
        LOG.warning("parallel.offload saves nothing on a CPU, whose memory is the host's: it costs copies")
    if engine.device.type == "cpu" and (reason := missing()):
        LOG.warning(f"ops run in torch alone, several times slower than compiled for this CPU ({reason})")
    table = Table("op", "runs", "why", box=None, title="kernels", title_justify="left")
    used = ops_of(engine.config.model)
    for name, implementation, reason in choices(engine.device.type):
        if name in used:
            table.add_row(name, implementation, reason)
    LOG.info(as_text(table))


def as_text(table: Table) -> str:
    """Render a table as plain text at the console's width, for the log."""
    console = Console(file=io.StringIO(), width=Console().width)
    with console.capture() as shown:
        console.print(table)
    return "\n".join(line.rstrip() for line in shown.get().splitlines())


def ops_of(model: ModelConfig) -> set[str]:
    """Return the names of the ops that a model may call.

    These are the ops named in the modules of its layers' classes, its adapters' dropout, and the loss's ops.
    """
    mixers = [cls for spec in architecture(model).specs for cls in mixer_class(spec).__mro__]
    files = {sys.modules[cls.__module__] for cls in (*mixers, Residual, RMSNorm)}
    named = {value.name for file in files for value in vars(file).values() if isinstance(value, Op)}
    if model.adapters is not None and model.adapters.dropout:
        dropped = {dropout.name}
    else:
        dropped = set()
    return named | dropped | {op.name for op in LOSS}


def announce_reading(loader: Loader, phase: ResolvedPhase) -> None:
    """Log a phase's data: tokens and epochs of each source, and the mean length of uninterrupted text."""
    settings = phase.settings
    order = loader.order
    table = Table("source", "share", "tokens", "epochs", "learned", box=None, title_justify="left")
    kind = f"{order.kind.value} of {settings.seq_len} tokens, documents {order.documents.value}"
    table.title = f"{settings.name} reads {kind}"
    for line in reading_plan(loader.sources.mixture, phase.tokens):
        table.add_row(line.source, f"{line.share:.1%}", readable(line.tokens), line.shown_epochs, line.shown_learned)
    LOG.info(as_text(table))
    LOG.info(f"text runs on for {readable(loader.mean_stretch)} tokens on average; every row is full")


def announce_end(progress: Progress, run_dir: Path, checkpoint: Path) -> None:
    """Log the duration, the held-out losses and the last checkpoint of a run, and commands that usually come next."""
    losses = "".join(f", held-out loss {loss:.4f} at {length}" for length, loss in (progress.validation or {}).items())
    LOG.info(
        f"finished at step {progress.step} after {clock(time.monotonic() - progress.began)}{losses}\n"
        f"checkpoint: {checkpoint}\n\nnext:\n"
        f'  hybridtron generate {run_dir} --prompt "def main("\n'
        f"  hybridtron plot {run_dir}\n"
        f"  hybridtron evaluate {run_dir}\n"
        f"  hybridtron export {run_dir} --output {run_dir}-hf"
    )


def sample_text(model: LanguageModel, checkpoint: Path, prompt: str, new_tokens: int) -> str:
    """Return the prompt continued by `new_tokens` generated tokens, with the tokenizer in the checkpoint folder."""
    tokenizer = read_tokenizer((checkpoint / "tokenizer.json").read_bytes())
    ids = tokenizer.encode(prompt).ids
    text = TextOfRow(tokenizer.decode, new_tokens, before=ids)
    prompts = Prompts.of([ids], next(model.parameters()).device)
    write([text], continued(reader(model), prompts, SAMPLING), lambda row, new: None)
    return tokenizer.decode(ids) + text.text


def sample_report(model: LanguageModel, checkpoint: Path, run: RunConfig, tokens: int) -> str:
    """Format the sample at the end of a run, with a note if the model has read fewer tokens than it has weights."""
    text = sample_text(model, checkpoint, run.sample_prompt, run.sample_tokens)
    parameters = sum(weight.numel() for weight in model.parameters())
    note = ""
    if tokens < parameters:
        note = f" (noise is expected: {readable(tokens)} tokens were read, {tokens / parameters:.2g} for each weight)"
    return f"\na sample of {run.sample_tokens} tokens after {run.sample_prompt!r}{note}:\n{text}"
