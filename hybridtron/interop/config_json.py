"""Reads and validates the config.json of an untrusted folder, for imports.

The file's size is limited. Each value that an import uses is checked for its type and range, so that later code need
not check types. All numbers have upper limits, so that a hostile file can't cause an unlimited allocation.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hybridtron.nested import NotParsed, json_of
from hybridtron.problems import Unusable
from hybridtron.safe_open import Unreadable, read_regular, require_regular

MAX_JSON_BYTES = 2**24  # largest JSON file that this package parses itself
MAX_OTHER_JSON_BYTES = 2**28  # largest JSON file that transformers may parse
MAX_LAYERS = 10_000
TEXT_CONFIG = "text_config"
MAX_COUNT = 2**28  # largest size, such as a width or a number of heads


class CannotImport(Unusable):
    """Raised for a folder that can't be imported as a model; the message gives the reason."""


class Kind(NamedTuple):
    """A requirement on a value.

    words: a description of allowed values, for error messages
    fits: a predicate that returns True for allowed values
    """

    words: str
    fits: Callable[[Any], bool]

    def or_null(self) -> Kind:
        """Return the requirement that also allows null."""
        return Kind(f"{self.words} or null", lambda value: value is None or self.fits(value))


def _whole(low: int, high: int) -> Kind:
    words = f"a whole number from {low} to {high}"
    return Kind(words, lambda value: type(value) is int and low <= value <= high)


def _numbers_to(high: float) -> Callable[[Any], bool]:
    # the value is not converted to float: an integer may be too large for a float
    return lambda value: type(value) in (int, float) and 0 < value <= high


COUNT = _whole(1, MAX_COUNT)
COUNT_OR_NONE = _whole(0, MAX_COUNT)
LAYERS = _whole(1, MAX_LAYERS)
NUMBER = Kind("a number above 0", _numbers_to(1e12))
TEXT = Kind("a text", lambda value: isinstance(value, str))
TRUTH = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
TEXTS = Kind("a list of texts", lambda value: isinstance(value, list) and all(map(TEXT.fits, value)))
LAYER_INDICES = Kind(
    "a list of layers", lambda value: isinstance(value, list) and all(map(_whole(0, MAX_LAYERS).fits, value))
)
NUMBERS = Kind("a list of numbers above 0", lambda value: isinstance(value, list) and all(map(NUMBER.fits, value)))
COUNT_OR_AUTO = Kind('a number from 1 on or "auto"', lambda value: value == "auto" or COUNT.fits(value))


