"""Upload an export to a model repository on the Hugging Face Hub.

    hybridtron push samba-hf mary/samba-421m                                   show what would be uploaded
    hybridtron push samba-hf mary/samba-421m --license apache-2.0 --upload     upload it

Without --upload, nothing is sent. The model card gets the license, and the export's origin: run, step, held-out loss
and commit. The checkpoint's path on this machine is not uploaded. For the token, run `hf auth login` once or set
HF_TOKEN. HF_ENDPOINT names another server.

Exit codes: 0 done, 2 the folder is not an export, or the server refused.
"""

from __future__ import annotations

import sys

from hybridtron.config.units import readable
from hybridtron.interop.push import CARD, push, require_name, uploads
from hybridtron.limits import path_of
from hybridtron.problems import CommandParser
from hybridtron.requirements import demand


def main(arguments: list[str]) -> int:
    """Upload an export, or show what would be uploaded. Returns the exit code."""
    parser = CommandParser(prog="hybridtron push", description="Upload an export to the Hugging Face Hub.")
    parser.add_argument("export", type=path_of, help="a folder that hybridtron export has written")
    parser.add_argument("repository", help="OWNER/NAME; made if there is none")
    parser.add_argument("--license", metavar="ID", help="the license for the model card, such as apache-2.0")
    parser.add_argument("--private", action="store_true", help="make a private repository")
    parser.add_argument("--upload", action="store_true", help="upload; without it, the command only shows the files")
    chosen = parser.parse_args(arguments)
    require_name(chosen.repository)
    files = uploads(chosen.export, chosen.license)
    if chosen.license is None:
        print("warning: no license is stated; others may not use the model: add --license ID", file=sys.stderr)
    if chosen.upload:
        demand("export")
        print(push(files, chosen.repository, chosen.private))
        return 0
    for file in files:
        print(f"{readable(file.size)}B  {file.name}")
    card = next(file.source for file in files if file.name == CARD)
    assert isinstance(card, bytes)
    print(f"\n{card.decode()}\nnothing was uploaded to {chosen.repository}: add --upload")
    return 0
