"""The digest of data folders, checkpoints and the cache: XXH3 with 128 bits.

It detects accidental damage by disks, memory and networks, at the speed of memory. It does not protect against files
that somebody constructs to have the same digest.
"""

from __future__ import annotations

from mmap import mmap

import xxhash


def digest_of(data: bytes | memoryview | mmap) -> str:
    """Return the digest as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)
