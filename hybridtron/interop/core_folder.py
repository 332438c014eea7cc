"""Folders of megatron-core's distributed checkpoints (format `torch_dist`) with a GPTModel: reading and writing.

    .metadata, *.distcp    the tensors, in the format of torch's distributed checkpoints
    common.pt              the iteration, and Megatron-LM's arguments, if Megatron-LM or this package wrote the folder
    metadata.json          the names of these formats

core stacks a weight of all layers in one tensor, of which each layer is a chunk. Other folders have a tensor for each
layer, with the layer's number in its name. Imports read both, exports write the former. Both read one layer's weight
at a time.
"""

from __future__ import annotations

import io
import json
import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.dcp_reader import DcpTensors
from hybridtron.checkpoint.exchange import without_warning
from hybridtron.checkpoint.files import NAMES, appearing
from hybridtron.interop.config_json import MAX_COUNT, MAX_LAYERS, CannotImport, read_object
from hybridtron.interop.core_arguments import ARGUMENTS, COMMON, stored_arguments
from hybridtron.interop.core_gpt import (
    EPS,
    LAYERS,
    CoreGPT,
    arguments_of,
    faults_of,
    require_fitting,
    theirs_of_shapes,
)
from hybridtron.interop.export import longest_row
from hybridtron.interop.import_folder import ImportFolder, tokenizer_bytes
from hybridtron.interop.reader import FLOATS, Weights
from hybridtron.interop.rules import TensorRule
from hybridtron.interop.tokenizer import CHAT, write_tokenizer

