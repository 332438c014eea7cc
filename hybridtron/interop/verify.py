"""The export proof: transformers must load a folder and compute the same logits and tokens as the checkpoint's model.

Both models compute in fp32 on the CPU. Rows have adversarial lengths: 1, and shorter and longer than the convolution,
the window, and the chunks of scans and span attention. Logits must agree at every position. A greedy continuation must
agree token by token; with span attention it is long enough to reach a chunk that retrieves blocks of the prompt. If
logits differ, the error names the first layer whose output differs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtron.architecture.delta_rule import DeltaRuleSpec
from hybridtron.architecture.mamba2 import Mamba2Spec
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.shared_attention import SharedBlockSpec
from hybridtron.architecture.span import SpanSpec
from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.data.batch import SeqInfo
from hybridtron.interop.config_json import LARGEST, read_object, settings_of
from hybridtron.interop.custom import AUTO_MAP
from hybridtron.interop.export import NATIVES, class_of, dtype_of
from hybridtron.interop.native import Native
from hybridtron.interop.rules import TensorRule
from hybridtron.interop.shipped_code import is_shipped, shipped_code
from hybridtron.model.generate import generate
from hybridtron.model.lm import LanguageModel
from hybridtron.model.stack import ParallelBranch, Residual, ResidualOut
from hybridtron.ops.multiplied import multiplied
from hybridtron.regular_files import read_regular

# fractions of the largest logit; see _allowed
TOLERANCE = 1e-5
ENLARGED = 1e-4
NEW_TOKENS = 12
CHUNKS = 300  # tokens; longer than one chunk of any scan
FORMER_CLASS = "its class is an earlier version's, which forgets the prompt in this transformers: export again"


class NotTheSame(ValueError):
    """Raised if a folder does not compute the same as the model that it was made from."""


@dataclass(frozen=True)
class Proof:
    """A successful proof: row lengths, the largest difference as a fraction of the largest logit, and a caution."""

    lengths: tuple[int, ...]
    logits: float
    caution: str = ""


def verify(folder: Path, checkpoint: Checkpoint) -> Proof:
    """Compare a folder with a full checkpoint. Raises NotTheSame if they differ, CannotImport for a bad config.json."""
    return same_model(folder, checkpoint.config.model, whole_model(checkpoint))


def same_model(folder: Path, model: ModelConfig, ours: LanguageModel) -> Proof:
    """Compare a folder with our model in memory. Raises NotTheSame if they differ, CannotImport for a bad config.json.

    `ours` has the checkpoint's weights; they are rounded to the folder's dtype, except those that exports keep in fp32.
    """
    settings = settings_of(folder)
    target = class_of(folder, settings)
    dtype = dtype_of(folder, settings)
    fp32_keys = {key for rule in _rules(folder, target, model) if rule.fp32 for key in rule.ours}
    with quiet():
        theirs = loaded(folder, target.proven_with)
        if (tied := theirs.config.tie_word_embeddings) is not model.tie_embeddings:
            raise NotTheSame(f"{folder} has tie_word_embeddings={tied}, the checkpoint has not")
        return same_answers(folder, theirs, in_fp32(ours, dtype, fp32_keys), model)


def _rules(folder: Path, target: Native, model: ModelConfig) -> list[TensorRule]:
    """Return a class's conversion rules for our model. Raises NotTheSame if the class has no such sub-layers."""
    try:
        return target.rules(model)
    except LookupError as error:
        raise NotTheSame(f"{folder} is a {target.name}, which can't be the checkpoint's {model.pattern}") from error


def same_answers(folder: Path, theirs: Any, ours: LanguageModel, model: ModelConfig) -> Proof:
    """Compare transformers' model with ours; both must compute in fp32. Raises NotTheSame if they differ."""
    try:
        return _proof(folder, theirs, ours, model)
    except NotTheSame:
        if not _span_chunks(model):
            raise
        # in fp32, rounding can decide which of two almost equally relevant blocks is selected: compare in fp64
        return _proof(folder, theirs.double(), ours.double(), model)


def _proof(folder: Path, theirs: Any, ours: LanguageModel, model: ModelConfig) -> Proof:
    lengths = lengths_of(model)
    worst = max(_same_logits(folder, theirs, ours, model, length) for length in lengths)
    _same_continuation(folder, theirs, ours, model)
    return Proof(lengths, worst, FORMER_CLASS if takes_former_cache(theirs) else "")


