"""A folder of prepared tokens: its format, how to open it, and the checks that need no tokens.

    manifest.json                       vocabulary size, eos token, dtype, and every shard's size, counts and digest
    tokenizer.json                      the tokenizer that made the tokens, in the format of the `tokenizers` package
    train/SOURCE/index.json             index of an MDS dataset, as mosaicml-streaming writes it; each sample holds a
                                        document's tokens, and a loss mask if not every token counts in the loss
    train/SOURCE/PART/shard.00000.mds   the dataset's shards; named .mds.zstd if they are compressed
    train/SOURCE/lengths.npy            number of tokens in each document, including the eos at its end, as uint32
    validation/SOURCE/...               the same files for the held-out documents

Documents are stored without regard to `seq_len`, so phases with different `seq_len` can read the same folder. Nothing
here needs torch. Opening a folder reads no tokens, and compares only the sizes of shards with the manifest.
`mds/store.py` compares a shard's digest with the manifest when it first uses the shard.
"""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hybridtron.data.manifest import DIGEST, DataManifest, FolderError
from hybridtron.safe_open import Unreadable, path_inside, read_regular
from hybridtron.storage.digest import digest_of

MAX_MANIFEST_BYTES = 2**30  # bytes, enough for four million shards
MAX_INDEX_BYTES = 2**28  # bytes of one source's index.json, enough for half a million shards
MAX_TOKENIZER_BYTES = 2**28  # bytes; a vocabulary of 256 thousand entries takes 2**25
MIN_VOCABULARY = 300  # entries for the 256 bytes, for eos, and for a few merges


@dataclass(frozen=True)
class TokenFolder:
    """An opened folder: its path, its manifest, and the manifest's digest.

    remote: URL from which shards are fetched into the cache, or path of a local folder that is copied into the cache;
        `path` is then the folder's copy in the cache. None for a local folder that is read in place
    checked: True if another process of this machine, in the same run, compares sizes and digests, so that this
        process need not
    """

    path: Path
    manifest: DataManifest
    digest: str
    remote: str | None = None
    checked: bool = False

    @staticmethod
    def unchecked(path: Path) -> TokenFolder:
        """Read a folder's manifest, without checking other files."""
        text = read_regular(path / "manifest.json", MAX_MANIFEST_BYTES).decode()
        return TokenFolder(path, DataManifest.parse(text, path), digest_of(text.encode()))

    @staticmethod
    def open(path: Path, checked: bool = False) -> TokenFolder:
        """Open a local folder; raise FolderError if a shard's size or the tokenizer differs from the manifest.

        With `checked` these are not compared.
        """
        try:
            if not path.is_dir():
                if path.exists():
                    raise FolderError(path, "is not a folder")
                raise FolderError(path, "does not exist", code="no-file")
            folder = replace(TokenFolder.unchecked(path), checked=checked)
            if not checked:
                folder._check_sizes()
                folder.verified("tokenizer.json")
        except FileNotFoundError as error:
            missing = Path(error.filename).relative_to(path)
            if str(missing) == "manifest.json":
                why = ", so it is not a folder of prepared tokens"
            else:
                why = ", although its manifest lists this file"
            raise FolderError(path, f"has no {missing}{why}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise FolderError(path, f"can't be read: {error}") from error
        return folder

    @property
    def name(self) -> str:
        """A remote folder's URL, or a local folder's own path, for messages."""
        return self.remote or str(self.path)

    @property
    def tokenizer_file(self) -> Path:
        """Path of the folder's tokenizer.json."""
        return self.path / "tokenizer.json"

    def source_path(self, split: str, source: str) -> Path:
        """Return the folder that holds a source's shards."""
        return self.path / split / source

    def verified(self, name: str) -> bytes:
        """Return the bytes of a file that is not a shard; raise FolderError if its digest differs from the manifest.

        name: the file's path in the folder; the file is tokenizer.json, or a source's index.json or lengths.npy
        """
        digest, size = self.manifest.beside[name]
        try:
            if (file := path_inside(self.path, name)) is None:
                raise Unreadable("it leads, or could lead, out of the folder, so it was not opened")
            data = read_regular(file, size + MAX_INDEX_BYTES)
        except OSError as error:
            raise FolderError(f"{self.name}/{name}", f"can't be read: {error}") from error
        if digest_of(data) != digest:
            raise FolderError(f"{self.name}/{name}", "differs from its digest in the manifest")
        return data

    def packed_digests(self, split: str, source: str) -> list[str | None]:
        """Return the digest of each shard's compressed file; None for a shard that is stored uncompressed.

        The digests are read from index.json, which is written for mosaicml-streaming; everything else is read from the
        manifest. The digest of index.json is checked, so its contents need not be compared with the manifest.
        """
        if self.checked and self.manifest.compression is None:
            return [None] * len(self.manifest.splits[split][source].shards)
        stored = self.verified(name := f"{split}/{source}/index.json")
        try:
            packed = [entry["zip_data"] for entry in json.loads(stored)["shards"]]
            digests = [None if info is None else info["hashes"][DIGEST] for info in packed]
            return [digest for digest, _ in zip(digests, self.manifest.splits[split][source].shards, strict=True)]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FolderError(f"{self.name}/{name}", f"does not parse: {error!r}") from error

    def lengths(self, split: str, source: str) -> np.ndarray:
        """Return the number of tokens in each document, as memory-mapped uint32.

        Unless the folder is `checked`, the digest and the sum are compared with the manifest.
        """
        of_source = self.manifest.splits[split][source]
        name = f"{split}/{source}/lengths.npy"
        if not self.checked:
            self.verified(name)
        try:
            lengths = np.load(self.path / name, mmap_mode="r" if of_source.documents else None)
        except (ValueError, EOFError, OSError) as error:
            raise FolderError(f"{self.name}/{name}", f"can't be read: {error}") from error
        if lengths.shape != (of_source.documents,) or lengths.dtype != np.uint32:
            fault = f"is {lengths.dtype}{lengths.shape}, but the manifest says uint32{(of_source.documents,)}"
            raise FolderError(f"{self.name}/{name}", fault)
        if self.checked:
            return lengths
        if int(lengths.sum(dtype=np.int64)) != of_source.tokens or (len(lengths) and lengths.min() < 1):
            raise FolderError(f"{self.name}/{name}", f"holds a 0, or its sum is not {of_source.tokens} (manifest.json)")
        return lengths

    def _check_sizes(self) -> None:
        """Raise FolderError if a shard's size differs from the manifest, or FileNotFoundError if a file is missing."""
        for name in self.manifest.beside:
            _size(self.path / name)
        for where, shard in self.manifest.shards():
            name = f"{where}/{self.manifest.stored_name(shard)}"
            if shard.packed is None:
                expected = shard.size
            else:
                expected = shard.packed
            if (actual := _size(self.path / name)) != expected:
                if not actual:
                    kind = "empty"
                elif actual < expected:
                    kind = "truncated"
                else:
                    kind = "too long"
                raise FolderError(self.path, f"has a shard that is {kind}: {name} has {actual} of {expected} bytes")


def _size(file: Path) -> int:
    """Return a regular file's size in bytes; raise OSError for anything else."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable(f"{file} is not a regular file")
    return status.st_size
