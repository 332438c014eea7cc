"""Verification finds every fault of a folder, whichever file it is in, and nothing in a whole one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from hybridtron.data.folder import TokenFolder
from hybridtron.data.mds.format import mask_start
from hybridtron.data.mds.store import DataError, DocumentStore
from hybridtron.data.mds.verify import REPORTED, verify
from hybridtron.data.prepare.writer import write_folder
from hybridtron.storage.cache import CacheOptions
from hybridtron.storage.digest import digest_of
from tests.data.mosaic import MDSWriter

EOS = 0
VOCAB = 50
FIRST, SHARD = (f"train/web/part-00000/shard.{number:05}.mds" for number in range(2))
TOKENIZER = Tokenizer(WordLevel({f"word{number}": number for number in range(VOCAB)}, unk_token="word1")).to_str()


@pytest.fixture(params=[None, "zstd:3"], ids=["plain", "zstd"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> TokenFolder:
    return make(tmp_path / "data", request.param)


@pytest.fixture
def plain(tmp_path: Path) -> TokenFolder:
    return make(tmp_path / "data", None)


def make(
    path: Path, compression: str | None, tokenizer: str = TOKENIZER, masked: bool = False, entry: int = 1
) -> TokenFolder:
    """Write a folder. With masks every token but the first of each document is learned, in one mask entry."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, VOCAB, draw.integers(1, 300)) for _ in range(60)]
    splits = {"train": {"web": documents[:40], "code": documents[40:55]}, "validation": {"web": documents[55:]}}
    masks = {
        split: {
            source: [np.arange(len(document) + 1).clip(0, 1) * entry for document in by_source]
            for source, by_source in of.items()
        }
        for split, of in splits.items()
    }
    masks_if_masked = masks if masked else None
    return write_folder(
        path, splits, tokenizer, VOCAB, EOS, {}, shard_size=3000, compression=compression, masks=masks_if_masked
    )


def stored(folder: TokenFolder, shard: str = SHARD) -> Path:
    return folder.path / (shard if folder.manifest.compression is None else f"{shard}.zstd")


def faults(folder: TokenFolder) -> list[str]:
    return verify(folder.path).faults


def test_an_undamaged_folder_has_no_faults(folder: TokenFolder):
    progress: list[tuple[int, int]] = []
    report = verify(folder.path, 1, lambda done, whole: progress.append((done, whole)))
    assert report.faults == []
    assert report.sources == 2
    assert report.tokens == folder.manifest.tokens("train") + folder.manifest.tokens("validation")
    assert progress == [(number + 1, report.shards) for number in range(report.shards)]


def test_two_processes_report_the_faults_of_one(plain: TokenFolder):
    stored(plain).write_bytes(stored(plain).read_bytes()[:-1])
    assert verify(plain.path, 2) == verify(plain.path, 1)
    assert len(faults(plain)) == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "has 0 of"),
        (lambda data: data[: len(data) // 2], "bytes"),
        (lambda data: data + b"0", "bytes"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "differs from its digest"),
    ],
)
def test_a_damaged_shard_is_reported_by_its_name(folder: TokenFolder, damage: Callable[[bytes], bytes], message: str):
    file = stored(folder)
    file.write_bytes(damage(file.read_bytes()))
    reported = faults(folder)
    assert reported
    assert message in reported[0]
    assert all(fault.startswith(f"{file.relative_to(folder.path)}: ") for fault in reported)


def test_every_fault_is_reported(folder: TokenFolder, tmp_path: Path):
    stored(folder).unlink()
    other = stored(folder, "train/code/part-00000/shard.00000.mds")
    other.write_bytes(other.read_bytes()[:-5])
    lengths = folder.path / "validation/web/lengths.npy"
    lengths.write_bytes(lengths.read_bytes()[:-1])
    index = folder.path / "train/code/index.json"
    index.write_text(index.read_text().replace('"tokens"', '"texts"'))
    (folder.path / "tokenizer.json").write_text("{")
    link = stored(folder, "train/web/part-00000/shard.00000.mds")
    shutil.move(link, tmp_path / "outside")
    link.symlink_to(tmp_path / "outside")
    reported = faults(folder)
    for expected in (
        "tokenizer.json: differs from its digest",
        "train/code/index.json: differs from its digest",
        "validation/web/lengths.npy: ",
        f"{stored(folder).relative_to(folder.path)}: is missing",
        f"{other.relative_to(folder.path)}: has ",
        f"{link.relative_to(folder.path)}: ",
    ):
        assert any(fault.startswith(expected) for fault in reported), (expected, reported)