@torch.no_grad()
def _same_logits(folder: Path, theirs: Any, ours: LanguageModel, model: ModelConfig, length: int) -> float:
    """Return the largest difference between both models' logits on two random rows, over the largest logit.

    Raises NotTheSame if it exceeds the tolerance.
    """
    tokens_BL = torch.randint(model.vocab_size, (2, length), generator=torch.Generator().manual_seed(length))
    expected_BLV = ours(tokens_BL, None, SeqInfo.stream(2, length)).output.transpose(0, 1)
    logits_BLV = theirs(tokens_BL).logits
    if logits_BLV.shape != expected_BLV.shape:
        raise NotTheSame(f"{folder} answers logits of shape {tuple(logits_BLV.shape)}, not {tuple(expected_BLV.shape)}")
    difference = _apart(logits_BLV, expected_BLV)
    allowed = _allowed(model, length)
    if not difference <= allowed:
        excess = f"{difference:.1e} of the largest apart (at most {allowed:g})"
        raise NotTheSame(f"{folder}: logits of {length} tokens are {excess}; {_parting(theirs, ours, tokens_BL)}")
    return difference


def _allowed(model: ModelConfig, length: int) -> float:
    """Return the tolerance for a row's logits, as a fraction of the largest logit.

    A delta-rule head may output almost zero. The norm after it then amplifies its rounding error, ours or that of
    transformers' fp32 chunks, and the more so the longer the row is. Zamba2's block has no residual connection, so its
    attention's rounding error passes through a norm and the MLP undiluted. In both cases either model differs from
    float64 as much as from the other.
    """
    enlarges = any(isinstance(spec, DeltaRuleSpec | SharedBlockSpec) for spec in architecture(model).specs)
    if enlarges and length == CHUNKS:
        return ENLARGED
    return TOLERANCE


def _parting(theirs: Any, ours: LanguageModel, tokens_BL: Tensor) -> str:
    """Describe the first layer of transformers after which the residual streams differ.

    A layer may be several of our sub-layers, so our streams are compared at the ends of its layers only.
    """
    streams: list[Tensor] = []
    residual_streams: list[Tensor] = []

    def note(layer: torch.nn.Module, given: tuple[Any, ...], out: ResidualOut) -> None:
        if isinstance(layer, ParallelBranch):
            streams.append(streams[-1] + out.stream.latest_LBD)
            residual_streams[-1] = streams[-1]
            return
        streams.append(out.stream.materialize())
        residual_streams.extend(streams[-1:] if isinstance(layer, Residual) else ())

    hooks = [layer.register_forward_hook(note) for layer in ours.layers.values()]
    batch, length = tokens_BL.shape
    ours(tokens_BL, None, SeqInfo.stream(batch, length))
    for hook in hooks:
        hook.remove()
    hidden_states = theirs(tokens_BL, output_hidden_states=True).hidden_states
    # feeders and parallel branches have no layer of their own in transformers
    if len(streams) != len(hidden_states) - 1:
        streams = residual_streams
    sub_layers_per_layer = len(streams) // (len(hidden_states) - 1)
    embedded_BLD = multiplied(ours.embedding(tokens_BL), ours.embedding_multiplier).transpose(0, 1)
    # Mamba's classes leave the embedding out
    if _apart(hidden_states[0], embedded_BLD) <= TOLERANCE:
        first = 1
    else:
        first = 0
    for layer, stream in enumerate(hidden_states[first:-1]):  # the last hidden state is after the final norm
        if not _apart(stream, streams[(layer + 1) * sub_layers_per_layer - 1].transpose(0, 1)) <= TOLERANCE:
            return f"the streams part in layer {layer}"
    return "the streams part in the last layer, or behind it"


def _apart(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def loaded(folder: Path, settings: Mapping[str, Any]) -> Any:
    """Load a folder in transformers, in fp32; `settings` override its config.json.

    Raises NotTheSame if tensors are missing, unexpected or of another shape. Code in the folder runs only if it is ours
    (see `brings_our_code`).
    """
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=brings_our_code(folder), **settings
    )
    faults = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if faults:
        raise NotTheSame(f"{folder} does not load as it stands: {faults}")
    return model.eval()


