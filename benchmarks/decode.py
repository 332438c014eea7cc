"""Generation: tokens one by one from states (`decode`), and prompts (`prefill`), of several models side by side.

decode    tokens are generated greedily at batch 1 after a random text of each length, the end of text ignored. Each
          length gives a time per token and the bytes of all states
scoring   losses of 16 rows of 4096 tokens as `hybridtron evaluate` takes them, against the forward pass of training
prefill   the same number of tokens at every length, as rows of that length: the logits of the last position alone

A model is a run's folder or a recipe; without names they are a Samba, its window, Mamba and full-attention siblings of
the laptop recipe's size. The first Samba is also exported to transformers' class, in memory, and both generate texts
with the same weights. Random weights take the same time as trained ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.cli.arguments import newest_checkpoint
from hybridtron.config.load import load
from hybridtron.config.schema import Config
from hybridtron.data.batch import SeqInfo
from hybridtron.device import DTYPES, compute_device
from hybridtron.evaluate.length import fitting_chunk, token_losses
from hybridtron.evaluate.loaded_model import open_checkpoint, whole_model
from hybridtron.hf import HybridtronConfig, HybridtronForCausalLM
from hybridtron.inference.generate import CHUNK, Prompts, continue_prompts, generate
from hybridtron.inference.reader import reader, state_bytes
from hybridtron.inference.sampling import GREEDY
from hybridtron.interop.custom import Custom
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.linear import SINGLE_RANK
from hybridtron.parallel.vocabulary import linear_cross_entropy
from hybridtron.proving.measuring import BenchReport, Seconds, Timings, now, times

PATTERNS = {"Samba": "(M-W-)*2", "SWA": "(W-W-)*2", "Mamba": "M*8", "Llama": "(F-F-)*2"}
FULL = "model.layers.F={kind: attention, heads: 4}"
PROMPT = 128
LOSS_TOLERANCE = 1e-4


def decode(report: BenchReport) -> None:
    """Measure the time per token by length, and transformers' generate at batch 1."""
    longest = 2**14
    if compute_device().type == "cuda":
        longest = 2**16
    lengths = report.pick(full=(longest // 16, longest // 4, longest), quick=(32, 64))
    tokens = report.pick(full=64, quick=2)
    models = named(report)
    forms = {}
    cached = {}
    for length in lengths:
        forms[length] = {}
        for name, (model, config) in models.items():
            forms[length][name], cached[name, length] = decoding(model, config, length, tokens)
    measured = report.sweep(forms)
    first, *others = models
    more = {f"{name} per token": over_the_first(measured, name) for name in models}
    more |= {f"{name} states": [readable(cached[name, length]) for length in lengths] for name in models}
    report.ratios("Time per token", "tokens before", measured, [(other, first) for other in others], more)
    report.notes += [
        f"batch 1, greedy, {tokens} tokens at each length, {report.repetitions} rounds of all forms and lengths",
        "per token: over that at the first length",
    ]
    report.at_most(f"{first}, per token at {lengths[-1]} / at {lengths[0]}", 1.15, growth(measured, first))
    if first == "Samba":
        against_transformers(report, *models[first], tokens)


def against_transformers(report: BenchReport, model: LanguageModel, config: ModelConfig, tokens: int) -> None:
    """Time both implementations on the same text after the same prompt, once they agree on its tokens."""
    theirs = as_transformers(model, config)
    prompt_BL = random_tokens(config, PROMPT)
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"attention_mask": torch.ones_like(prompt_BL), "max_new_tokens": tokens}
    assert torch.equal(theirs.generate(prompt_BL, **settings)[:, PROMPT:], generate(model, prompt_BL, tokens, 0.0, 0))
    forms: dict[str, Callable[[], object]] = {
        "ours": partial(generate, model, prompt_BL, tokens, 0.0, 0),
        "transformers": partial(theirs.generate, prompt_BL, **settings),
    }
    measured = report.sweep({PROMPT: forms})
    report.ratios("Against transformers' generate", "prompt", measured, [("transformers", "ours")], {})
    ratio = measured[PROMPT].ratio("transformers", "ours")
    report.at_least("times faster than transformers' generate of the exported Samba", 3, ratio)


def prefill(report: BenchReport) -> None:
    """Measure the time to read as many tokens in rows of each length."""
    on_gpu = compute_device().type == "cuda"
    longest = 2**13
    count = 5
    if report.quick:
        longest = 128
        count = 2
    elif on_gpu:
        longest = 2**17
        count = 8
    lengths = [longest >> power for power in reversed(range(count))]
    models = named(report)
    forms = {
        length: {name: partial(reading, *pair, longest // length, length) for name, pair in models.items()}
        for length in lengths
    }
    measured = report.sweep(forms)
    first, *others = models
    more = {f"{name} by length": over_the_first(measured, name) for name in models}
    report.ratios("Time to read", "tokens of a row", measured, [(other, first) for other in others], more)
    report.notes.append(f"{longest} tokens at every length, {report.repetitions} rounds; by length: over the first row")
    if not on_gpu:
        report.notes.append("comparable: false; on a CPU only the growth with the length means something")


def scoring(report: BenchReport) -> None:
    """Measure losses of held-out rows against training's forward pass on the same rows."""
    rows = report.pick(full=16, quick=2)
    length = report.pick(full=4096, quick=64)
    measured = {}
    for name, (model, config) in named(report).items():
        tokens_BT = random_tokens(config, length + 1, rows)
        chunk = fitting_chunk(model.arch, rows)
        forms = {
            "scoring": partial(token_losses, reader(model), tokens_BT, chunk),
            "training": partial(training_forward, model, tokens_BT),
        }
        scored = forms["scoring"]().mean()
        trained = forms["training"]()
        assert abs(scored - trained) < LOSS_TOLERANCE * trained, f"{name}: the losses differ: {scored}, {trained}"
        measured[name] = report.timed(forms)
    report.ratios("Time to score", "model", measured, [("training", "scoring")], {})
    report.notes.append(f"{rows} rows of {length} tokens, {report.repetitions} rounds; training: a row at a time")
    first, timings = next(iter(measured.items()))
    report.at_least(f"{first}, rate of scoring / of training's forward pass", 0.9, timings.ratio("training", "scoring"))


def training_forward(model: LanguageModel, tokens_BT: Tensor) -> float:
    """Compute the mean loss with the forward pass of training, a row at a time."""
    total = 0.0
    for tokens_T in tokens_BT:
        tokens_1L = tokens_T[None, :-1]
        labels_L1 = tokens_T[1:, None]
        seq = SeqInfo.stream(*tokens_1L.shape, device=tokens_T.device)
        x_LBD = model(tokens_1L, None, seq, logits=False).output
        counted_L1 = torch.ones_like(labels_L1, dtype=torch.bool)
        loss = linear_cross_entropy(x_LBD, model.output_weight(), labels_L1, counted_L1, 0.0, SINGLE_RANK)
        total += loss.cross_entropy.item()
    return total / tokens_BT[:, 1:].numel()


def named(report: BenchReport) -> dict[str, tuple[LanguageModel, ModelConfig]]:
    """Return the models to measure, with their configurations, by name."""
    small = report.pick(full=(), quick=("model.width=32", "model.vocab_size=64", "model.layers.-.hidden=32"))
    if report.recipe:
        return {name: of_name(name) for name in report.recipe}
    configs = {
        name: load(["recipe=laptop", FULL, f"model.pattern={pattern}", *small]) for name, pattern in PATTERNS.items()
    }
    return {name: (started(config), config.model) for name, config in configs.items()}


def of_name(name: str) -> tuple[LanguageModel, ModelConfig]:
    """Open a run's newest checkpoint, or build a recipe's model with initial weights."""
    if Path(name).is_dir():
        checkpoint = open_checkpoint(newest_checkpoint(Path(name)))
        return whole_model(checkpoint, checkpoint.plan.arch), checkpoint.config.model
    config = load([f"recipe={name}"])
    return started(config), config.model


def started(config: Config) -> LanguageModel:
    model = LanguageModel(architecture(config.model))
    initialise(model, seed=0)
    return model.to(compute_device()).cast(DTYPES[config.precision.name]).eval()


def random_tokens(config: ModelConfig, length: int, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(config.vocab_size, (batch, length), generator=generator).to(compute_device())


def decoding(model: LanguageModel, config: ModelConfig, length: int, tokens: int) -> tuple[Callable[[], object], int]:
    """Read a random text of `length` tokens, and return a function that generates tokens after it.

    The second value is the bytes of the states.
    """
    read = reader(model)
    prompts = prompts_of(random_tokens(config, length))
    with torch.no_grad():
        known = prompts.read(read.read, CHUNK)

    class Known(Prompts):
        """A prompt that has been read already."""

        def read(self, *_: object) -> Any:
            return known

    return partial(made, read, Known(*vars(prompts).values()), tokens), state_bytes(known[1])


def made(read: Any, prompts: Prompts, tokens: int) -> Seconds:
    """Time `tokens` generated tokens, after two that are not timed.

    The first of these is chosen from the known logits; the next has to load weights and states into the cache.
    """
    steps = continue_prompts(read, prompts, GREEDY)
    deque(islice(steps, 2), maxlen=0)
    start = now()
    deque(islice(steps, tokens), maxlen=0)
    return Seconds(now() - start)


@torch.no_grad()
def reading(model: LanguageModel, config: ModelConfig, batch: int, length: int) -> None:
    prompts_of(random_tokens(config, length, batch)).read(reader(model).read, max(1, CHUNK // batch))


def prompts_of(tokens_BL: Tensor) -> Prompts:
    return Prompts(tokens_BL, torch.zeros(len(tokens_BL), dtype=torch.int64, device=tokens_BL.device))


def over_the_first(measured: dict[int, Timings], form: str) -> list[str]:
    """Return a form's time at each setting over its time at the first."""
    first, *_ = seconds = [at[form].fastest for at in measured.values()]
    return [times(at / first) for at in seconds]


def growth(measured: dict[int, Timings], form: str) -> float:
    timings: Sequence[Timings] = list(measured.values())
    return timings[-1][form].fastest / timings[0][form].fastest


def readable(size: int) -> str:
    return f"{size / 2**10:,.0f} KiB"


def as_transformers(model: LanguageModel, config: ModelConfig) -> Any:
    """Build the class shipped with exports in memory, with this model's weights."""
    keys: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        stored = model.table[name].stored(name)
        parts = weight.detach().split([shape[0] for shape in stored.values()])
        keys |= dict(zip(stored, parts, strict=True))
    theirs: Any = HybridtronForCausalLM(HybridtronConfig(**Custom().config(architecture(config), CHUNK)))
    theirs.to(weight.device, weight.dtype)
    weights = {rule.theirs: rule.to_theirs(keys.__getitem__) for rule in Custom().rules(architecture(config))}
    missing = theirs.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    theirs.tie_weights()
    return theirs.eval()
