"""Imports a folder of transformers or state-spaces/mamba as a checkpoint from which a run can start.

    hybridtron train model=from_checkpoint run.weights=OUTPUT ...

The tensors' names and shapes are compared with the configuration before any is read, and all faults are reported
together: missing tensors, wrong shapes, tensors that no rule uses. The result is an ordinary checkpoint of step 0
without optimizer state, which any layout can load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtron.architecture.model import ModelConfig
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.files import appearing, in_parts
from hybridtron.checkpoint.manifest import Meta
from hybridtron.checkpoint.rewrite import write_whole
from hybridtron.config.check import model_problems
from hybridtron.config.choices import Precision
from hybridtron.config.choices import Source as DataSource
from hybridtron.config.load import to_yaml
from hybridtron.config.schema import Config, DataConfig, PrecisionConfig, RunConfig
from hybridtron.data.folder import LARGEST_TOKENIZER
from hybridtron.data.prepare.chat import ChatTemplate
from hybridtron.data.prepare.documents import ArgumentError
from hybridtron.data.prepare.vocabulary import chat_template_of
from hybridtron.data.tokenizer_file import BadTokenizer, read_tokenizer
from hybridtron.interop.config_json import CannotImport, require_files, settings_of
from hybridtron.interop.export import LONGEST, TARGETS
from hybridtron.interop.native import ModelFormat
from hybridtron.interop.original import Original
from hybridtron.interop.reader import Weights
from hybridtron.interop.rules import TensorRule
from hybridtron.interop.tokenizer import CHAT
from hybridtron.problems import ConfigError
from hybridtron.regular_files import Unreadable, read_regular

SHOWN = 40  # number of faults that a message lists
PART_BYTES = 2**26  # per file; two of these are in memory, as one is written while the next is read


@dataclass(frozen=True)
class ImportFolder:
    """A validated folder: its format, its settings, the model in our configuration, the rules and the tensors."""

    kind: ModelFormat
    settings: dict[str, Any]
    model: ModelConfig
    rules: list[TensorRule]
    weights: Weights

    @classmethod
    def open(cls, folder: Path) -> ImportFolder:
        """Read the configuration and check names and shapes. Raises CannotImport, listing all faults."""
        settings = settings_of(folder)
        require_files(folder)
        kind = _kind(folder, settings)
        try:
            model = kind.model(settings)
            if problems := list(model_problems(model)):
                raise ConfigError(problems)
            weights = Weights(folder)
            rules = [rule.as_named(weights.shapes) for rule in kind.rules(model)]
        except (KeyError, ValueError) as error:
            if isinstance(error, KeyError):
                reason = f"has no {error}"
            else:
                reason = str(error)
            raise CannotImport(f"{folder / 'config.json'} {reason}") from error
        imported = cls(kind, settings, model, rules, weights)
        if faults := list(imported._faults()):
            if len(faults) > SHOWN:
                more = [f"and {len(faults) - SHOWN} more"]
            else:
                more = []
            listed = "\n  ".join([*faults[:SHOWN], *more])
            raise CannotImport(f"{folder} is not the model in its config.json:\n  {listed}")
        if not (folder / "tokenizer.json").exists():
            raise CannotImport(f"{folder} has no tokenizer.json, which a checkpoint holds: put it there")
        return imported

    def _faults(self) -> Iterator[str]:
        wanted_shapes = {rule.theirs: rule.shape for rule in self.rules}
        held_shapes = dict(self.weights.shapes)
        if self.model.tie_embeddings and "lm_head.weight" in held_shapes:  # some files store the tied head, too
            del held_shapes["lm_head.weight"]
            embedding = next(rule.theirs for rule in self.rules if rule.ours == ("embedding.weight",))
            if not torch.equal(self.weights.read("lm_head.weight"), self.weights.read(embedding)):
                yield f"lm_head.weight is not {embedding}, though they are tied"
        yield from (f"{name} is missing" for name in sorted(wanted_shapes.keys() - held_shapes.keys()))
        yield from (f"{name} is used by no rule" for name in sorted(held_shapes.keys() - wanted_shapes.keys()))
        for name in sorted(wanted_shapes.keys() & held_shapes.keys()):
            if wanted_shapes[name] != held_shapes[name]:
                yield f"{name} has shape {held_shapes[name]}, not {wanted_shapes[name]}"

    def config(self, name: str) -> Config:
        """Build the configuration that the checkpoint stores.

        The data path is "unknown" and there are no phases, as an imported folder does not say how it was trained.
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
        """Yield (checkpoint file name, our tensors by key), reading one file's tensors at a time."""
        for number, rules in enumerate(in_parts(self.rules, lambda rule: 4 * math.prod(rule.shape), PART_BYTES)):
            converted = (rule.to_ours(self.weights.read(rule.theirs)) for rule in rules)
            yield (
                f"model-{number:05}.safetensors",
                {key: tensor.contiguous() for ours in converted for key, tensor in ours.items()},
            )


