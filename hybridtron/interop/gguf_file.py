"""Writes an exported folder as a GGUF file, which llama.cpp loads.

Matrices keep the export's dtype. Norms, biases, convolutions, A and D are in fp32, as llama.cpp needs them. One tensor
after another is converted and written, so that memory does not grow with the model's size. The file appears under its
name when it is complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridtron.config.export_class import RECORD
from hybridtron.interop.consumers import GGUF
from hybridtron.interop.gguf_families import FAMILIES, Change, GgufFamily
from hybridtron.interop.gguf_vocabulary import CannotConvert, GgufVocabulary
from hybridtron.interop.import_folder import ImportFolder
from hybridtron.own_folders import sync
from hybridtron.storage.durable import temporary_of

if TYPE_CHECKING:
    from gguf import GGUFWriter

# dtype of matrices -> member of gguf.GGMLQuantizationType, member of gguf.LlamaFileType
DTYPES = {
    torch.float32: ("F32", "ALL_F32"),
    torch.float16: ("F16", "MOSTLY_F16"),
    torch.bfloat16: ("BF16", "MOSTLY_BF16"),
}
IN_FP32 = ("_norm.weight", "conv1d.weight")  # ends of names of further tensors that llama.cpp needs in fp32


class GgufTensor(NamedTuple):
    """A tensor in the file, computed by `change` from the folder's tensor `source`."""

    name: str
    source: str
    change: Change
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_gguf(folder: Path, output: Path, progress: Callable[[int, int], None]) -> GgufVocabulary:
    """Write the model in `folder` as a GGUF file. Returns the tokenizer as it is in the file.

    `progress` is called after each tensor with two byte counts: written so far, and in total. Raises CannotConvert if
    llama.cpp can't run the model.
    """
    from gguf import GGML_QUANT_VERSION, MODEL_ARCH, MODEL_ARCH_NAMES, GGUFType, GGUFWriter, LlamaFileType

    if not (folder / RECORD).is_file():
        raise CannotConvert(
            f"{folder} has no {RECORD}: name a folder that hybridtron export has written", code="no-file"
        )
    source = ImportFolder.open(folder)
    family = family_of(source)
    vocabulary = GgufVocabulary.of(folder, source.settings)
    tensors = planned(source, family)
    embedding = next(tensor for tensor in tensors if tensor.name == "token_embd.weight")
    temporary = temporary_of(output)
    writer = GGUFWriter(temporary, MODEL_ARCH_NAMES[MODEL_ARCH[family.arch]])
    writer.add_type(GGUFType.MODEL)
    writer.add_name(folder.resolve().name)
    writer.add_file_type(LlamaFileType[DTYPES[embedding.dtype][1]])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    family.write_keys(writer)
    vocabulary.write(writer)
    try:
        _write_tensors(writer, source, tensors, progress)
        sync(temporary)
        temporary.rename(output)
    except BaseException:
        writer.close()
        temporary.unlink(missing_ok=True)
        raise
    sync(output.parent)
    return vocabulary


def family_of(source: ImportFolder) -> GgufFamily:
    """Return the family of llama.cpp for a model. Raises CannotConvert if there is none."""
    name = source.kind.name
    if name not in FAMILIES:
        cure = f"a GGUF file can be written for {', '.join(FAMILIES)}"
        raise CannotConvert(f"{source.weights.folder} has the class {name}; {cure}", code="unsupported")
    if (reason := GGUF.judge(source.settings).reason) is not None:
        raise CannotConvert(f"llama.cpp can load {source.weights.folder} {reason}", code="unsupported")
    return FAMILIES[name](source.settings)


def planned(source: ImportFolder, family: GgufFamily) -> list[GgufTensor]:
    """Return the tensors to write, in the order of the model's layers."""
    tensors: list[GgufTensor] = []
    for rule in source.rules:
        stored_dtype = source.weights.read(rule.theirs).dtype
        for part in family.parts(rule.theirs):
            shape = tuple(part.change(torch.empty(rule.shape, device="meta")).shape)
            is_small = len(shape) == 1 or not part.name.endswith(".weight") or part.name.endswith(IN_FP32)
            dtype = stored_dtype if stored_dtype in DTYPES and not is_small else torch.float32
            tensors.append(GgufTensor(part.name, rule.theirs, part.change, shape, dtype))
    return tensors


def _write_tensors(
    writer: GGUFWriter, source: ImportFolder, tensors: list[GgufTensor], progress: Callable[[int, int], None]
) -> None:
    from gguf import GGMLQuantizationType

    for tensor in tensors:
        empty = _array(torch.empty(tensor.shape, dtype=tensor.dtype))
        kind = GGMLQuantizationType[DTYPES[tensor.dtype][0]]
        writer.add_tensor_info(tensor.name, empty.shape, empty.dtype, tensor.size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total = sum(tensor.size for tensor in tensors)
    done = 0
    for tensor in tensors:
        changed = tensor.change(source.weights.read(tensor.source))
        writer.write_tensor_data(_array(changed.to(tensor.dtype).contiguous()))
        done += tensor.size
        progress(done, total)
    writer.close()


def _array(tensor: Tensor) -> np.ndarray:
    """Return the array that `gguf` takes for a tensor: bf16 as bytes, since numpy has no bf16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()
