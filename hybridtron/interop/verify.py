"""The export proof: a folder, loaded by transformers, must give the same logits and tokens as the checkpoint's model.

Both models compute in fp32 on the CPU. Logits must agree at every position, up to rounding, in rows of several lengths:
1 token, and lengths below and above the sizes of convolutions, windows, and the chunks in scans and span attention. A
greedy continuation of a prompt must agree token by token. In models with span attention the prompt is so long that the
continuation begins a new chunk, which retrieves blocks from the prompt. If logits differ, the error names the first
layer after which the models differ.
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
from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.shared_attention import SharedBlockSpec
from hybridtron.architecture.span import SpanSpec
from hybridtron.architecture.table import Architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.data.batch import SeqInfo
from hybridtron.inference.generate import generate
from hybridtron.interop.config_json import MAX_JSON_BYTES, read_object, settings_of
from hybridtron.interop.custom import AUTO_MAP
from hybridtron.interop.export import NATIVES, class_of, dtype_of
from hybridtron.interop.native import Native
from hybridtron.interop.rules import TensorRule
from hybridtron.interop.shipped_code import is_shipped, shipped_code
from hybridtron.model.lm import LanguageModel
from hybridtron.model.stack import ParallelBranch, Residual, ResidualOut
from hybridtron.ops.multiply import multiply
from hybridtron.safe_open import read_regular

TOLERANCE = 1e-5  # allowed difference of logits, as a fraction of the largest logit
ENLARGED = 1e-4  # allowed difference for long rows of some models (see `_allowed`)
NEW_TOKENS = 12  # tokens of the greedy continuation
CHUNKS = 300  # row length in tokens: longer than a chunk of any scan, so that a row has several chunks
FORMER_CLASS = (
    "the code in the folder is of an earlier version, with which the installed transformers generates without the "
    "prompt: export again"
)


class NotTheSame(ValueError):
    """Raised if a folder's model in transformers does not compute the same as our model."""


@dataclass(frozen=True)
class Proof:
    """A successful proof.

    lengths: the row lengths that were compared
    logits: the largest difference between logits, as a fraction of the largest logit
    caution: a warning for the folder's users, or ""
    """

    lengths: tuple[int, ...]
    logits: float
    caution: str = ""


def verify(folder: Path, checkpoint: Checkpoint) -> Proof:
    """Compare a folder with its checkpoint. Raises NotTheSame if they differ, or CannotImport for a bad config.json."""
    return same_model(folder, whole_model(checkpoint))


def same_model(folder: Path, ours: LanguageModel) -> Proof:
    """Compare a folder with our model in memory.

    The weights of `ours` are rounded to the folder's dtype, except weights that exports always store in fp32. Raises
    NotTheSame if the models differ, or CannotImport for a bad config.json.
    """
    settings = settings_of(folder)
    target = class_of(folder, settings)
    dtype = dtype_of(folder, settings)
    fp32_keys = {key for rule in _rules(folder, target, ours.arch) if rule.fp32 for key in rule.ours}
    with quiet():
        theirs = loaded(folder, target.proven_with)
        if (tied := theirs.config.tie_word_embeddings) is not ours.tied:
            raise NotTheSame(f"{folder} has tie_word_embeddings={tied}, but the checkpoint's model has {ours.tied}")
        return same_answers(folder, theirs, in_fp32(ours, dtype, fp32_keys))


def _rules(folder: Path, target: Native, arch: Architecture) -> list[TensorRule]:
    """Return the rules that convert our model's tensors to a class of transformers.

    Raises NotTheSame if the class does not have our model's sub-layers.
    """
    try:
        return target.rules(arch)
    except LookupError as error:
        raise NotTheSame(
            f"{folder} has the class {target.name}, which does not fit the checkpoint's pattern {arch.model.pattern}"
        ) from error


def same_answers(folder: Path, theirs: Any, ours: LanguageModel) -> Proof:
    """Compare a model in transformers with our model, both in fp32. Raises NotTheSame if they differ."""
    try:
        return _proof(folder, theirs, ours)
    except NotTheSame:
        has_experts = any(isinstance(spec, MoESpec) for spec in ours.arch.specs)
        if not _span_chunks(ours.arch) and not has_experts:
            raise
        # Span attention selects the most relevant blocks, and a router selects the experts with the largest scores. In
        # fp32, rounding can change the order of two almost equal scores, so the models are compared again in fp64.
        if has_experts:
            theirs.set_experts_implementation("eager")  # transformers' grouped products have no fp64
        return _proof(folder, theirs.double(), ours.double())