def rewrite(folder: TokenFolder, documents: list[np.ndarray]) -> None:
    """Give the folder another first shard of train/code, with digests that agree, as a faulty writer would."""
    source = folder.path / "train/code"
    part = source / "part-00000"
    shutil.rmtree(part)
    with MDSWriter(out=str(part), columns={"tokens": "ndarray:uint16"}, hashes=["xxh3_128"]) as writer:
        for document in documents:
            writer.write({"tokens": document.astype(np.uint16)})
    (entry,) = json.loads((part / "index.json").read_text())["shards"]
    (part / "index.json").unlink()
    raw = entry["raw_data"] | {"basename": f"part-00000/{entry['raw_data']['basename']}"}
    (source / "index.json").write_text(json.dumps({"version": 2, "shards": [entry | {"raw_data": raw}]}))
    np.save(source / "lengths.npy", np.array([len(document) for document in documents], dtype=np.uint32))
    manifest = json.loads((folder.path / "manifest.json").read_text())
    tokens = sum(len(document) for document in documents)
    manifest["splits"]["train"]["code"] = {
        "index": digest_of((source / "index.json").read_bytes()),
        "lengths": digest_of((source / "lengths.npy").read_bytes()),
        "shards": [
            {
                "file": raw["basename"],
                "documents": len(documents),
                "tokens": tokens,
                "size": raw["bytes"],
                "digest": raw["hashes"]["xxh3_128"],
                "packed": None,
            }
        ],
    }
    (folder.path / "manifest.json").write_text(json.dumps(manifest | {"digest": None}))


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_wrong_masks_are_reported(tmp_path: Path, compression: str | None):
    whole = make(tmp_path / "whole", compression, masked=True)
    assert verify(whole.path).faults == []
    shard = whole.manifest.splits["train"]["web"].shards[1]
    name = stored(whole).relative_to(whole.path)
    half = make(tmp_path / "half", compression, masked=True, entry=2)
    expected = f"{stored(half, FIRST).relative_to(half.path)}: sample 0 has a mask with the entry 2, not 0 or 1"
    assert expected in faults(half)
    manifest = (whole.path / "manifest.json").read_text().replace(f'"learned": {shard.learned}\n', '"learned": 7\n')
    (whole.path / "manifest.json").write_text(json.dumps(json.loads(manifest) | {"digest": None}))
    assert faults(whole) == [f"{name}: has {shard.learned} learned tokens, but 7 by the manifest"]


def test_a_damaged_mask_is_reported(tmp_path: Path):
    """Damage one entry of one mask, the 20th of the shard's first document; its tokens stay unchanged."""
    folder = make(tmp_path / "data", None, masked=True)
    document = int(folder.manifest.splits["train"]["web"].shards[0].documents)
    length = int(folder.lengths("train", "web")[document])
    data = bytearray(stored(folder).read_bytes())
    place = mask_start(int(np.frombuffer(data, np.uint32, 2, 4)[1]), length, 2) + 20
    assert data[place] in (0, 1)
    data[place] ^= 1
    stored(folder).write_bytes(data)
    assert faults(folder) == [f"{SHARD}: differs from its digest in the manifest"]
    store = DocumentStore(TokenFolder.open(folder.path), "train", "web", CacheOptions(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"shard\.00001\.mds differs from its digest"):
        store.read_mask(document, 0, length)


def test_tokens_and_ends_of_a_faulty_writer_are_reported(plain: TokenFolder):
    good = np.array([3, 4, EOS])
    rewrite(plain, [good, np.array([3, VOCAB, EOS]), np.array([3, 4]), good])
    name = "train/code/part-00000/shard.00000.mds"
    assert faults(plain) == [
        f"{name}: sample 1 has the token 50, but the vocabulary has 50 entries",
        f"{name}: sample 2 ends with token 4, not with the eos token 0",
    ]
    rewrite(plain, [np.array([3, 4])] * (REPORTED + 5))
    assert len(faults(plain)) == REPORTED + 1
    assert faults(plain)[-1] == f"{name}: 5 more samples are faulty"


def test_lengths_of_other_documents_are_reported(plain: TokenFolder):
    rewrite(plain, [np.array([3, 4, EOS]), np.array([5, EOS])])
    file = plain.path / "train/code/lengths.npy"
    np.save(file, np.array([2, 3], dtype=np.uint32))
    manifest = json.loads((plain.path / "manifest.json").read_text())
    manifest["splits"]["train"]["code"]["lengths"] = digest_of(file.read_bytes())
    (plain.path / "manifest.json").write_text(json.dumps(manifest | {"digest": None}))
    name = "train/code/part-00000/shard.00000.mds"
    assert faults(plain) == [
        f"{name}: sample 0 does not have the size of 2 tokens, the document's length in lengths.npy",
        f"{name}: sample 1 does not have the size of 3 tokens, the document's length in lengths.npy",
    ]


def test_a_tokenizer_larger_than_the_vocabulary_is_reported(tmp_path: Path):
    large = Tokenizer(WordLevel({f"word{number}": number for number in range(VOCAB + 7)}, unk_token="word1")).to_str()
    folder = make(tmp_path / "data", None, large)
    assert faults(folder) == ["tokenizer.json: has the token 56, but the manifest has a vocabulary of 50 entries"]


@pytest.mark.parametrize(
    ("change", "message"), [({"format": 1}, "format 1"), ({"dtype": "int8"}, "int8"), (None, "No such")]
)
def test_an_unreadable_manifest_is_reported(plain: TokenFolder, change: dict | None, message: str):
    file = plain.path / "manifest.json"
    if change is None:
        file.unlink()
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    (fault,) = faults(plain)
    assert fault.startswith("manifest.json: ")
    assert message in fault


def test_verifying_uncompressed_shards_needs_no_torch(plain: TokenFolder):
    code = (
        "import sys; from pathlib import Path; from hybridtron.data.mds.verify import verify\n"
        f"assert not verify(Path({str(plain.path)!r})).faults; sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
