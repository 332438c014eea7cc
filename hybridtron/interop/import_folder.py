"""Imports a model folder, written by transformers or by state-spaces/mamba, as a checkpoint.

A run can start from the weights in the checkpoint OUTPUT:

    hybridtron train model=from_checkpoint run.weights=OUTPUT ...

Before tensors are converted, their names and shapes are compared with the model that config.json describes. All faults
are reported together: missing tensors, wrong shapes, and tensors that the model does not have. The checkpoint has step
0 and no optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import Architecture, architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.files import appearing, in_parts
from hybridtron.checkpoint.manifest import Meta
from hybridtron.checkpoint.rewrite import write_whole
from hybridtron.config.choices import Precision
from hybridtron.config.choices import Source as DataSource
from hybridtron.config.load import to_yaml
from hybridtron.config.schema import Config, DataConfig, PrecisionConfig, RunConfig
from hybridtron.data.folder import MAX_TOKENIZER_BYTES
from hybridtron.data.prepare.chat import ChatTemplate
from hybridtron.data.prepare.documents import ArgumentError
from hybridtron.data.prepare.vocabulary import chat_template_of
from hybridtron.data.tokenizer_file import BadTokenizer, read_tokenizer
from hybridtron.interop.config_json import CannotImport, require_files, settings_of
from hybridtron.interop.export import MAX_POSITIONS_KEY, TARGETS, names_of
from hybridtron.interop.native import ModelFormat
from hybridtron.interop.original import Original
from hybridtron.interop.reader import Weights
from hybridtron.interop.rules import TensorRule, ours_of, remembering, together
from hybridtron.interop.tokenizer import CHAT
from hybridtron.problems import Code, Unusable
from hybridtron.safe_open import Unreadable, read_regular

MAX_LISTED = 40  # number of faults that a message lists
PART_BYTES = 2**26  # bytes per tensor file; two files' tensors are in memory, since one is read while one is written


def listed(faults: Sequence[str]) -> str:
    """Return faults as indented lines, at most MAX_LISTED of them, for the end of a message."""
    lines = list(faults[:MAX_LISTED])
    if len(faults) > MAX_LISTED:
        lines.append(f"and {len(faults) - MAX_LISTED} more")
    return "".join(f"\n  {line}" for line in lines)


@dataclass(frozen=True)
class ImportFolder:
    """A validated model folder, opened for import.

    kind      the folder's format: a class of transformers, or state-spaces/mamba
    settings  the content of the folder's config.json
    arch      the architecture that these settings describe
    rules     the conversion rule for each tensor
    weights   a reader for the folder's tensors
    """

    kind: ModelFormat
    settings: dict[str, Any]
    arch: Architecture
    rules: list[TensorRule]
    weights: Weights

    @property
    def model(self) -> ModelConfig:
        return self.arch.model

    @classmethod
    def open(cls, folder: Path) -> ImportFolder:
        """Open a folder, and check config.json and the tensors' names and shapes.

        Raises CannotImport, with all faults, if the folder can't be imported.
        """
        settings = settings_of(folder)
        require_files(folder)
        kind = _kind(folder, settings)
        try:
            arch = architecture(kind.model(settings))
            kind.rules(arch)
        except (KeyError, ValueError) as error:
            code: Code
            if isinstance(error, KeyError):
                reason = f"has no {error}"
                code = "missing"
            else:
                reason = str(error)
                code = "unsupported"
                if isinstance(error, Unusable):
                    code = error.code
            raise CannotImport(f"{folder / 'config.json'} {reason}", code=code) from error
        weights = Weights(folder)
        imported = cls(kind, settings, arch, kind.rules_for(arch, weights.shapes.keys()), weights)
        imported.require_fitting("config.json")
        if not (folder / "tokenizer.json").exists():
            raise CannotImport(
                f"{folder} has no tokenizer.json, which a checkpoint needs: copy the model's tokenizer.json there",
                code="no-file",
            )
        return imported

    def require_fitting(self, described_by: str) -> None:
        """Raise CannotImport, with all faults, if the tensors do not fit the model. `described_by` describes it."""
        faults = list(self._faults())
        if not faults:
            return
        raise CannotImport(
            f"the tensors in {self.weights.folder} do not fit its {described_by}:{listed(faults)}", code="mismatch"
        )

    def _faults(self) -> Iterator[str]:
        """Yield a message for each tensor that is missing, unknown, or has a wrong shape."""
        wanted_shapes = {rule.theirs: rule.shape for rule in self.rules}
        stored_shapes = {name: shape for name, shape in self.weights.shapes.items() if not self._drops(name)}
        if self.model.tie_embeddings and "lm_head.weight" in stored_shapes:  # some files also store the tied head
            del stored_shapes["lm_head.weight"]
            embedding = next(rule.theirs for rule in self.rules if rule.ours == ("embedding.weight",))
            if not torch.equal(self.weights.read("lm_head.weight"), self.weights.read(embedding)):
                yield f"lm_head.weight differs from {embedding}, though config.json ties them"
        yield from (f"{name} is missing" for name in sorted(wanted_shapes.keys() - stored_shapes.keys()))
        yield from (
            f"{name} is not a tensor of the model" for name in sorted(stored_shapes.keys() - wanted_shapes.keys())
        )
        for name in sorted(wanted_shapes.keys() & stored_shapes.keys()):
            if wanted_shapes[name] != stored_shapes[name]:
                yield f"{name} has shape {stored_shapes[name]}, must have {wanted_shapes[name]}"

    def _drops(self, name: str) -> bool:
        return name.startswith(tuple(self.kind.dropped))

    @property
    def dropped(self) -> list[str]:
        """Descriptions of the parts of the folder's model that are not imported."""
        names = self.weights.shapes
        return [words for start, words in self.kind.dropped.items() if any(name.startswith(start) for name in names)]

    def config(self, name: str) -> Config:
        """Build the configuration to store in the checkpoint.

        The data path is "unknown" and there are no phases, because an imported folder does not say how its model was
        trained. The precision is bf16 if the first tensor is bf16, else fp32.
        """
        is_bf16 = self.weights.read(self.rules[0].theirs).dtype == torch.bfloat16
        return Config(
            model=self.model,
            data=DataConfig(source=DataSource.folder, path="unknown"),
            precision=PrecisionConfig(Precision.bf16 if is_bf16 else Precision.fp32),
            run=RunConfig(name=name),
            phases=[],
        )

    def tensors(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (file name, {key: tensor}) for each tensor file to write.

        A file's tensors are read and converted only when the iterator reaches the file.
        """
        for number, part in enumerate(in_parts(together(self.rules), _bytes_of, PART_BYTES)):
            converted = (ours_of(rules, self.weights.read) for rules in part)
            yield (
                f"model-{number:05}.safetensors",
                {key: tensor.contiguous() for ours in converted for key, tensor in ours.items()},
            )


def _bytes_of(rules: list[TensorRule]) -> int:
    """Return the size in bytes of the rules' tensors in fp32."""
    return sum(4 * math.prod(rule.shape) for rule in rules)


def _kind(folder: Path, settings: dict[str, Any]) -> ModelFormat:
    """Return the format of a folder: the class that config.json names, or the format of state-spaces/mamba.

    state-spaces/mamba writes no class. Its config.json is recognized by the keys d_model and n_layer.
    """
    if "d_model" in settings and "n_layer" in settings:
        return Original()
    formats = {name: target for target in TARGETS for name in names_of(target)}
    names = settings.get("architectures") or [settings.get("model_type")]
    if names[0] not in formats:
        known = ", ".join([*formats, Original.name])
        raise CannotImport(
            f"{folder / 'config.json'} names the class {names[0]}; importable are {known}", code="unsupported"
        )
    return formats[names[0]]


def take_over(source: ImportFolder, folder: Path, output: Path, prove: Callable[[Checkpoint], None]) -> None:
    """Write a temporary checkpoint, call `prove` with the checkpoint, and rename its folder to `output`.

    The tokenizer and the chat template are read from `folder`. Raises CannotImport if one of them can't be read.
    """
    small_files = {
        "config.yaml": to_yaml(source.config(output.name)).encode(),
        "tokenizer.json": tokenizer_bytes(folder),
    }
    setting_names = {"eos": "eos_token_id", MAX_POSITIONS_KEY: MAX_POSITIONS_KEY}
    data = {
        ours: str(value) for ours, key in setting_names.items() if isinstance(value := source.settings.get(key), int)
    }
    if (chat := _chat_template(folder)) is not None:
        data[CHAT] = chat.stored()
    meta = Meta(0, 0, data, f"imported from {source.kind.name}", torch.__version__)
    with appearing(output) as temporary:
        write_whole(temporary, meta, small_files, source.tensors())
        prove(Checkpoint.open(temporary))


def tokenizer_bytes(folder: Path) -> bytes:
    """Return the content of a folder's tokenizer.json. Raises CannotImport if it can't be read as a tokenizer."""
    path = folder / "tokenizer.json"
    try:
        stored = read_regular(path, MAX_TOKENIZER_BYTES)
        read_tokenizer(stored)
    except (Unreadable, BadTokenizer) as error:
        raise CannotImport(f"{path} can't be read: {error}", code="unreadable") from error
    return stored


def _chat_template(folder: Path) -> ChatTemplate | None:
    try:
        template = chat_template_of(folder)
    except ArgumentError as error:
        raise CannotImport(str(error).removeprefix("--tokenizer: "), code=error.code) from error
    if template is not None and (fault := template.fault()) is not None:
        cure = "correct it, or remove the file chat_template.jinja and the key chat_template in tokenizer_config.json"
        raise CannotImport(f"the chat template of {folder} {fault}; {cure}", code="malformed")
    return template


def same_tensors(source: ImportFolder, checkpoint: Checkpoint) -> None:
    """Convert the checkpoint's tensors back, and compare them with the tensors in the folder.

    Raises CannotImport if a tensor is not equal bit for bit. Exception: in a format that subtracts 1 from norm weights
    (`less_one`), these weights may differ by fp32 rounding.
    """
    read = remembering(checkpoint.whole)
    for rule in source.rules:
        theirs = source.weights.read(rule.theirs)
        if not rule.same(rule.to_theirs(read), theirs):
            raise CannotImport(
                f"{rule.theirs}, converted back from the checkpoint, differs from the imported tensor", code="changed"
            )
