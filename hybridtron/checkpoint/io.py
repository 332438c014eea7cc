"""A checkpoint is a folder `step-00000100`: what it takes to go on training, or to use the model, and nothing pickled.

    model.safetensors      the weights as they are computed with
    optimizer.safetensors  Adam's moments, and the fp32 masters of weights computed in bf16
    random.safetensors     the state of torch's generators
    meta.json              format, step, accepted steps, data fingerprint, versions
    config.yaml            the whole configuration
    tokenizer.json         the tokenizer of the data

Fused projections are stored by their parts (`in_proj.weight.x`, `in_proj.weight.z`), so that no layout's way of
cutting them is written down. A folder appears whole or not at all: it is written aside, flushed and renamed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridtron.config.load import load_saved, to_yaml
from hybridtron.config.schema import Config
from hybridtron.device import random_states, set_random_states
from hybridtron.engine.optim import Optimizer
from hybridtron.model.lm import LanguageModel
from hybridtron.specs.base import Parameter

FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Meta:
    """Where training stood when the checkpoint was written."""

    step: int
    accepted_steps: int
    data_fingerprint: str
    torch_version: str
    format: int = FORMAT


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def newest(run_dir: Path) -> Path | None:
    """The checkpoint with the highest step in a run's folder."""
    return max(_all(run_dir), default=None)


def save(
    run_dir: Path,
    step: int,
    config: Config,
    model: LanguageModel,
    optimizer: Optimizer,
    fingerprint: str,
    tokenizer: Path,
) -> Path:
    """Write the checkpoint of a step and remove those that `checkpoint.keep` no longer covers."""
    target = folder_of(run_dir, step)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    weights = {name: weight.data for name, weight in model.named_parameters()}
    save_file(_by_parts(weights, model.table), aside / "model.safetensors")
    state = {f"{kind}.{n}": t for kind, ts in optimizer.state().items() for n, t in _by_parts(ts, model.table).items()}
    save_file(state, aside / "optimizer.safetensors")
    save_file(random_states(), aside / "random.safetensors")
    meta = Meta(step, optimizer.accepted_steps, fingerprint, torch.__version__)
    (aside / "meta.json").write_text(json.dumps(asdict(meta), indent=1))
    (aside / "config.yaml").write_text(to_yaml(config))
    shutil.copyfile(tokenizer, aside / "tokenizer.json")
    for path in (*aside.iterdir(), aside):
        _flush(path)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    _flush(target.parent)
    for old in sorted(_all(run_dir))[: -config.checkpoint.keep]:
        shutil.rmtree(old)
    return target


def restore(checkpoint: Path, model: LanguageModel, optimizer: Optimizer) -> Meta:
    """Put weights, optimizer and random states back where the checkpoint left them."""
    meta = read_meta(checkpoint)
    load_weights(checkpoint, model)
    stored = load_file(checkpoint / "optimizer.safetensors")
    kinds: dict[str, dict[str, Tensor]] = {}
    for key, tensor in stored.items():
        kind, _, name = key.partition(".")
        kinds.setdefault(kind, {})[name] = tensor
    optimizer.load_state({kind: _whole(parts, model.table) for kind, parts in kinds.items()}, meta.accepted_steps)
    set_random_states(load_file(checkpoint / "random.safetensors"))
    return meta


def load_weights(checkpoint: Path, model: LanguageModel) -> None:
    """Fill the model's weights from a checkpoint of the same architecture."""
    stored = _whole(load_file(checkpoint / "model.safetensors"), model.table)
    for name, weight in model.named_parameters():
        weight.data.copy_(stored[name])


def read_config(checkpoint: Path) -> Config:
    return load_saved(checkpoint / "config.yaml")


def read_meta(checkpoint: Path) -> Meta:
    stored = json.loads((checkpoint / "meta.json").read_text())
    if stored["format"] != FORMAT:
        raise ValueError(f"{checkpoint} has checkpoint format {stored['format']}; this version reads {FORMAT}")
    return Meta(**stored)


def _all(run_dir: Path) -> list[Path]:
    return [p for p in (run_dir / "checkpoints").glob("step-*") if _NAME.fullmatch(p.name)]


def _by_parts(tensors: dict[str, Tensor], table: dict[str, Parameter]) -> dict[str, Tensor]:
    """Each fused weight as one tensor per part, under `name.part`."""
    stored = {}
    for name, tensor in tensors.items():
        parts = table[name].parts
        pieces = tensor.detach().cpu().split([rows for _, rows in parts]) if parts else [tensor.detach().cpu()]
        names = [f"{name}.{part}" for part, _ in parts] or [name]
        stored.update(zip(names, (piece.contiguous() for piece in pieces), strict=True))
    return stored


def _whole(stored: dict[str, Tensor], table: dict[str, Parameter]) -> dict[str, Tensor]:
    """The inverse of `_by_parts`, for those weights of the table that are stored."""
    whole = {}
    for name, parameter in table.items():
        names = [f"{name}.{part}" for part, _ in parameter.parts] or [name]
        if names[0] in stored:
            whole[name] = torch.cat([stored[part] for part in names])
    return whole


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
