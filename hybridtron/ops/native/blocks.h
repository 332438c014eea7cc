// Blocks of tokens of a fixed size, and sums over all tokens that add up the blocks' sums in order.
#pragma once
#include "numbers.h"
#include "threads.h"
#include "vectors.h"

constexpr int BLOCK = 64, GROUP = 256;  // tokens, and independent channels, of a unit

static inline int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

template <class S> static inline int64_t lanes(int64_t channels) { return parts(channels, Lanes<S>::W) * Lanes<S>::W; }

// Reads a token's channels, padded with zeros to full vectors.
template <class S>
static inline void read_padded(S *to, const Tokens &from, int64_t r, int64_t t, int64_t first, int count) {
  for (int64_t i = count; i < lanes<S>(count); i++) to[i] = 0;
  read(to, from, r, t, first, count);
}

// Adds up `count` rows of `each` numbers, in place of the first row.
template <class S> static inline void add_up(S *sums, int64_t count, int64_t each) {
  for (int64_t k = 1; k < count; k++)
    for (int64_t i = 0; i < each; i++) sums[i] += sums[k * each + i];
}
