"""A checkpoint is a folder `step-00000100`: what it takes to go on training, or to use the model, and nothing pickled.

    model.safetensors      the weights as they are computed with
    optimizer.safetensors  Adam's moments, and the fp32 masters of weights computed in bf16
    random.safetensors     the state of torch's generators
    states-00000...        carried states, of each process as its layout cuts them (so that these need the same layout)
    meta.json              format, step, accepted steps, what the data was, versions
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
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridtron.config.load import load_saved, to_yaml
from hybridtron.config.problems import ConfigError
from hybridtron.config.schema import Config
from hybridtron.data.loader import Fingerprint
from hybridtron.device import random_states, set_random_states
from hybridtron.engine.engine import Engine
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.groups import barrier
from hybridtron.specs.base import Parameter, Problem

FORMAT = 2
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Meta:
    """Where training stood when the checkpoint was written."""

    step: int
    accepted_steps: int
    data: Fingerprint
    torch_version: str
    format: int = FORMAT


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def newest(run_dir: Path) -> Path | None:
    """The checkpoint with the highest step in a run's folder."""
    return max(_all(run_dir), default=None)


def save(run_dir: Path, step: int, config: Config, engine: Engine, data: Fingerprint, tokenizer: Path) -> Path:
    """Write the checkpoint of a step and remove those that `checkpoint.keep` no longer covers.

    All processes bring their shares; the first one puts whole tensors together and writes.
    """
    target = folder_of(run_dir, step)
    aside = target.with_name(f".{target.name}.aside")
    if engine.groups.is_first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    barrier()
    if engine.carrier is not None:
        save_file(engine.carrier.tensors(), _states_file(aside, engine), {"layout": _layout(engine)})
    weights = _by_parts(engine.weights(), engine.optimizer.table)
    state = _by_parts(engine.optimizer.state(), engine.optimizer.table)
    barrier()
    if engine.groups.is_first:
        save_file(weights, aside / "model.safetensors")
        save_file(state, aside / "optimizer.safetensors")
        save_file(random_states(), aside / "random.safetensors")
        meta = Meta(step, engine.optimizer.accepted_steps, data, torch.__version__)
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
    barrier()
    return target


@dataclass(frozen=True)
class Stored:
    """The whole tensors of one file of a checkpoint, read one by one."""

    file: Any
    table: dict[str, Parameter]

    def __call__(self, name: str) -> Tensor:
        """A tensor by its name in the model, behind `exp_avg.` and the like where it is the optimizer's."""
        parts = [f"{name}.{part}" for part, _ in self.table[_weight_of(name, self.table)].parts] or [name]
        return torch.cat([self.file.get_tensor(part) for part in parts])


def stored(checkpoint: Path, file: str, table: dict[str, Parameter]) -> Stored:
    """Open `model.safetensors` or `optimizer.safetensors` of a checkpoint."""
    return Stored(safe_open(checkpoint / file, "pt"), table)


def restore_optimizer(checkpoint: Path, engine: Engine) -> Meta:
    """Put optimizer and random states back where the checkpoint left them."""
    meta = read_meta(checkpoint)
    optimizer = engine.optimizer
    optimizer.load_state(stored(checkpoint, "optimizer.safetensors", optimizer.table), meta.accepted_steps)
    set_random_states(load_file(checkpoint / "random.safetensors"))
    return meta


def restore_states(checkpoint: Path, engine: Engine) -> None:
    """Put the carried states of this process's lanes and layers back; they are stored as the layout cut them."""
    if engine.carrier is None:
        return
    file = _states_file(checkpoint, engine)
    wanted = _layout(engine)
    try:
        with safe_open(file, "pt") as stored_states:
            written = stored_states.metadata()["layout"]
    except FileNotFoundError:
        written = "another number of processes, or without carried states"
    if written != wanted:
        cure = "resume on that layout, start the phase's states anew with run.resume=never, or use states.mode=zero"
        raise ConfigError([Problem("states.mode", f"carries states that {checkpoint} holds for {written}; {cure}")])
    engine.carrier.load(load_file(file))


def _states_file(checkpoint: Path, engine: Engine) -> Path:
    return checkpoint / f"states-{engine.groups.rank:05}.safetensors"


def _layout(engine: Engine) -> str:
    parallel, groups = engine.config.parallel, engine.groups
    stages = f"pipeline {groups.pipeline_size} x {parallel.virtual_pipeline}"
    return f"tensor {groups.tensor.size}, {stages}, data {groups.data_size}"


def load_weights(checkpoint: Path, model: LanguageModel) -> None:
    """Fill a whole model's weights from a checkpoint of the same architecture."""
    whole = stored(checkpoint, "model.safetensors", model.table)
    for name, weight in model.named_parameters():
        weight.data.copy_(whole(name))


def read_config(checkpoint: Path) -> Config:
    return load_saved(checkpoint / "config.yaml")


def read_meta(checkpoint: Path) -> Meta:
    stored = json.loads((checkpoint / "meta.json").read_text())
    if stored["format"] != FORMAT:
        raise ValueError(f"{checkpoint} has checkpoint format {stored['format']}; this version reads {FORMAT}")
    return Meta(**stored)


def _all(run_dir: Path) -> list[Path]:
    return [p for p in (run_dir / "checkpoints").glob("step-*") if _NAME.fullmatch(p.name)]


def _by_parts(tensors: Iterable[tuple[str, Tensor]], table: dict[str, Parameter]) -> dict[str, Tensor]:
    """Each fused weight as one tensor per part, under `name.part`."""
    split = {}
    for name, tensor in tensors:
        parts = table[_weight_of(name, table)].parts
        pieces = tensor.split([rows for _, rows in parts]) if parts else [tensor]
        names = [f"{name}.{part}" for part, _ in parts] or [name]
        split.update(zip(names, (piece.contiguous() for piece in pieces), strict=True))
    return split


def _weight_of(name: str, table: dict[str, Parameter]) -> str:
    """`exp_avg.norm.weight` is about `norm.weight`."""
    return name if name in table else name.partition(".")[2]


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
