"""Compressed shards that differ from their description."""

from __future__ import annotations

import struct
import sys
import tracemalloc

import pytest

from hybridtron.data.mds import compression
from hybridtron.data.mds.compression import decompress_bytes
from tests.data.mosaic import compression as mosaics
from tests.slow import slow_except

DATA = b"some text, some more text " * 1000
KINDS = ["zstd", "zstd:19", "gz", "bz2", "br", "snappy"]


def packed(kind: str, data: bytes) -> bytes:
    return mosaics.compress(kind, data)


def frame(stated: int | None, blocks: int) -> bytes:
    """zstd that makes `blocks` times 128 KiB from four bytes each, whatever it states."""
    head = b"\x00\x88" if stated is None else b"\x80\x58" + struct.pack("<I", stated)
    body = b"".join(
        struct.pack("<I", 2**17 << 3 | 1 << 1 | (block == blocks - 1))[:3] + b"\0" for block in range(blocks)
    )
    return b"\x28\xb5\x2f\xfd" + head + body


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_000])
def test_compressed_data_is_unpacked(kind: str, size: int) -> None:
    data = (DATA * 3)[:size]
    assert decompress_bytes(kind, packed(kind, data), size) == data


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_another_size_is_refused(kind: str) -> None:
    whole = packed(kind, DATA)
    for data, size in ((whole, len(DATA) - 1), (whole, len(DATA) + 1), (whole[:-5], len(DATA)), (b"", 5), (b"x", 5)):
        with pytest.raises(ValueError, match=r"."):
            decompress_bytes(kind, data, size)


@pytest.mark.parametrize("kind", slow_except(KINDS, *(kind for kind in KINDS if kind != "br")))
def test_a_decompression_bomb_takes_no_memory(kind: str) -> None:
    bomb = packed(kind, bytes(2**26))
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"."):
        decompress_bytes(kind, bomb, 11_010)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


@pytest.mark.parametrize("stated", [None, 1000, 8000 * 2**17])
@pytest.mark.parametrize("before", [b"", packed("zstd", b"x" * 1000)])
def test_a_zstd_bomb_with_a_wrong_size_is_refused(stated: int | None, before: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decompress_bytes("zstd", before + frame(stated, 8000), 1000)


def test_impossible_sizes_are_refused() -> None:
    for size in (-1, 2**62):
        with pytest.raises(ValueError, match=r"."):
            decompress_bytes("zstd", packed("zstd", DATA), size)


def test_zstd_bytes_equal_those_of_mosaicml_streaming() -> None:
    for kind in ("zstd", "zstd:1", "zstd:19"):
        assert compression.compress_bytes(kind, DATA) == packed(kind, DATA)
    with pytest.raises(ValueError, match="zstd"):
        compression.compress_bytes("gz", DATA)


@pytest.mark.parametrize(("kind", "name"), [("zstd", "zstd"), ("br", "brotli"), ("snappy", "snappy")])
def test_an_absent_package_is_named(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = packed(kind, DATA)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"pip install .*{name}"):
        decompress_bytes(kind, data, len(DATA))


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="'lz77'"):
        decompress_bytes("lz77", DATA, 5)
