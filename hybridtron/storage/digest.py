"""The digest that data folders, checkpoints and the cache carry: XXH3 of 128 bits.

It finds what disks, memory and networks do by accident, at the speed of memory. It is no protection against somebody
who wants two files to have the same one.
"""

from __future__ import annotations

from mmap import mmap

import xxhash


def digest_of(data: bytes | memoryview | mmap) -> str:
    """32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)