def _all(kind: Kind, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


def _of_rope(kind: Kind, names: str) -> dict[str, Kind]:
    return {f"{section}.{name}": kind for section in ("rope_parameters", "rope_scaling") for name in names.split()}


# key of config.json -> requirement on its value; `SECTION.KEY` is a key inside the object SECTION
KINDS: dict[str, Kind] = {
    **_all(COUNT, "hidden_size vocab_size state_size expand conv_kernel time_step_rank num_heads n_groups"),
    **_all(COUNT, "num_attention_heads intermediate_size shared_intermediate_size d_model pad_vocab_size_multiple"),
    **_all(COUNT, "mamba_d_state mamba_expand mamba_n_groups mamba_d_conv mamba_n_heads n_mamba_heads"),
    **_all(COUNT, "attn_cfg.num_heads ssm_cfg.d_state ssm_cfg.d_conv ssm_cfg.expand ssm_cfg.headdim ssm_cfg.ngroups"),
    **_all(COUNT, "ssm_state_size mamba_num_heads mamba_head_dim attention_head_dim"),
    **_all(COUNT.or_null(), "num_key_value_heads head_dim sliding_window max_position_embeddings"),
    **_all(COUNT.or_null(), "attn_cfg.num_heads_kv attn_cfg.head_dim"),
    **_all(COUNT_OR_NONE, "num_local_experts attn_cfg.rotary_emb_dim attn_cfg.d_conv"),
    **_all(COUNT_OR_NONE.or_null(), "d_intermediate"),
    **_all(LAYERS, "num_hidden_layers n_layer"),
    **_all(COUNT_OR_AUTO, "ssm_cfg.dt_rank mamba_d_head"),
    **_all(NUMBER, "layer_norm_epsilon rms_norm_eps attn_cfg.rotary_emb_base rope_parameters.partial_rotary_factor"),
    **_all(NUMBER.or_null(), "rope_theta partial_rotary_factor"),
    **_of_rope(NUMBER.or_null(), "rope_theta factor low_freq_factor high_freq_factor beta_fast beta_slow"),
    **_of_rope(NUMBER.or_null(), "attention_factor mscale mscale_all_dim"),
    **_of_rope(COUNT.or_null(), "original_max_position_embeddings"),
    **_of_rope(TEXT, "rope_type type"),
    **_of_rope(TRUTH, "truncate"),
    **_all(COUNT.or_null(), "original_max_position_embeddings"),
    **_all(COUNT, "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"),
    **_all(COUNT, "linear_conv_kernel_dim full_attention_interval"),
    **_all(COUNT_OR_NONE, "num_experts num_experts_per_tok"),
    **_all(COUNT_OR_NONE.or_null(), "n_shared_experts"),
    **_all(COUNT.or_null(), "moe_latent_size"),
    **_all(COUNT, "n_routed_experts moe_intermediate_size moe_shared_expert_intermediate_size"),
    **_all(COUNT, "shared_expert_intermediate_size decoder_sparse_step"),
    **_all(COUNT, "n_group topk_group"),
    **_all(NUMBER, "routed_scaling_factor"),
    **_all(TRUTH, "norm_topk_prob"),
    **_all(COUNT, "attn_layer_period expert_layer_period"),
    **_all(COUNT_OR_NONE, "attn_layer_offset expert_layer_offset"),
    **_all(COUNT_OR_AUTO, "mamba_dt_rank"),
    **_all(NUMBER, "mixer_rms_eps"),
    **_all(NUMBER, "initializer_range embedding_multiplier residual_multiplier attention_multiplier logits_scaling"),
    **_all(NUMBER, "time_step_min"),
    **_all(NUMBER, "lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier"),
    **_all(NUMBER, "ssm_in_multiplier ssm_out_multiplier"),
    **_all(NUMBERS.or_null(), "ssm_multipliers mlp_multipliers"),
    **_all(TRUTH, "mamba_rms_norm mamba_norm_before_gate"),
    **_all(COUNT.or_null(), "mamba_d_ssm"),
    **_all(COUNT, "mamba_ngroups num_mem_blocks adapter_rank"),
    **_all(TRUTH, "use_mem_rope use_shared_attention_adapter"),
    **_all(TRUTH, "tie_word_embeddings tie_embeddings rms_norm residual_in_fp32 linear_allow_neg_eigval"),
    **_all(TEXT, "model_type pattern hybrid_override_pattern ssm_cfg.layer"),
    **_all(TEXTS, "architectures"),
    **_all(TEXTS.or_null(), "layers_block_type layer_types"),
    **_all(OBJECT, "layers"),
    **_all(OBJECT.or_null(), "ssm_cfg attn_cfg rope_parameters rope_scaling"),
    **_all(LAYER_INDICES.or_null(), "attn_layer_idx attn_layer_indices mlp_only_layers"),
}


def settings_of(folder: Path) -> dict[str, Any]:
    """Read config.json and check the values that imports use.

    Raises CannotImport, which lists all values of the wrong type or range. Also raises CannotImport if the weights are
    quantized, or if the folder has an adapter instead of a model.
    """
    path = folder / "config.json"
    if not path.exists() and (adapter := folder / "adapter_config.json").exists():
        raise CannotImport(
            f"{adapter} belongs to an adapter: give the folder of the adapter's base model instead", code="unreadable"
        )
    settings = _with_text_settings(path, read_object(path))
    if settings.get("quantization_config"):
        raise CannotImport(
            f"{path} has a quantization_config; only weights that are not quantized can be imported", code="unsupported"
        )
    if faults := list(_faults(settings)):
        raise CannotImport("\n".join(f"{path} {fault}" for fault in faults), code="malformed")
    return settings


def _with_text_settings(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the language model, which are partly under `text_config` beside a vision model's.

    Raises CannotImport if `text_config` is no object, or disagrees with the other settings on tied embeddings.
    """
    text = settings.get(TEXT_CONFIG)
    if text is None:
        return settings
    if not isinstance(text, dict):
        raise CannotImport(f"{path} has {TEXT_CONFIG}={reprlib.repr(text)}, must be an object", code="malformed")
    tied = settings.get("tie_word_embeddings", False)
    if text.get("tie_word_embeddings", tied) != tied:
        raise CannotImport(
            f"{path} has tie_word_embeddings={tied!r}, but {not tied!r} in {TEXT_CONFIG}: correct one of them",
            code="conflict",
        )
    text_settings = {key: value for key, value in text.items() if key not in ("architectures", "model_type")}
    return {key: value for key, value in settings.items() if key != TEXT_CONFIG} | text_settings


def require_files(folder: Path) -> None:
    """Raise CannotImport if a folder has a pipe, a device or a huge JSON file.

    transformers may open any file in the folder. Reading a pipe or a device can block, and parsing a huge JSON file can
    exhaust the memory.
    """
    for path in sorted(folder.iterdir()):
        if path.is_dir() or not path.exists():
            continue
        try:
            require_regular(path)
        except Unreadable as error:
            raise CannotImport(f"{path} can't be read: {error}", code="unreadable") from error
        size = path.stat().st_size
        if path.suffix == ".json" and size > MAX_OTHER_JSON_BYTES:
            raise CannotImport(
                f"{path} has {size:,} bytes, must have at most {MAX_OTHER_JSON_BYTES:,}", code="out-of-range"
            )


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CannotImport if the file is unreadable or contains no object."""
    try:
        content = json_of(read_regular(path, MAX_JSON_BYTES).decode())
    except NotParsed as error:
        raise CannotImport(f"{path} can't be read: the file {error}", code="unreadable") from error
    except (OSError, ValueError) as error:
        raise CannotImport(f"{path} can't be read: {error}", code="unreadable") from error
    if not isinstance(content, dict):
        raise CannotImport(f"{path} contains {reprlib.repr(content)}, must contain a JSON object", code="malformed")
    return content


def _faults(settings: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each value that does not satisfy its requirement. Missing keys are allowed."""
    for key, kind in KINDS.items():
        section, _, name = key.rpartition(".")
        if section:
            section_values = settings.get(section)
        else:
            section_values = settings
        if isinstance(section_values, dict) and name in section_values and not kind.fits(section_values[name]):
            yield f"{key} is {reprlib.repr(section_values[name])}, must be {kind.words}"
    layers = settings.get("layers")
    pattern = settings.get("pattern")
    if not isinstance(layers, dict) or not isinstance(pattern, str):
        return
    for letter, options in layers.items():
        if len(letter) != 1 or not isinstance(options, dict):
            yield f"layers.{reprlib.repr(letter)} is {reprlib.repr(options)}, must be one letter and an object"
    if not 0 < len(pattern) <= MAX_LAYERS or set(pattern) - set(layers):
        yield f"pattern is {reprlib.repr(pattern)}, must be 1 to {MAX_LAYERS} letters of layers"
