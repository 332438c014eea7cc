"""Exports a checkpoint as a folder that `from_pretrained` of Hugging Face transformers loads.

    config.json, generation_config.json, tokenizer.json, tokenizer_config.json, README.md
    chat_template.jinja              only if the checkpoint has a chat template
    model.safetensors                or several shards with an index
    *_hybridtron.py                  the custom class's code, if no class of transformers fits the model
    hybridtron_export.json           the source checkpoint, and the package versions that wrote the folder

A single process reads the checkpoint and converts one tensor at a time. The folder is written under a temporary name.
Then a proof compares the logits: transformers loads the folder, and its model must compute the same logits as ours.
After the proof the folder is renamed to its final name.
"""

from __future__ import annotations

import platform
import reprlib
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hybridtron import __version__
from hybridtron.architecture.table import Architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.files import appearing
from hybridtron.checkpoint.manifest import FILE, MAX_MANIFEST_BYTES
from hybridtron.config.choices import Export as Wanted
from hybridtron.config.export_class import RECORD, CannotExport, export_class, required_class
from hybridtron.interop.card import SHARED_PAD, card
from hybridtron.interop.config_json import CannotImport
from hybridtron.interop.custom import Custom
from hybridtron.interop.native import Native, NativeMamba, NativeMamba2
from hybridtron.interop.native_bamba import Bamba
from hybridtron.interop.native_delta import OlmoHybrid, Qwen3Next, Qwen35, Qwen35Moe
from hybridtron.interop.native_falcon import FalconH1
from hybridtron.interop.native_granite import Granite, GraniteHybrid
from hybridtron.interop.native_jamba import FalconMamba, Jamba
from hybridtron.interop.native_nemotron import NemotronH
from hybridtron.interop.native_pairs import Llama, Mistral
from hybridtron.interop.native_zamba2 import Zamba2
from hybridtron.interop.rules import remembering
from hybridtron.interop.tokenizer import CHAT, SpecialTokens, write_tokenizer
from hybridtron.interop.writer import Planned, write_json, write_weights
from hybridtron.requirements import PROJECT, is_checkout, is_there
from hybridtron.safe_open import read_regular
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
    Qwen35(),
    Qwen3Next(),
    Qwen35Moe(),
    NemotronH(),
    Zamba2(),
    FalconH1(),
    FalconMamba(),
    Jamba(),
)
CUSTOM = Custom()
TARGETS = (*NATIVES, CUSTOM)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_POSITIONS_KEY = "max_position_embeddings"
UNKNOWN_LENGTH = 2048  # the default of transformers if config.json has no max_position_embeddings
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ExportPlan:
    """An export's source checkpoint, target class, dtype and largest shard size in bytes."""

    source: Checkpoint
    target: Native
    dtype: torch.dtype | None  # None: each tensor keeps the checkpoint's dtype
    shard_bytes: int
    averaged: bool = False  # True if `source` reads the weights' moving average in place of the weights

    def tensors(self) -> list[Planned]:
        """Return the tensors to write.

        Weights that need fp32 precision (A_log, D, the bias of dt) are written in fp32, regardless of `dtype`.
        """
        planned = []
        for rule in self.target.rules(self.source.plan.arch):
            dtype = self.dtype or self.source.dtype(rule.ours[0])
            planned.append(Planned(rule, torch.float32 if rule.fp32 else dtype))
        return planned

    def write(self, folder: Path, progress: Progress) -> SpecialTokens:
        """Write all files into a folder, without a proof. Raises CannotExport if the checkpoint lacks a weight."""
        config = self.source.config
        tensors = self.tensors()
        if missing := sorted({key for t in tensors for key in t.rule.ours} - self.source.shapes.keys()):
            raise CannotExport(
                f"{self.source.folder} has no tensor {missing[0]}, which the model in its config.yaml needs",
                code="mismatch",
            )
        read = remembering(self.source.whole)
        write_weights(folder, tensors, self.shard_bytes, lambda rule: rule.to_theirs(read), progress)
        dtype_name = str(max({t.dtype for t in tensors if not t.rule.fp32}, key=str)).removeprefix("torch.")
        length = longest_row(self.source)
        tokenizer = self.source.verified("tokenizer.json")
        chat = self.source.meta.data.get(CHAT)
        special = write_tokenizer(folder, tokenizer, self._eos(), config.model.vocab_size, length, chat)
        tokens = special.settings()
        types = {"dtype": dtype_name, "torch_dtype": dtype_name}
        settings = {**self.target.config(self.source.plan.arch, length), **types, **tokens}
        write_json(folder / "config.json", settings)
        write_json(folder / "generation_config.json", {"_from_model_config": True, **tokens})
        for name, code in self.target.files().items():
            (folder / name).write_bytes(code)
        (folder / "README.md").write_text(card(self.source.plan, self.target, special, settings), encoding="utf-8")
        write_json(folder / RECORD, self._record(dtype_name))
        return special

    def _eos(self) -> int | None:
        stored = self.source.meta.data.get("eos")
        if stored is None:
            return None
        return int(stored)

    def _record(self, dtype: str) -> dict[str, object]:
        names = [name for name in ("torch", "transformers", "safetensors") if is_there(name)]
        record: dict[str, object] = {
            "checkpoint": str(self.source.folder.resolve()),
            "manifest": digest_of(read_regular(self.source.folder / FILE, MAX_MANIFEST_BYTES)),
            "step": self.source.meta.step,
            "target": self.target.name,
            "dtype": dtype,
            "versions": {"hybridtron": __version__, "python": platform.python_version()}
            | {name: version(name) for name in names},
        }
        if (loss := self.source.meta.validation) is not None:
            record["held_out_loss"] = loss
        if (commit := own_commit()) is not None:
            record["commit"] = commit
        if self.averaged:
            record["weights"] = "moving average"
        return record