def _proof(folder: Path, theirs: Any, ours: LanguageModel) -> Proof:
    lengths = lengths_of(ours.arch)
    worst = max(_same_logits(folder, theirs, ours, length) for length in lengths)
    _same_continuation(folder, theirs, ours)
    return Proof(lengths, worst, FORMER_CLASS if takes_former_cache(theirs) else "")


@torch.no_grad()
def _same_logits(folder: Path, theirs: Any, ours: LanguageModel, length: int) -> float:
    """Return the largest difference between both models' logits on two random rows, divided by the largest logit.

    Raises NotTheSame if this quotient exceeds the tolerance.
    """
    tokens_BL = torch.randint(ours.arch.model.vocab_size, (2, length), generator=torch.Generator().manual_seed(length))
    expected_BLV = ours(tokens_BL, None, SeqInfo.stream(2, length)).output.transpose(0, 1)
    logits_BLV = theirs(tokens_BL).logits
    if logits_BLV.shape != expected_BLV.shape:
        raise NotTheSame(f"{folder}: logits have shape {tuple(logits_BLV.shape)}, not {tuple(expected_BLV.shape)}")
    difference = _difference(logits_BLV, expected_BLV)
    allowed = _allowed(ours.arch, length)
    if not difference <= allowed:
        excess = f"{difference:.1e} of the largest logit (at most {allowed:g} is allowed)"
        raise NotTheSame(
            f"{folder}: logits of rows of {length} tokens differ by {excess}; {_parting(theirs, ours, tokens_BL)}"
        )
    return difference


def _allowed(arch: Architecture, length: int) -> float:
    """Return the tolerance for a row's logits, as a fraction of the largest logit.

    Two kinds of models have larger rounding errors in the longest rows, so their tolerance there is ENLARGED:
    - With a delta rule: a head's output may be almost zero. The norm after the head then amplifies the rounding error,
      which grows with the row's length.
    - With Zamba2's shared block: there is no residual connection between its attention and its MLP. So attention's
      rounding error passes undiluted through a norm and the MLP.

    In both cases, the two models differ from a computation in float64 as much as from each other.
    """
    enlarges = any(isinstance(spec, DeltaRuleSpec | SharedBlockSpec) for spec in arch.specs)
    if enlarges and length == CHUNKS:
        return ENLARGED
    return TOLERANCE


def _parting(theirs: Any, ours: LanguageModel, tokens_BL: Tensor) -> str:
    """Name the first layer in transformers after which both models' residual streams differ.

    A layer in transformers may be several sub-layers here, so the streams are compared only after a layer's last
    sub-layer.
    """
    streams: list[Tensor] = []
    residual_streams: list[Tensor] = []

    def note(layer: torch.nn.Module, inputs: tuple[Any, ...], out: ResidualOut) -> None:
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
    # sub-layers that only feed the next sub-layer, and parallel branches, are not layers of their own in transformers
    if len(streams) != len(hidden_states) - 1:
        streams = residual_streams
    sub_layers_per_layer = len(streams) // (len(hidden_states) - 1)
    embedded_BLD = multiply(ours.embedding(tokens_BL), ours.embedding_multiplier).transpose(0, 1)
    # in most classes the first hidden state is the embedding; Mamba's classes leave it out
    if _difference(hidden_states[0], embedded_BLD) <= TOLERANCE:
        first = 1
    else:
        first = 0
    for layer, stream in enumerate(hidden_states[first:-1]):  # the last hidden state is after the final norm
        if not _difference(stream, streams[(layer + 1) * sub_layers_per_layer - 1].transpose(0, 1)) <= TOLERANCE:
            return f"the residual streams differ first after layer {layer}"
    return "the residual streams agree before the last layer"


def _difference(computed: Tensor, expected: Tensor) -> float:
    """Return the largest difference, divided by the largest expected magnitude."""
    return ((computed - expected).abs().max() / expected.abs().max()).item()


def loaded(folder: Path, settings: Mapping[str, Any]) -> Any:
    """Load a folder in transformers, in fp32. `settings` override values in config.json.

    Code in the folder runs only if a version of hybridtron has shipped this code (see `brings_our_code`). Raises
    NotTheSame if a tensor is missing, is unexpected, or has another shape.
    """
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=brings_our_code(folder), **settings
    )
    faults = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if faults:
        raise NotTheSame(f"{folder} does not load in transformers without faults: {faults}")
    return model.eval()


