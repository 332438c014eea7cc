"""Log messages by the first rank: when a run starts, when a phase starts, and when the run ends."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.table import Architecture
from hybridtron.config.choices import Precision
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Config, RunConfig
from hybridtron.config.units import readable
from hybridtron.data.loader import Loader
from hybridtron.data.mixture_spec import reading_plan
from hybridtron.data.tokenizer_file import read_tokenizer
from hybridtron.device import describe_device
from hybridtron.engine.engine import Engine
from hybridtron.inference.detokenize import Detokenizer, stream_texts
from hybridtron.inference.generate import Prompts, continue_prompts
from hybridtron.inference.reader import reader
from hybridtron.inference.sampling import Sampling
from hybridtron.mixers.base import mixer_class
from hybridtron.mixers.norm import RMSNorm
from hybridtron.model.lm import LanguageModel
from hybridtron.model.stack import Residual
from hybridtron.ops.dispatch import Op
from hybridtron.ops.dropout import dropout
from hybridtron.ops.experts import (
    expert_choice,
    expert_linear,
    expert_order,
    from_experts,
    mlp_of_rows,
    to_experts,
)
from hybridtron.ops.loss import linear_cross_entropy
from hybridtron.ops.native.library import missing
from hybridtron.ops.registry import choices_by_case
from hybridtron.ops.softmax import softmax_gradients, softmax_sums
from hybridtron.train.attention_cases import attention_cases
from hybridtron.train.outcome import Progress, clock
from hybridtron.train.time_log import TimeSpent

# the ops that routing and the op `experts` call
EXPERTS = (expert_choice, expert_linear, expert_order, from_experts, mlp_of_rows, to_experts)
LOSS = (linear_cross_entropy, softmax_sums, softmax_gradients)  # the ops that compute the loss
SAMPLING = Sampling(temperature=0.8, seed=0)
LOG = logging.getLogger(__name__)


def announce_run(config: Config, engine: Engine, first: int, last: int) -> None:
    """Log a run's model, device, layout, steps and folder, and a table of ops.

    The table has the chosen implementation of each op, and the reason for the choice. The run trains the steps after
    `first`, up to and including `last`.
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
    for text in device_warnings(engine.arch, engine.config, engine.device.type):
        LOG.warning(text)
    table = Table("op", "runs", "why", box=None, title="kernels", title_justify="left")
    cases = attention_cases(engine.phase)
    used = ops_of(engine.arch) | set(cases)
    for name, implementation, reason in choices_by_case(engine.device.type, cases):
        if name in used:
            table.add_row(name, implementation, reason)
    LOG.info(as_text(table))


def device_warnings(arch: Architecture, config: Config, device: str) -> Iterator[str]:
    """Yield a sentence for each setting without a use on this type of device, and each reason for slow ops."""
    if config.parallel.offload and device == "cpu":
        yield "parallel.offload has no use on a CPU: it saves no memory there, and only adds copies"
    if device == "cpu" and (reason := missing()):
        yield f"ops run without their C++ implementations for the CPU, several times slower: {reason}"
    if device == "cuda" and config.precision.name is Precision.fp32 and has_experts(arch):
        yield "precision.name is fp32: experts run one after the other, and the host waits in each layer: use bf16"


def has_experts(arch: Architecture) -> bool:
    """Return True if a layer is a mixture of experts."""
    return any(isinstance(spec, MoESpec) for spec in arch.specs)


def as_text(table: Table) -> str:
    """Render a table as plain text at the console's width, for the log."""
    console = Console(file=io.StringIO(), width=Console().width)
    with console.capture() as shown:
        console.print(table)
    return "\n".join(line.rstrip() for line in shown.get().splitlines())


def ops_of(arch: Architecture) -> set[str]:
    """Return the names of the ops that a model may call.

    These are the ops that the layers' files import, the ops that compute the loss, the ops that routing and experts
    consist of if the model has experts, and the dropout op if the model has adapters with dropout.
    """
    mixers = [cls for spec in arch.specs for cls in mixer_class(spec).__mro__]
    files = {sys.modules[cls.__module__] for cls in (*mixers, Residual, RMSNorm)}
    named = {value.name for file in files for value in vars(file).values() if isinstance(value, Op)}
    if has_experts(arch):
        named |= {op.name for op in EXPERTS}
    adapters = arch.model.adapters
    if adapters is not None and adapters.dropout:
        dropped = {dropout.name}
    else:
        dropped = set()
    return named | dropped | {op.name for op in LOSS}


def announce_reading(loader: Loader, phase: ResolvedPhase) -> None:
    """Log a phase's data: each source's share, tokens and epochs, and the mean length between document boundaries."""
    settings = phase.settings
    order = loader.order
    table = Table("source", "share", "tokens", "epochs", "learned", box=None, title_justify="left")
    kind = f"{order.kind.value} of {settings.seq_len} tokens, documents {order.documents.value}"
    table.title = f"{settings.name} reads {kind}"
    for line in reading_plan(loader.sources.mixture, phase.tokens):
        table.add_row(line.source, f"{line.share:.1%}", readable(line.tokens), line.shown_epochs, line.shown_learned)
    LOG.info(as_text(table))
    LOG.info(f"mean length of uninterrupted text: {readable(loader.mean_stretch)} tokens; rows are fully packed")


def announce_end(progress: Progress, run_dir: Path, checkpoint: Path, spent: TimeSpent) -> None:
    """Log a run's duration, its held-out losses, its last checkpoint, and commands that usually come next."""
    if spent.starts > 1:
        starts = f"{clock(spent.total)} in {spent.starts} starts"
    else:
        starts = clock(spent.total)
    losses = "".join(f", held-out loss {loss:.4f} at {length}" for length, loss in (progress.validation or {}).items())
    LOG.info(
        f"finished at step {progress.step} after {clock(time.monotonic() - progress.began)}{losses}\n"
        f"time: {starts}: {spent.words()}\n"
        f"checkpoint: {checkpoint}\n\nnext:\n"
        f'  hybridtron generate {run_dir} --prompt "def main("\n'
        f"  hybridtron plot {run_dir}\n"
        f"  hybridtron evaluate {run_dir}\n"
        f"  hybridtron export {run_dir} --output {run_dir}-hf"
    )


def sample_text(model: LanguageModel, checkpoint: Path, prompt: str, new_tokens: int) -> str:
    """Generate `new_tokens` tokens after a prompt, and return the prompt with the generated text.

    The tokenizer is read from the checkpoint folder.
    """
    tokenizer = read_tokenizer((checkpoint / "tokenizer.json").read_bytes())
    ids = tokenizer.encode(prompt).ids
    text = Detokenizer(tokenizer.decode, new_tokens, before=ids)
    prompts = Prompts.of([ids], next(model.parameters()).device)
    stream_texts([text], continue_prompts(reader(model), prompts, SAMPLING), lambda row, new: None)
    return tokenizer.decode(ids) + text.text


def sample_report(model: LanguageModel, checkpoint: Path, run: RunConfig, tokens: int) -> str:
    """Generate a text sample for the end of a run, and format it for the log.

    `tokens` is the number of tokens that the run has read. If it is smaller than the number of weights, a note says
    that the sample may be noise.
    """
    text = sample_text(model, checkpoint, run.sample_prompt, run.sample_tokens)
    parameters = sum(weight.numel() for weight in model.parameters())
    note = ""
    if tokens < parameters:
        note = f" (may be noise: the model has read {readable(tokens)} tokens, {tokens / parameters:.2g} per weight)"
    return f"\na sample of {run.sample_tokens} tokens after {run.sample_prompt!r}{note}:\n{text}"