def own_commit() -> str | None:
    """Return the commit of the checkout with this package's code, or None without a checkout or without git."""
    if not is_checkout():
        return None
    command = ["git", "-C", str(PROJECT.parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def longest_row(source: Checkpoint) -> int:
    """Return the longest `seq_len` in the training phases.

    An imported model has no phases. For such a model, return `max_position_embeddings` from the imported config.json,
    or UNKNOWN_LENGTH if this key was missing.
    """
    lengths = [phase.seq_len for phase in source.config.phases]
    return max(lengths, default=int(source.meta.data.get(MAX_POSITIONS_KEY, UNKNOWN_LENGTH)))


def target_of(arch: Architecture, wanted: Wanted, required: str | None = None) -> Native:
    """Return the class for a model's export: a class of transformers (native), or the custom class.

    `required` names a class of transformers, for a model that fits several. Raises CannotExport if the wanted class
    does not compute exactly this model.
    """
    name = export_class(arch, wanted) if required is None else required_class(arch, required)
    return next(target for target in TARGETS if target.name == name)


def class_of(folder: Path, settings: Mapping[str, Any]) -> Native:
    """Return the class that a folder's config.json names first under the key `architectures`.

    Raises CannotImport if the class is unknown, or if `model_type` in config.json belongs to another class.
    """
    path = folder / "config.json"
    names = settings.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    target = next((target for target in TARGETS if isinstance(name, str) and name in names_of(target)), None)
    if target is None or not isinstance(name, str):
        classes = ", ".join(target.name for target in TARGETS)
        raise CannotImport(
            f"{path} has architectures={reprlib.repr(names)}; the first must be one of {classes}", code="unsupported"
        )
    expected = names_of(target)[name]
    if (model_type := settings.get("model_type")) != expected:
        raise CannotImport(
            f"{path} has model_type={reprlib.repr(model_type)}, must be {expected} for {name}", code="conflict"
        )
    return target


def names_of(target: Native) -> dict[str, str]:
    """Return name -> `model_type` for a class, and for its wrapper: the class that adds a vision model."""
    if target.wrapper is None:
        return {target.name: target.model_type}
    return {target.name: target.model_type, target.wrapper.name: target.wrapper.model_type}


def dtype_of(folder: Path, settings: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype in config.json, or fp32 if there is none. Raises CannotImport for an unknown dtype."""
    key = "dtype" if "dtype" in settings else "torch_dtype"  # transformers before version 5 wrote torch_dtype
    name = settings.get(key) or "float32"
    if not isinstance(name, str) or name not in DTYPES:
        path = folder / "config.json"
        raise CannotImport(
            f"{path} has {key}={reprlib.repr(name)}, must be one of {', '.join(DTYPES)}", code="unsupported"
        )
    return DTYPES[name]


def export(output: Path, plan: ExportPlan, prove: Callable[[Path], None], progress: Progress) -> list[str]:
    """Write a temporary folder, call `prove` with its path, and rename the folder to `output`.

    `prove` raises an error if the folder's model does not compute the same as the checkpoint's model. Then the folder
    is removed. Returns warnings for users of the export.
    """
    with appearing(output) as temporary:
        special = plan.write(temporary, progress)
        prove(temporary)
    return [SHARED_PAD] if special.shared else []
