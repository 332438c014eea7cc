"""Reads Megatron-LM's arguments from the file `common.pt` of a `torch_dist` folder, without running code from it.

The file is a zip archive with a pickle, which names many classes of Megatron-LM. It is read as inert records
(`hybridtron/inert_pickle.py`); the arguments are the state of the record in place of an argparse.Namespace.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

from hybridtron.inert_pickle import Record, inert_load
from hybridtron.interop.config_json import CannotImport
from hybridtron.problems import first_line
from hybridtron.safe_open import Unreadable, read_regular

COMMON = "common.pt"
MAX_BYTES = 2**28
MAX_PICKLE_BYTES = 2**26
ARGUMENTS = "args"  # Megatron-LM's key for its arguments


def stored_arguments(folder: Path) -> dict[str, Any]:
    """Return Megatron-LM's arguments by name; an empty dictionary if the folder has none.

    Raises CannotImport if `common.pt` can't be read.
    """
    path = folder / COMMON
    try:
        with zipfile.ZipFile(io.BytesIO(read_regular(path, MAX_BYTES))) as archive:
            name = next(entry.filename for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
            if archive.getinfo(name).file_size > MAX_PICKLE_BYTES:
                raise CannotImport(f"{path} has more than {MAX_PICKLE_BYTES:,} bytes of arguments", code="out-of-range")
            common = inert_load(archive.read(name), {})
    except CannotImport:
        raise
    except (OSError, Unreadable) as error:
        raise CannotImport(f"{path} can't be read: {error}", code="unreadable") from error
    except Exception as error:  # a damaged pickle can raise any error
        raise CannotImport(f"{path} can't be read: {first_line(error)}", code="unreadable") from error
    stored = common.get(ARGUMENTS) if isinstance(common, dict) else None
    if not isinstance(stored, Record) or stored.named != "argparse.Namespace" or not isinstance(stored.state, dict):
        return {}
    return {name: value for name, value in stored.state.items() if isinstance(name, str)}