def _kind(folder: Path, settings: dict[str, Any]) -> ModelFormat:
    """Return the format by `architectures`, or by the keys of state-spaces/mamba, which names no class."""
    if "d_model" in settings and "n_layer" in settings:
        return Original()
    formats = {target.name: target for target in TARGETS}
    names = settings.get("architectures") or [settings.get("model_type")]
    if names[0] not in formats:
        known = ", ".join([*formats, Original.name])
        raise CannotImport(f"{folder / 'config.json'} says {names[0]}; known are {known}")
    return formats[names[0]]


def take_over(source: ImportFolder, folder: Path, output: Path, prove: Callable[[Checkpoint], None]) -> None:
    """Write a temporary checkpoint, prove it, and then rename it to `output`. `folder` has the tokenizer.

    Raises CannotImport if the tokenizer or its chat template can't be read.
    """
    small_files = {
        "config.yaml": to_yaml(source.config(output.name)).encode(),
        "tokenizer.json": _tokenizer(folder),
    }
    setting_names = {"eos": "eos_token_id", LONGEST: LONGEST}
    data = {
        ours: str(value) for ours, key in setting_names.items() if isinstance(value := source.settings.get(key), int)
    }
    if (chat := _chat_template(folder)) is not None:
        data[CHAT] = chat.stored()
    meta = Meta(0, 0, data, f"imported from {source.kind.name}", torch.__version__)
    with appearing(output) as temporary:
        write_whole(temporary, meta, small_files, source.tensors())
        prove(Checkpoint.open(temporary))


def _tokenizer(folder: Path) -> bytes:
    path = folder / "tokenizer.json"
    try:
        stored = read_regular(path, LARGEST_TOKENIZER)
        read_tokenizer(stored)
    except (Unreadable, BadTokenizer) as error:
        raise CannotImport(f"{path} can't be read: {error}") from error
    return stored


def _chat_template(folder: Path) -> ChatTemplate | None:
    try:
        template = chat_template_of(folder)
    except ArgumentError as error:
        raise CannotImport(str(error).removeprefix("--tokenizer: ")) from error
    if template is not None and (fault := template.fault()) is not None:
        cure = "correct it, or remove chat_template.jinja and chat_template from tokenizer_config.json"
        raise CannotImport(f"the chat template of {folder} {fault}; {cure}")
    return template


def same_tensors(source: ImportFolder, checkpoint: Checkpoint) -> None:
    """Rebuild each imported tensor from the checkpoint. Raises CannotImport if one is not as it was in the folder.

    Tensors must be equal bit for bit; norm weights that are stored minus 1 may differ by fp32 rounding.
    """
    for rule in source.rules:
        theirs = source.weights.read(rule.theirs)
        if not rule.same(rule.to_theirs(checkpoint.whole), theirs):
            raise CannotImport(f"{rule.theirs} does not come back from the checkpoint as it was")
