"""Reads tensors from a Hugging Face folder: from model.safetensors, several safetensors shards, or pytorch_model.bin.

Names and shapes are read when a folder is opened. A tensor's data are read when the tensor is requested. The files are
untrusted: tensors in safetensors files must have a float dtype, shards must be in the folder itself, and only tensors
and plain containers are unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridtron.checkpoint.files import NAMES, bytes_of
from hybridtron.interop.config_json import CannotImport, read_object
from hybridtron.safe_open import open_regular, require_regular

FLOATS = ("F64", "F32", "BF16", "F16")


def read_values(file: Path, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Read a tensor's data from byte `start` of a file. Raises CannotImport if the file is too short.

    The file is not memory-mapped, because the mapped pages would count as this process's memory.
    """
    tensor = torch.empty(shape, dtype=dtype)
    with open_regular(file) as opened:
        opened.seek(start)
        unread = bytes_of(tensor)
        while unread and (num_read := opened.readinto(unread)):
            unread = unread[num_read:]
    if unread:
        raise CannotImport(f"{file} ends before its last tensor", code="unreadable")
    return tensor


class WeightFiles(NamedTuple):
    """Names of the files with weights in a folder.

    single: a safetensors file with all tensors
    pickled: a pickled file with all tensors
    """

    single: str = "model.safetensors"
    pickled: str = "pytorch_model.bin"

    @property
    def index(self) -> str:
        """Name of the JSON file that maps each tensor to its file, if there are several safetensors files (shards)."""
        return f"{self.single}.index.json"


OF_MODEL = WeightFiles()


class Weights:
    """The tensors of a folder. `shapes` maps each tensor's name to its shape, and `read` loads a tensor.

    If a folder has weights in several forms, only the first of these forms is read: shards with an index, a single
    safetensors file, a pickled file. Raises CannotImport if the folder has no weights, or if a file can't be read.
    """

    def __init__(self, folder: Path, names: WeightFiles = OF_MODEL) -> None:
        self.folder = folder
        self._names = names
        self._of_name: dict[str, Callable[[], Tensor]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        files = sorted(self._files())
        if files:
            for file in files:
                self._add_safetensors(file)
        elif (pickled := folder / names.pickled).exists():
            self._add_pickled(pickled)
        else:
            raise CannotImport(
                f"{folder} has no weights: no {names.single}, {names.index} or {names.pickled}", code="no-file"
            )

    def read(self, name: str) -> Tensor:
        """Load a tensor by its name, in the file's dtype."""
        return self._of_name[name]()

    def replaced(self, others: Weights, names: Mapping[str, str]) -> Weights:
        """Return a copy that reads some tensors from `others`. `names` maps their names here to names in `others`."""
        copied = copy(self)
        copied._of_name = self._of_name | {name: partial(others.read, other_name) for name, other_name in names.items()}
        return copied

    def _files(self) -> set[Path]:
        index = self.folder / self._names.index
        if index.exists():
            files_by_tensor = read_object(index).get("weight_map")
            if not isinstance(files_by_tensor, dict) or not all(
                isinstance(name, str) for name in files_by_tensor.values()
            ):
                raise CannotImport(f"{index} has no valid weight_map, which maps tensors to files", code="unreadable")
            names = set(files_by_tensor.values())
            if outside := [name for name in names if Path(name).name != name]:
                raise CannotImport(
                    f"{index} names the file {outside[0]!r}, which is not in {self.folder}", code="unreadable"
                )
            return {self.folder / name for name in names}
        single = self.folder / self._names.single
        if single.exists():
            return {single}
        return set()

    def _add_safetensors(self, file: Path) -> None:
        try:
            require_regular(file)
            with safe_open(file, framework="pt"):  # validates the header, so that the code below can trust the header
                pass
        except (OSError, SafetensorError) as error:
            raise CannotImport(f"{file} can't be read: {error}", code="unreadable") from error
        with open_regular(file) as opened:
            size = int.from_bytes(opened.read(8), "little")
            head = json.loads(opened.read(size))
        head.pop("__metadata__", None)
        for name, entry in head.items():
            if entry["dtype"] not in FLOATS:
                cure = f"only the dtypes {', '.join(FLOATS)} can be imported"
                raise CannotImport(f"{file}: {name} has the dtype {entry['dtype']}; {cure}", code="unsupported")
            start = 8 + size + entry["data_offsets"][0]
            shape = tuple(entry["shape"])
            self.shapes[name] = shape
            self._of_name[name] = partial(read_values, file, start, NAMES[entry["dtype"]], shape)

    def _add_pickled(self, file: Path) -> None:
        """Read a pickled state dict, with `weights_only` to unpickle only tensors and plain containers."""
        try:
            require_regular(file)
            stored: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a broken or foreign file can raise anything
            raise CannotImport(f"{file} can't be read: {error}", code="unreadable") from error
        if not isinstance(stored, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in stored.items()
        ):
            raise CannotImport(f"{file} is not a dictionary of tensors by name", code="unreadable")
        for name, tensor in stored.items():
            self.shapes[name] = tuple(tensor.shape)
            self._of_name[name] = lambda tensor=tensor: tensor
