"""Upload of an exported folder to a model repository on the Hugging Face Hub, or on a server with the same interface.

The repository gets the export's files. Two of them are changed: the model card names the license and the origin, and
`hybridtron_export.json` has the checkpoint's name instead of its path on this machine. huggingface_hub takes the token
from `hf auth login` or from HF_TOKEN, and the server from HF_ENDPOINT.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtron.config.export_class import RECORD
from hybridtron.nested import NotParsed, json_of
from hybridtron.problems import Unusable, first_line
from hybridtron.safe_open import Unreadable, read_regular

CARD = "README.md"
MAX_TEXT_BYTES = 2**24
NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
UNSTATED = "- license: none is stated"


class CannotPush(Unusable):
    """Raised if a folder can't be uploaded. The message has the reason and a cure."""


@dataclass(frozen=True)
class Upload:
    """A file for the repository: its content, or the path of a file whose content is unchanged."""

    name: str
    source: bytes | Path

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        if isinstance(self.source, Path):
            return self.source.stat().st_size
        return len(self.source)


def uploads(folder: Path, license_id: str | None) -> list[Upload]:
    """List the files to upload. Raises CannotPush if the folder is not an export."""
    record = _record(folder)
    card = _text(folder, CARD)
    changed = {
        CARD: card_for_hub(card, record, license_id).encode(),
        RECORD: (json.dumps(_without_path(record), indent=2) + "\n").encode(),
    }
    paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return [Upload(path.name, changed.get(path.name, path)) for path in paths]


def card_for_hub(card: str, record: dict[str, Any], license_id: str | None) -> str:
    """Return the model card with the license and the export's origin."""
    origin = [f"- exported from `{_without_path(record)['checkpoint']}`, step {record['step']}"]
    if (loss := record.get("held_out_loss")) is not None:
        origin.append(f"- held-out loss {loss:.4f}, measured at this step")
    origin.append(f"- weights in {record['dtype']}")
    versions = record["versions"]
    code = f"hybridtron {versions['hybridtron']}" if "hybridtron" in versions else "hybridtron"
    if (commit := record.get("commit")) is not None:
        code += f", commit {commit}"
    origin.append(f"- written by {code}")
    if license_id is not None:
        card = card.replace("---\n", f"---\nlicense: {license_id}\n", 1).replace(
            UNSTATED, f"- license: {license_id}", 1
        )
    return card.rstrip("\n") + "\n\n## Origin\n\n" + "\n".join(origin) + "\n"


def require_name(repository: str) -> None:
    """Raise CannotPush if this is not a repository's name."""
    if re.fullmatch(f"{NAME}/{NAME}", repository) is None or "--" in repository or ".." in repository:
        raise CannotPush(
            f"{repository!r} is not a repository: give its owner and name, such as mary/samba-421m", code="malformed"
        )


def push(files: list[Upload], repository: str, private: bool, endpoint: str | None = None) -> str:
    """Upload files in one commit, after making the repository if there is none. Returns the commit's address.

    endpoint: address of the server; None for huggingface_hub's default
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError  # of httpx, from release 2.0 of httpx2

    hub = HfApi(endpoint=endpoint)
    operations = [CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=file.source) for file in files]
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        commit = hub.create_commit(repository, operations, commit_message="Upload an export of hybridtron")
    except (HTTPError, LocalTokenNotFoundError) as error:
        cure = "check the name and the network, and run hf auth login with a token that may write"
        raise CannotPush(f"{repository} was not uploaded: {first_line(error)}; {cure}", code="unavailable") from error
    return str(commit.commit_url)


def _record(folder: Path) -> dict[str, Any]:
    if not (folder / RECORD).is_file():
        raise CannotPush(f"{folder} has no {RECORD}: name a folder that hybridtron export has written", code="no-file")
    try:
        record = json_of(_text(folder, RECORD))
        missing = {"checkpoint", "step", "dtype", "versions"} - record.keys()
    except (NotParsed, AttributeError) as error:
        raise CannotPush(f"{folder / RECORD} is damaged ({error}): export again", code="unreadable") from error
    if missing:
        raise CannotPush(f"{folder / RECORD} lacks {', '.join(sorted(missing))}: export again", code="unreadable")
    return record


def _text(folder: Path, name: str) -> str:
    try:
        return read_regular(folder / name, MAX_TEXT_BYTES).decode()
    except (OSError, Unreadable, UnicodeDecodeError) as error:
        raise CannotPush(f"{folder / name} can't be read ({error}): export again", code="unreadable") from error


def _without_path(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with the last folders of the checkpoint's path: RUN/checkpoints/STEP."""
    return record | {"checkpoint": "/".join(Path(record["checkpoint"]).parts[-3:])}