def brings_our_code(folder: Path) -> bool:
    """Check that a folder's code may be run: it is the custom class, byte for byte as a hybridtron version shipped it.

    Returns False if config.json has no auto_map or names a native class: transformers then runs its own class, and the
    folder is not trusted. Raises NotTheSame for any other code: in a trusted folder transformers runs the files in
    auto_map, a custom `generate`, and the code of an adapter's base model, wherever that is.
    """
    settings = read_object(folder / "config.json")
    auto_map = settings.get("auto_map")
    if auto_map is None or class_of(folder, settings) in NATIVES:
        return False
    if auto_map != AUTO_MAP:
        raise NotTheSame(f"{folder / 'config.json'} names code that is not ours in auto_map: {auto_map}")
    if (folder / "adapter_config.json").exists():
        raise NotTheSame(f"{folder / 'adapter_config.json'} names another model, whose code is not run")
    files = {path.relative_to(folder).as_posix(): read_regular(path, LARGEST) for path in sorted(folder.rglob("*.py"))}
    if not is_shipped(files):
        ours = shipped_code()
        changed_files = [name for name in files.keys() | ours.keys() if files.get(name) != ours.get(name)]
        raise NotTheSame(f"{folder / min(changed_files)} is not this version's or an earlier one's, and is not run")
    return True


def in_fp32(model: LanguageModel, dtype: torch.dtype, kept: Collection[str] = ()) -> LanguageModel:
    """Cast a model to fp32 after rounding its weights to `dtype`; weights named in `kept` are not rounded."""
    exact_weights = {name: weight.data for name, weight in model.named_parameters() if name in kept}
    model = model.cast(dtype).cast(torch.float32).eval()
    for name, value in exact_weights.items():
        model.get_parameter(name).data = value.float()
    return model


def whole_model(checkpoint: Checkpoint) -> LanguageModel:
    """Build a checkpoint's full model on the CPU, with the weights as stored."""
    model = LanguageModel(checkpoint.config.model)
    checkpoint.load_weights(model)
    return model


def lengths_of(model: ModelConfig) -> tuple[int, ...]:
    """Return the row lengths of the proof: around the convolution's and the window's sizes, and beyond one chunk."""
    specs = architecture(model).specs
    windows = {window for spec in specs if (window := getattr(spec, "window", None)) is not None}
    around = {near for window in windows for near in (window - 1, window, window + 1, 2 * window + 3)}
    return tuple(sorted({1, 2, 3, 5, CHUNKS, *around, *(chunk + 3 for chunk in _span_chunks(model))}))


def _span_chunks(model: ModelConfig) -> set[int]:
    """Return the chunk sizes of span attention that also retrieves blocks at evaluation; empty without it."""
    specs = architecture(model).specs
    return {
        max(spec.chunks()) for spec in specs if isinstance(spec, SpanSpec) and spec.eval == "span" and spec.retrieves
    }


def _same_continuation(folder: Path, theirs: Any, ours: LanguageModel, model: ModelConfig) -> None:
    """Compare greedy continuations of a random prompt. Raises NotTheSame if a token differs."""
    length = max(7, max(_span_chunks(model), default=0) - NEW_TOKENS // 2)
    prompt_BL = torch.randint(model.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    expected: Tensor = generate(ours, prompt_BL, NEW_TOKENS, temperature=0, seed=0)
    generated_BL = theirs.generate(
        prompt_BL, attention_mask=torch.ones_like(prompt_BL), max_new_tokens=NEW_TOKENS, do_sample=False,
        eos_token_id=None, pad_token_id=0, use_cache=not _has_floors(model) and not takes_former_cache(theirs),
    )  # fmt: skip
    continuation: Sequence[int] = generated_BL[0, prompt_BL.shape[1] :].tolist()
    if continuation != expected[0].tolist():
        raise NotTheSame(f"{folder} continues with {continuation}, not {expected[0].tolist()}")


def _has_floors(model: ModelConfig) -> bool:
    """Check if a Mamba-2 clamps step sizes to a minimum: transformers ignores it when generating from a cache."""
    return any(isinstance(spec, Mamba2Spec) and spec.dt_floor > 0 for spec in architecture(model).specs)


def takes_former_cache(theirs: Any) -> bool:
    """Check if a class takes its cache under a name that the installed transformers no longer uses.

    transformers 5.24 renamed `past_key_values` to `cache`. The custom class of version 0.1.0 has the former name: its
    logits are right, but `generate` continues without the cached state, as if the prompt were empty.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPast

    is_renamed = "cache" in {field.name for field in dataclasses.fields(BaseModelOutputWithPast)}
    parameters = inspect.signature(theirs.forward).parameters
    return is_renamed and "past_key_values" in parameters and "cache" not in parameters


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' warnings of slow paths and missing kernels, and its progress bars, within a block."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    had_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()
