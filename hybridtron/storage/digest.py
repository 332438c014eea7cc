"""The digest of files in data folders, checkpoints and the cache: XXH3 with 128 bits.

The digest detects accidental damage by disks, memory and networks. Computing it takes about as long as reading the
bytes from memory. The digest does not protect against attackers, who can construct another file with an equal digest.
"""

from __future__ import annotations

from mmap import mmap

import xxhash


def digest_of(data: bytes | memoryview | mmap) -> str:
    """Return the digest of bytes as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)
