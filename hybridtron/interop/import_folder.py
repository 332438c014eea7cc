"""From a folder of transformers, or of state-spaces/mamba, to a checkpoint whose weights a run starts from.

    hybridtron train model=from_checkpoint run.weights=OUTPUT ...

The list of tensors is compared with the configuration before any of them is read: tensors that no rule uses, that are
missing or have another shape are reported together. Written is a checkpoint as a run writes it, of step 0, without an
optimizer; any layout loads it.
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

SHOWN = 40  # faults that are listed
PART_BYTES = 2**26  # of tensors that are in memory at once, twice: one part is written while the next is read


@dataclass(frozen=True)
class ImportFolder:
    """A folder that was looked at: what it is, our configuration of it, and its tensors."""

    kind: ModelFormat
    settings: dict[str, Any]
    model: ModelConfig
    rules: list[TensorRule]
    weights: Weights

    @classmethod
    def open(cls, folder: Path) -> ImportFolder:
        """Raises CannotImport, saying all that does not fit."""
        settings = settings_of(folder)
        require_files(folder)
        kind = _kind(folder, settings)
        try:
            model = kind.model(settings)
            if wrong := list(model_problems(model)):
                raise ConfigError(wrong)
            weights = Weights(folder)
            rules = [rule.as_named(weights.shapes) for rule in kind.rules(model)]
        except (KeyError, ValueError) as error:
            why = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise CannotImport(f"{folder / 'config.json'} {why}") from error
        found = cls(kind, settings, model, rules, weights)
        if faults := list(found._faults()):
            more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
            listed = "\n  ".join([*faults[:SHOWN], *more])
            raise CannotImport(f"{folder} is not the model in its config.json:\n  {listed}")
        if not (folder / "tokenizer.json").exists():
            raise CannotImport(f"{folder} has no tokenizer.json, which a checkpoint holds: put it there")
        return found

    def _faults(self) -> Iterator[str]:
        wanted, held = {rule.theirs: rule.shape for rule in self.rules}, dict(self.weights.shapes)
        if self.model.tie_embeddings and "lm_head.weight" in held:  # some write it all the same
            del held["lm_head.weight"]
            embedding = next(rule.theirs for rule in self.rules if rule.ours == ("embedding.weight",))
            if not torch.equal(self.weights.read("lm_head.weight"), self.weights.read(embedding)):
                yield f"lm_head.weight is not {embedding}, though they are tied"
        yield from (f"{name} is missing" for name in sorted(wanted.keys() - held.keys()))
        yield from (f"{name} is used by no rule" for name in sorted(held.keys() - wanted.keys()))
        for name in sorted(wanted.keys() & held.keys()):
            if wanted[name] != held[name]:
                yield f"{name} has shape {held[name]}, not {wanted[name]}"

    def config(self, name: str) -> Config:
        """What is known of it, for runs that start from it: neither its data nor how it was trained."""
        narrow = self.weights.read(self.rules[0].theirs).dtype == torch.bfloat16
        return Config(
            model=self.model,
            data=DataConfig(source=DataSource.folder, path="unknown"),
            precision=PrecisionConfig(Precision.bf16 if narrow else Precision.fp32),
            run=RunConfig(name=name),
            phases=[],
        )

    def tensors(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Our tensors by the file that they go to."""
        for number, rules in enumerate(in_parts(self.rules, lambda rule: 4 * math.prod(rule.shape), PART_BYTES)):
            made = (rule.to_ours(self.weights.read(rule.theirs)) for rule in rules)
            yield f"model-{number:05}.safetensors", {key: t.contiguous() for ours in made for key, t in ours.items()}


def _kind(folder: Path, settings: dict[str, Any]) -> ModelFormat:
    if "d_model" in settings and "n_layer" in settings:
        return Original()
    found = {target.name: target for target in TARGETS}
    names = settings.get("architectures") or [settings.get("model_type")]
    if names[0] not in found:
        known = ", ".join([*found, Original.name])
        raise CannotImport(f"{folder / 'config.json'} says {names[0]}; known are {known}")
    return found[names[0]]


def take_over(source: ImportFolder, folder: Path, output: Path, prove: Callable[[Checkpoint], None]) -> None:
    """Write a temporary checkpoint, prove it, and only then give it its name; `folder` has the tokenizer."""
    small = {
        "config.yaml": to_yaml(source.config(output.name)).encode(),
        "tokenizer.json": _tokenizer(folder),
    }
    known = {"eos": "eos_token_id", LONGEST: LONGEST}
    data = {ours: str(value) for ours, key in known.items() if isinstance(value := source.settings.get(key), int)}
    if (chat := _chat_template(folder)) is not None:
        data[CHAT] = chat.stored()
    meta = Meta(0, 0, data, f"imported from {source.kind.name}", torch.__version__)
    with appearing(output) as temporary:
        write_whole(temporary, meta, small, source.tensors())
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
    """Each of their tensors, made again from the checkpoint, must be what it was, bit for bit."""
    for rule in source.rules:
        theirs = source.weights.read(rule.theirs)
        if not rule.same(rule.to_theirs(checkpoint.whole), theirs):
            raise CannotImport(f"{rule.theirs} does not come back from the checkpoint as it was")
