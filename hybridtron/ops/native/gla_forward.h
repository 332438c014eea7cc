// Forward pass of gated linear attention; equations in gla.h.
#pragma once
#include "gla.h"

// Adds WIDE vectors of keys to A, lane by lane.
template <class S, int WIDE> static inline void scores_of_keys(GlaSegment<S> &s, int64_t n) {
  constexpr int64_t W = Lanes<S>::W, T = STEP_TOKENS;
  for (int64_t j = 0; j < s.tokens; j++) {
    V<S> carried[WIDE];  // E_ij k_j
    for (int w = 0; w < WIDE; w++) carried[w] = load(s.k + j * s.across + n + w * W);
    for (int64_t i = j; i < s.tokens; i++) {
      S *sum = s.sums + (i * T + j) * W;
      V<S> score = n ? load(sum) : V<S>{};
#pragma GCC unroll 4
      for (int w = 0; w < WIDE; w++) {
        if (i > j) carried[w] *= load(s.a + i * s.across + n + w * W);
        score += carried[w] * load(s.q + i * s.across + n + w * W);
      }
      store(sum, score);
    }
  }
}

// Adds up the lanes of A, with zeros above the diagonal.
template <class S> static void add_lanes(GlaSegment<S> &s) {
  constexpr int64_t T = STEP_TOKENS;
  for (int64_t i = 0; i < s.tokens; i++)
    for (int64_t j = 0; j < T; j++)
      s.scores[i * T + j] = j <= i ? total<S>(load(s.sums + (i * T + j) * Lanes<S>::W)) : 0;
}

template <class S> static void outputs(GlaSegment<S> &s) {
  constexpr int64_t W = Lanes<S>::W, T = STEP_TOKENS;
  const int64_t padded = s.padded;
  int64_t n = 0;
  for (; n + 4 * W <= s.across; n += 4 * W) scores_of_keys<S, 4>(s, n);
  for (; n < s.across; n += W) scores_of_keys<S, 1>(s, n);
  add_lanes(s);
  const Matrix<S> made{s.made, padded};
  product<S, false>(made, {s.scores, T, 1}, {s.v, padded}, s.tokens, padded, s.tokens);
  if (s.sees) product<S, true>(made, {s.read, s.across, 1}, {s.state(), padded}, s.tokens, padded, s.of.keys);
  for (int64_t t = 0; t < s.tokens; t++)
    write(s.made + t * padded, s.of.y, s.row, s.start + t, s.head * s.of.values, s.of.values);
}

template <class S> static void forward_head(void *task, int unit, char *scratch) {
  const Gla<S> &of = *(const Gla<S> *)task;
  GlaSegment<S> s(of, scratch);
  s.row = unit / of.heads, s.head = unit % of.heads;
  int64_t places[CHUNK + 1];
  for (int64_t chunk = 0; chunk < of.chunks(); chunk++) {
    if (of.kept) memcpy(s.kept(chunk), s.state(), of.states() * sizeof(S));
    const int64_t count = s.cut(chunk, places);
    for (int64_t c = 0; c < count; c++) {
      s.enter(places[c], places[c + 1]);
      s.enter_queries();
      outputs(s);
      if (s.feeds) s.next_state(s.state(), s.state());
    }
  }
}
