"""What the kernels of our own read, write and compute, counted on paper, for the benchmark that holds times against
it. It is a floor: each tensor is read or written once for every time that an algorithm has to, and caches lose nothing.

It says nothing of how fast a kernel is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Of one call: bytes to and from the device's memory, and floating-point operations (exp counts as one)."""

    bytes: int
    flops: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


SCAN_CHUNK = 128  # tokens that one program of the selective scan walks over
SCAN_TILE = 16  # tokens of which its backward pass has all states at a time; they divide a chunk
SCAN_CHANNELS = 32  # of one warp: they leave one partial sum of the gradients of B and C


def selective_scan_cost(
    rows: int, length: int, channels: int, states: int, value_bytes: int, gate: bool, backward: bool
) -> Cost:
    """One pass of Mamba-1's scan, whose x, dt, B, C, z and y have `value_bytes` bytes a value; sums are fp32.

    Forward: `walk` reads x, dt and B, `chain` reads and writes a state a chunk, `retrace` reads all and writes y.
    Backward: `retrace` reads all, the gradient of y and a state a chunk, writes z's gradient and a state a tile;
    `walk_back` reads dt, C, z and the gradient of y and writes a state's gradient a tile; `chain` reads and writes
    these; the last kernel reads everything and writes gradients and partial sums, which are read once more.
    """
    token, narrow = rows * length * channels, rows * length * states  # values of x, and of B
    gated = token if gate else 0
    per_chunk, per_tile = (rows * -(-length // size) * channels * states for size in (SCAN_CHUNK, SCAN_TILE))
    if not backward:
        moved = 2 * token + narrow + (3 * token + gated + 2 * narrow)
        kept = per_chunk * (1 + 2 + 1) + 2 * per_chunk // states
        # delta A, exp, delta x B (one multiplication an n), h; then that again, and C h added
        return Cost(value_bytes * moved + 4 * kept, (5 + 7) * token * states)
    moved = (2 * token + 3 * gated + (2 if gate else 1) * narrow) + (2 * token + gated + narrow) + (5 * token + gated)
    kept = per_chunk + per_tile * (1 + 1 + 2 + 3 + 1)  # the last: partial sums for A, written over and read
    per_channel = per_tile // states * (2 + 4)  # sums of delta; partial sums for D and dt_bias
    sums = 4 * narrow * -(-channels // SCAN_CHANNELS) + 6 * narrow
    flops = (7 if gate else 5) + 6 + 22
    return Cost(value_bytes * moved + 4 * (kept + per_channel + sums), flops * token * states)


def linear_cross_entropy_cost(tokens: int, width: int, vocabulary: int, value_bytes: int, parts: int) -> Cost:
    """The head's loss with its gradients, whose logits are made in `parts` parts; values of 2 bytes, or of 4.

    Logits are written by a product, read for their sums, read and written as gradients, and read by two products. The
    weight is read twice a part; its gradient is written once, or with several parts added up in fp32, of which the
    first is a copy and bf16 costs a cast at the end.
    """
    logits, weights, stream = tokens * vocabulary, vocabulary * width, tokens * width
    product = 0 if value_bytes == 4 else 2 * value_bytes  # written, and read by the sum
    summed = (8 + product) * (parts - 1) + product + 4 + (0 if value_bytes == 4 else 4 + value_bytes)
    of_weight = value_bytes if parts == 1 else summed
    moved = value_bytes * (6 * logits + 2 * parts * weights + 3 * stream) + of_weight * weights
    # a logit less the greatest, exp, added; less lse, exp, scaled
    return Cost(bytes=moved, flops=6 * logits * width + 6 * logits)


def ssd_cost(
    rows: int,
    length: int,
    heads: int,
    head: int,
    groups: int,
    states: int,
    value_bytes: int,
    chunk: int,
    backward: bool,
) -> Cost:
    """One pass of the SSD scan in chunks of `chunk` tokens, of which a program has two parts; states and sums are fp32.

    Forward: `decays` reads dt and writes five numbers a token and head; `chunk_states` reads x and B, and writes a
    state a chunk; `pass_states` reads and writes it; `outputs` reads x, B, C and a state for each part, and writes y.
    Backward: the first three again, and once more for the gradients of states; `token_gradients` reads x, dy, B, C
    and two states, and writes dx; `group_gradients` twice reads x, dy and a state, and writes a gradient of B or C.
    B and C are read once for each head that shares them where caches fail; here they count once.
    """
    tokens = rows * length
    wide, narrow = tokens * heads * head, tokens * groups * states  # values of x, and of B
    kept = rows * -(-length // chunk) * heads * head * states  # of the states between chunks
    within, through = 2 * wide * chunk, 2 * wide * states  # a product over a chunk's tokens; one with a state
    scores = 2 * tokens * heads * chunk * states  # the product of B and C, made for every head
    if not backward:
        moved = value_bytes * (3 * wide + 3 * narrow + tokens * heads) + 4 * (4 * kept + 10 * tokens * heads)
        return Cost(moved, scores + within + 2 * through)
    states_moved = 4 * (3 * kept + 4 * kept + 2 * kept + 2 * kept)
    moved = value_bytes * (2 * (wide + narrow) + (3 * wide + 2 * narrow) + 2 * (2 * wide + narrow) + 2 * narrow)
    return Cost(moved + states_moved + 4 * 40 * tokens * heads, scores + 4 * within + 6 * through)


def rms_norm_cost(rows: int, channels: int, value_bytes: int, backward: bool) -> Cost:
    """Forward reads x and writes y; backward reads x and dy and writes dx. The weight is small beside them."""
    values = rows * channels
    return Cost((3 if backward else 2) * value_bytes * values, (9 if backward else 4) * values)


def add_rms_norm_cost(rows: int, channels: int, value_bytes: int, backward: bool) -> Cost:
    """As the norm, and besides: forward reads a second input and writes the sum; backward reads the sum's gradient."""
    values = rows * channels
    more = Cost((1 if backward else 2) * value_bytes * values, values)
    return rms_norm_cost(rows, channels, value_bytes, backward) + more


def causal_conv_cost(rows: int, length: int, channels: int, width: int, value_bytes: int, backward: bool) -> Cost:
    """Forward reads x and writes y; backward reads x and dy and writes dx. Weights are small beside them."""
    values = rows * length * channels
    flops = 2 * width + 4  # products and sums, SiLU; backward makes them again, and both gradients
    return Cost((3 if backward else 2) * value_bytes * values, (3 * flops if backward else flops) * values)