FORMAT = "torch_dist"
FORMATS = "metadata.json"
BACKENDS = {
    "sharded_backend": FORMAT,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
EOS = "eos_token_id"
TOKENIZER = "tokenizer.json"
# modules whose layers store a state beside their weights, which is empty without FP8; core requires an entry for each
WITH_STATE = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def is_core_folder(folder: Path) -> bool:
    """Return True if a folder is a distributed checkpoint of megatron-core."""
    return (folder / FORMATS).is_file()


@dataclass(frozen=True)
class CoreOptions:
    """Options of a command that describe a model, for a folder without arguments; None: an option is left out."""

    heads: int | None = None
    rope_base: float | None = None
    norm_eps: float | None = None

    @property
    def arguments(self) -> dict[str, tuple[str, Any]]:
        """Megatron-LM's argument -> the option, and its value."""
        return {
            "num_attention_heads": ("--heads", self.heads),
            "rotary_base": ("--rope-base", self.rope_base),
            EPS: ("--norm-eps", self.norm_eps),
        }


class CoreWeights(Weights):
    """The tensors of a folder, under names with the layers' numbers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes = {}
        self._of_name: dict[str, Callable[[], Tensor]] = {}
        stored = DcpTensors(folder)
        self._require_floats(stored)
        for key, shape in stored.shapes.items():
            rest = key.removeprefix(f"{LAYERS}.")
            if rest == key or rest.partition(".")[0].isdigit():
                self._add(key, shape, partial(stored.part, key, (0,) * len(shape), shape))
                continue
            if not shape or not 0 < shape[0] <= MAX_LAYERS:
                raise CannotImport(
                    f"{folder}: {key} has the shape {shape}, must begin with 1 to {MAX_LAYERS} layers",
                    code="out-of-range",
                )
            count, *inner = shape
            for layer in range(count):
                offset = (layer, *(0 for _ in inner))
                self._add(f"{LAYERS}.{layer}.{rest}", tuple(inner), partial(stored.part, key, offset, (1, *inner)))

    def _add(self, name: str, shape: tuple[int, ...], read: Callable[[], Tensor]) -> None:
        self.shapes[name] = shape
        self._of_name[name] = lambda: read().reshape(shape)

    def _require_floats(self, stored: DcpTensors) -> None:
        floats = [NAMES[name] for name in FLOATS]
        for key, dtype in stored.dtypes.items():
            if not key.startswith(tuple(CoreGPT.dropped)) and dtype not in floats:
                raise CannotImport(
                    f"{self.folder}: {key} has the dtype {dtype}; only {', '.join(FLOATS)} can be imported",
                    code="unsupported",
                )


def open_core_folder(folder: Path, options: CoreOptions, tokenizer: Path) -> ImportFolder:
    """Open a folder for import, and check the arguments, and the tensors' names and shapes.

    tokenizer: folder with the file tokenizer.json

    Raises CannotImport, with all faults, if the folder can't be imported.
    """
    if (backend := read_object(folder / FORMATS).get("sharded_backend")) != FORMAT:
        raise CannotImport(f"{folder} has the format {backend!r}, must be {FORMAT}", code="unsupported")
    weights = CoreWeights(folder)
    _require_no_mamba(weights)
    stored = stored_arguments(folder)
    if EPS not in stored and "layernorm_epsilon" in stored:
        stored[EPS] = stored["layernorm_epsilon"]
    chosen = _chosen(folder, stored, options, tokenizer)
    try:
        settings = theirs_of_shapes(weights.shapes, chosen["num_attention_heads"]) | chosen
    except ValueError as error:
        raise CannotImport(f"{folder} {error}", code="mismatch") from error
    if faults := list(faults_of(stored, settings)):
        listed = "\n  ".join(faults)
        raise CannotImport(f"{folder} can't be imported:\n  {listed}", code="unsupported")
    unchecked = {
        name: stored[name]
        for name in ("fp32_residual_connection", "max_position_embeddings", EOS)
        if type(stored.get(name)) in (bool, int)
    }
    kind = CoreGPT()
    arch = architecture(kind.model(settings | unchecked))
    source = ImportFolder(kind, settings | unchecked, arch, kind.rules(arch), weights)
    source.require_fitting("shapes and arguments")
    return source


def _require_no_mamba(weights: Weights) -> None:
    """Raise CannotImport for a hybrid of core, whose recurrent layers have a module `mixer`."""
    if mixers := [name for name in weights.shapes if ".mixer." in name]:
        raise CannotImport(
            f"{weights.folder} has a hybrid with Mamba layers ({mixers[0]}); only {CoreGPT.name} can be imported",
            code="unsupported",
        )


def _chosen(folder: Path, stored: Mapping[str, Any], options: CoreOptions, tokenizer: Path) -> dict[str, Any]:
    """Return the arguments that no tensor shows: from the folder, or if it lacks them from the options.

    Raises CannotImport with a list if some are missing, if both have different values, or if a value is out of range.
    """
    chosen = {}
    missing = []
    for name, (option, value) in options.arguments.items():
        stored_value = stored.get(name)
        if stored_value is None and value is None:
            missing.append(f"{option} ({name})")
        elif stored_value is None:
            _require_in_range(name, value, option)
            chosen[name] = value
        elif value is not None and value != stored_value:
            raise CannotImport(
                f"{folder} has {name}={stored_value}, but {option} is {value}: leave {option} out", code="conflict"
            )
        else:
            _require_in_range(name, stored_value, f"{folder} has {name}, which")
            chosen[name] = stored_value
    if not (tokenizer / TOKENIZER).is_file():
        missing.append(f"--tokenizer (a folder with {TOKENIZER})")
    if missing:
        raise CannotImport(f"{folder} does not say everything: add {', '.join(missing)}", code="missing")
    return chosen


def _require_in_range(name: str, value: Any, where: str) -> None:
    """Raise CannotImport if no model can have an argument's value. `where` begins the message: `WHERE is VALUE`."""
    if name == "num_attention_heads":
        usable = type(value) is int and 0 < value <= MAX_COUNT
        wanted = f"an integer from 1 to {MAX_COUNT}"
    else:
        lowest = 0
        if name == "rotary_base":
            lowest = 1
        usable = type(value) in (int, float) and lowest < value < math.inf
        wanted = f"a number above {lowest}"
    if not usable:
        raise CannotImport(f"{where} is {value!r}, must be {wanted}", code="out-of-range")


def tokenizer_folder(folder: Path, option: Path | None) -> Path:
    """Return the folder of the tokenizer: that of --tokenizer, or without this option the imported folder.

    Raises CannotImport if both have tokenizers, and these differ.
    """
    if option is None:
        return folder
    both = all((path / TOKENIZER).is_file() for path in (folder, option))
    if both and tokenizer_bytes(folder) != tokenizer_bytes(option):
        raise CannotImport(f"{folder} has another {TOKENIZER} than {option}: leave --tokenizer out", code="conflict")
    return option


def write_core_folder(source: Checkpoint, target: Path) -> int:
    """Write the weights of a checkpoint as a folder of megatron-core; return how many tensors the folder has.

    The folder `target` appears complete or not at all. Raises CannotExport if GPTModel does not compute this model, and
    BrokenCheckpoint if the source is damaged.
    """
    arch = source.plan.arch
    require_fitting(arch)
    planner = _Planner(source, CoreGPT().rules(arch))
    length = longest_row(source)
    eos = source.meta.data.get("eos")
    arguments = arguments_of(arch, length)
    if eos is not None:
        arguments[EOS] = int(eos)
    with appearing(target) as temporary:
        with without_warning():
            dcp.save({}, storage_writer=FileSystemWriter(temporary), planner=planner, no_dist=True)
        common = {ARGUMENTS: Namespace(**arguments), "iteration": source.meta.step, "checkpoint_version": 3.0}
        torch.save(common, temporary / COMMON)
        (temporary / FORMATS).write_text(json.dumps(BACKENDS))
        tokenizer = source.verified(TOKENIZER)
        write_tokenizer(
            temporary, tokenizer, arguments.get(EOS), arch.model.vocab_size, length, source.meta.data.get(CHAT)
        )
    return planner.count


class _Planner(DefaultSavePlanner):
    """A planner that writes a chunk for each rule, and reads its tensors only then.

    A rule of a layer fills the layer's chunk in the tensor of all layers. The state of modules beside their weights is
    empty.
    """

    def __init__(self, source: Checkpoint, rules: list[TensorRule]) -> None:
        super().__init__(flatten_state_dict=False)
        self._source = source
        self._rules: dict[MetadataIndex, TensorRule] = {}
        self._items: list[WriteItem] = []
        layers = 1 + max(_layer_of(rule) for rule in rules)
        for rule in rules:
            self._add(rule, layers)
        states = [
            f"{LAYERS}.{name}._extra_state/shard_{layer}_{layers}" for name in WITH_STATE for layer in range(layers)
        ]
        self._items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in states]

    @property
    def count(self) -> int:
        """Number of tensors."""
        return len({index.fqn for index in self._rules})

    def _add(self, rule: TensorRule, layers: int) -> None:
        layer = _layer_of(rule)
        name = rule.theirs
        offset = (0,) * len(rule.shape)
        chunk = rule.shape
        shape = rule.shape
        if layer >= 0:
            name = name.replace(f"{LAYERS}.{layer}.", f"{LAYERS}.")
            offset = (layer, *offset)
            chunk = (1, *chunk)
            shape = (layers, *shape)
        index = MetadataIndex(name, torch.Size(offset))
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offset), torch.Size(chunk)),
            properties=TensorProperties(dtype=self._source.dtype(rule.ours[0])),
            size=torch.Size(shape),
        )
        self._rules[index] = rule
        self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            empty = io.BytesIO()
            torch.save([None], empty)
            return empty
        rule = self._rules[write_item.index]
        assert write_item.tensor_data is not None
        tensor = rule.to_theirs(self._source.whole)
        return tensor.reshape(write_item.tensor_data.chunk.sizes).contiguous()


def _layer_of(rule: TensorRule) -> int:
    """Return the number of a rule's layer, or -1 if it belongs to no layer."""
    rest = rule.theirs.removeprefix(f"{LAYERS}.")
    if rest == rule.theirs:
        return -1
    return int(rest.partition(".")[0])
