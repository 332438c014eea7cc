"""Exports a checkpoint as a folder that `transformers.from_pretrained` loads.

    config.json, generation_config.json, tokenizer.json, tokenizer_config.json, README.md
    chat_template.jinja              if the model was trained on conversations
    model.safetensors                or shards with an index
    *_hybridtron.py                  code of the custom class, if the model is exported as that class
    hybridtron_export.json           the source checkpoint, and the versions that wrote the folder

A single process reads the checkpoint, which any layout may have written, and converts one tensor at a time. The folder
appears atomically, after a proof that it computes the same logits.
"""

from __future__ import annotations

import platform
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hybridtron.architecture.model import ModelConfig
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.files import appearing
from hybridtron.checkpoint.manifest import FILE, GREATEST
from hybridtron.config.choices import Export as Wanted
from hybridtron.config.exportable import RECORD, CannotExport, export_class
from hybridtron.interop.card import SHARED_PAD, card
from hybridtron.interop.config_json import CannotImport
from hybridtron.interop.custom import Custom
from hybridtron.interop.native import Native, NativeMamba, NativeMamba2
from hybridtron.interop.native_bamba import Bamba
from hybridtron.interop.native_delta import OlmoHybrid, Qwen3Next
from hybridtron.interop.native_falcon import FalconH1
from hybridtron.interop.native_granite import Granite, GraniteHybrid
from hybridtron.interop.native_nemotron import NemotronH
from hybridtron.interop.native_pairs import Llama, Mistral
from hybridtron.interop.native_zamba2 import Zamba2
from hybridtron.interop.tokenizer import CHAT, SpecialTokens, write_tokenizer
from hybridtron.interop.writer import Planned, write_json, write_weights
from hybridtron.regular_files import read_regular
from hybridtron.requirements import is_there
from hybridtron.storage.digest import digest_of

NATIVES: tuple[Native, ...] = (
    NativeMamba(),
    NativeMamba2(),
    Llama(),
    Mistral(),
    Granite(),
    GraniteHybrid(),
    Bamba(),
    OlmoHybrid(),
    Qwen3Next(),
    NemotronH(),
    Zamba2(),
    FalconH1(),
)
CUSTOM = Custom()
TARGETS = (*NATIVES, CUSTOM)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LONGEST = "max_position_embeddings"
UNKNOWN_LENGTH = 2048  # transformers' default if config.json has no max_position_embeddings
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ExportPlan:
    """An export's source, target class, dtype and shard size; names and shapes are known before a tensor is read."""

    source: Checkpoint
    target: Native
    dtype: torch.dtype | None  # None: each tensor keeps the checkpoint's dtype
    shard_bytes: int

    def tensors(self) -> list[Planned]:
        """List the tensors to write. The fp32 islands (A_log, D, the bias of dt) stay in fp32 for every `dtype`."""
        planned = []
        for rule in self.target.rules(self.source.config.model):
            dtype = self.dtype or self.source.dtype(rule.ours[0])
            planned.append(Planned(rule, torch.float32 if rule.fp32 else dtype))
        return planned

    def write(self, folder: Path, progress: Progress) -> SpecialTokens:
        """Write all files into a folder, without proving them. Raises CannotExport if the checkpoint lacks a weight."""
        config = self.source.config
        tensors = self.tensors()
        if missing := sorted({key for t in tensors for key in t.rule.ours} - self.source.shapes.keys()):
            raise CannotExport(f"{self.source.folder} holds no {missing[0]}: it is not of the model in its config.yaml")
        write_weights(folder, tensors, self.shard_bytes, lambda rule: rule.to_theirs(self.source.whole), progress)
        dtype_name = str(max({t.dtype for t in tensors if not t.rule.fp32}, key=str)).removeprefix("torch.")
        length = longest_row(self.source)
        tokenizer = self.source.verified("tokenizer.json")
        chat = self.source.meta.data.get(CHAT)
        special = write_tokenizer(folder, tokenizer, self._eos(), config.model.vocab_size, length, chat)
        tokens = special.settings()
        types = {"dtype": dtype_name, "torch_dtype": dtype_name}
        write_json(folder / "config.json", {**self.target.config(config.model, length), **types, **tokens})
        write_json(folder / "generation_config.json", {"_from_model_config": True, **tokens})
        for name, code in self.target.files().items():
            (folder / name).write_bytes(code)
        (folder / "README.md").write_text(card(config, self.target, special), encoding="utf-8")
        write_json(folder / RECORD, self._record(dtype_name))
        return special

    def _eos(self) -> int | None:
        stored = self.source.meta.data.get("eos")
        if stored is None:
            return None
        return int(stored)

    def _record(self, dtype: str) -> dict[str, object]:
        names = [name for name in ("torch", "transformers", "safetensors") if is_there(name)]
        return {
            "checkpoint": str(self.source.folder.resolve()),
            "manifest": digest_of(read_regular(self.source.folder / FILE, GREATEST)),
            "step": self.source.meta.step,
            "target": self.target.name,
            "dtype": dtype,
            "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        }


def longest_row(source: Checkpoint) -> int:
    """Return the training phases' longest `seq_len`; for an imported model, the length its config.json gave."""
    lengths = [phase.seq_len for phase in source.config.phases]
    return max(lengths, default=int(source.meta.data.get(LONGEST, UNKNOWN_LENGTH)))


def target_of(model: ModelConfig, wanted: Wanted) -> Native:
    """Return the class that computes exactly this model: a native one, or the custom class.

    Raises CannotExport if the `wanted` kind of class does not fit the model.
    """
    name = export_class(model, wanted)
    return next(target for target in TARGETS if target.name == name)


def class_of(folder: Path, settings: Mapping[str, Any]) -> Native:
    """Return the class that a folder's config.json names first in `architectures`.

    Raises CannotImport if the class is not known, or if config.json has another class's model_type.
    """
    path = folder / "config.json"
    names = settings.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    target = next((target for target in TARGETS if target.name == name), None)
    if target is None:
        known = ", ".join(target.name for target in TARGETS)
        raise CannotImport(f"{path} has architectures={reprlib.repr(names)}, must begin with one of {known}")
    if (model_type := settings.get("model_type")) != target.model_type:
        raise CannotImport(f"{path} has model_type={reprlib.repr(model_type)}, must be {target.model_type} for {name}")
    return target


def dtype_of(folder: Path, settings: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that config.json names, fp32 if none. Raises CannotImport if it is not known."""
    key = "dtype" if "dtype" in settings else "torch_dtype"  # the latter was written before transformers 5
    name = settings.get(key) or "float32"
    if not isinstance(name, str) or name not in DTYPES:
        path = folder / "config.json"
        raise CannotImport(f"{path} has {key}={reprlib.repr(name)}, must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def export(output: Path, plan: ExportPlan, prove: Callable[[Path], None], progress: Progress) -> list[str]:
    """Write a temporary folder, prove it, and then rename it to `output`. Returns warnings for the export's users."""
    with appearing(output) as temporary:
        special = plan.write(temporary, progress)
        prove(temporary)
    return [SHARED_PAD] if special.shared else []
