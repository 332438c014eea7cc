"""Reads Megatron-LM's arguments from the file `common.pt` of a `torch_dist` folder, without running code from it.

The file is a zip archive with a pickle. The pickle names many classes of Megatron-LM, and unpickling can call any
function. The reader here builds an argparse.Namespace, and puts an inert object in place of every other named object.
"""

from __future__ import annotations

import argparse
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, Self

from hybridtron.interop.config_json import CannotImport
from hybridtron.problems import first_line
from hybridtron.safe_open import Unreadable, read_regular

COMMON = "common.pt"
MAX_BYTES = 2**28
MAX_PICKLE_BYTES = 2**26
ARGUMENTS = "args"  # Megatron-LM's key for its arguments


def stated_arguments(folder: Path) -> dict[str, Any]:
    """Return Megatron-LM's arguments by name; an empty dictionary if the folder has none.

    Raises CannotImport if `common.pt` can't be read.
    """
    path = folder / COMMON
    try:
        with zipfile.ZipFile(io.BytesIO(read_regular(path, MAX_BYTES))) as archive:
            name = next(entry.filename for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
            if archive.getinfo(name).file_size > MAX_PICKLE_BYTES:
                raise CannotImport(f"{path} has more than {MAX_PICKLE_BYTES:,} bytes of arguments", code="out-of-range")
            common = _Inert(io.BytesIO(archive.read(name))).load()
    except CannotImport:
        raise
    except (OSError, Unreadable) as error:
        raise CannotImport(f"{path} can't be read: {error}", code="unreadable") from error
    except Exception as error:  # a damaged pickle can raise any error
        raise CannotImport(f"{path} can't be read: {first_line(error)}", code="unreadable") from error
    stated = common.get(ARGUMENTS) if isinstance(common, dict) else None
    if not isinstance(stated, argparse.Namespace):
        return {}
    return {name: value for name, value in vars(stated).items() if isinstance(name, str)}


class _Placeholder:
    """An object in place of one that the pickle names; it takes every argument, entry and state, and keeps none."""

    def __new__(cls, *_args: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *_args: Any) -> None:
        pass

    def __call__(self, *_args: Any) -> _Placeholder:
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def add(self, value: Any) -> None:
        pass

    def __repr__(self) -> str:
        return "an object of another program"


class _Inert(pickle.Unpickler):
    """An unpickler that knows argparse.Namespace alone, and no tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("argparse", "Namespace"):
            return argparse.Namespace
        return _Placeholder

    def persistent_load(self, pid: Any) -> _Placeholder:
        return _Placeholder()