def brings_our_code(folder: Path) -> bool:
    """Return True if transformers may run the code in a folder.

    - Returns True if the code is exactly the custom class's code, as some version of hybridtron has shipped it.
    - Returns False if config.json has no auto_map or names a native class. Then transformers runs its own class.
    - Raises NotTheSame for any other code. If the folder were trusted, transformers would run the files in auto_map, a
      custom `generate`, and the code of an adapter's base model, which may be in another folder.
    """
    settings = read_object(folder / "config.json")
    auto_map = settings.get("auto_map")
    if auto_map is None or class_of(folder, settings) in NATIVES:
        return False
    if auto_map != AUTO_MAP:
        raise NotTheSame(f"{folder / 'config.json'}: auto_map names code that hybridtron has not written: {auto_map}")
    if (folder / "adapter_config.json").exists():
        raise NotTheSame(f"{folder / 'adapter_config.json'} names a base model, whose code is not run: remove the file")
    files = {
        path.relative_to(folder).as_posix(): read_regular(path, MAX_JSON_BYTES) for path in sorted(folder.rglob("*.py"))
    }
    if not is_shipped(files):
        ours = shipped_code()
        changed_files = [name for name in files.keys() | ours.keys() if files.get(name) != ours.get(name)]
        raise NotTheSame(f"{folder / min(changed_files)} differs from the code that hybridtron ships, so it is not run")
    return True


def in_fp32(model: LanguageModel, dtype: torch.dtype, kept: Collection[str] = ()) -> LanguageModel:
    """Round a model's weights to `dtype`, except the weights named in `kept`, and cast the model to fp32."""
    exact_weights = {name: weight.data for name, weight in model.named_parameters() if name in kept}
    model = model.cast(dtype).cast(torch.float32).eval()
    for name, value in exact_weights.items():
        model.get_parameter(name).data = value.float()
    return model


def whole_model(checkpoint: Checkpoint) -> LanguageModel:
    """Build a checkpoint's full model on the CPU, and read its weights."""
    model = LanguageModel(checkpoint.plan.arch)
    checkpoint.load_weights(model)
    return model


def lengths_of(arch: Architecture) -> tuple[int, ...]:
    """Return the row lengths for the proof: around the sizes of convolutions and windows, and beyond a scan chunk."""
    windows = {window for spec in arch.specs if (window := getattr(spec, "window", None)) is not None}
    around = {near for window in windows for near in (window - 1, window, window + 1, 2 * window + 3)}
    return tuple(sorted({1, 2, 3, 5, CHUNKS, *around, *(chunk + 3 for chunk in _span_chunks(arch))}))


def _span_chunks(arch: Architecture) -> set[int]:
    """Return the largest chunk size of each layer with span attention, if the layer retrieves blocks at evaluation."""
    return {
        max(spec.chunks())
        for spec in arch.specs
        if isinstance(spec, SpanSpec) and spec.eval == "span" and spec.retrieves
    }


def _same_continuation(folder: Path, theirs: Any, ours: LanguageModel) -> None:
    """Compare greedy continuations of a random prompt. Raises NotTheSame if a token differs."""
    length = max(7, max(_span_chunks(ours.arch), default=0) - NEW_TOKENS // 2)
    prompt_BL = torch.randint(ours.arch.model.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    expected: Tensor = generate(ours, prompt_BL, NEW_TOKENS, temperature=0, seed=0)
    generated_BL = theirs.generate(
        prompt_BL, attention_mask=torch.ones_like(prompt_BL), max_new_tokens=NEW_TOKENS, do_sample=False,
        eos_token_id=None, pad_token_id=0, use_cache=not _has_floors(ours.arch) and not takes_former_cache(theirs),
    )  # fmt: skip
    continuation: Sequence[int] = generated_BL[0, prompt_BL.shape[1] :].tolist()
    if continuation != expected[0].tolist():
        raise NotTheSame(f"{folder} continues with {continuation}, not {expected[0].tolist()}")


def _has_floors(arch: Architecture) -> bool:
    """Return True if a Mamba-2 layer clamps its step sizes to a minimum.

    transformers ignores the minimum if it generates with a cache. So the proof generates without a cache.
    """
    return any(isinstance(spec, Mamba2Spec) and spec.dt_floor > 0 for spec in arch.specs)


def takes_former_cache(theirs: Any) -> bool:
    """Return True if a class takes its cache by a name that the installed transformers no longer uses.

    transformers 5.24 renamed the argument `past_key_values` to `cache`. The custom class that hybridtron 0.1.0 shipped
    has the old name. Its logits are right, but `generate` does not pass the cached state to it, and so continues as if
    the prompt were empty.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPast

    is_renamed = "cache" in {field.name for field in dataclasses.fields(BaseModelOutputWithPast)}
    parameters = inspect.signature(theirs.forward).parameters
    return is_renamed and "past_key_values" in parameters and "cache" not in parameters


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings and progress bars from transformers within a `with` body."""
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
