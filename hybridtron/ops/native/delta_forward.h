// Forward pass of the delta rule; equations in delta.h.
#pragma once
#include "delta_pairs.h"

// Computes A, P, w and u from the state before the segment.
template <class S> static void solve(SegmentOfDelta<S> &s, S *before) {
  constexpr int64_t C = CHUNK, W = Lanes<S>::W;
  const int64_t padded = s.padded;
  if (s.by_head()) scores_by_head(s);
  else scores_by_channel(s);
  if (s.sees)
    product<S, true>({s.w, padded}, {s.minus_k_from, s.across, 1}, {before, padded}, s.tokens, padded, s.of.states);
  s.over_bands([&](int64_t from, int64_t to) {
    const Matrix<S> found{s.w + from * padded, padded};
    product<S, true>(found, {s.minus_found + from * C, C, 1}, {s.u, padded}, to - from, padded, from);
    for (int64_t i = from; i < to; i++)
      for (int64_t p = 0; p < padded; p += W) {
        V<S> w = load(s.w + i * padded + p);
        for (int64_t j = from; j < i; j++) w += s.minus_found[i * C + j] * load(s.u + j * padded + p);
        store(s.w + i * padded + p, w), store(s.u + i * padded + p, w * s.beta[i]);
      }
  });
}

template <class S> static void outputs(SegmentOfDelta<S> &s) {
  const int64_t padded = s.padded;
  if (s.sees)
    product<S, false>({s.made, padded}, {s.q_from, s.across, 1}, {s.state(), padded}, s.tokens, padded, s.of.states);
  else
    memset(s.made, 0, s.tokens * padded * sizeof(S));
  s.over_bands([&](int64_t from, int64_t to) {
    const Left<S> scores{s.scores + from * CHUNK, CHUNK, 1};
    product<S, true>({s.made + from * padded, padded}, scores, {s.u, padded}, to - from, padded, to);
  });
  for (int64_t t = 0; t < s.tokens; t++)
    write(s.made + t * padded, s.of.y, s.row, s.start + t, s.head * s.of.size, s.of.size);
}

template <class S> static void next_state(SegmentOfDelta<S> &s) {
  S *state = s.state();
  const S *whole = s.since + (s.tokens - 1) * s.across;
  for (int64_t n = 0; n < s.of.states; n++)
    for (int64_t p = n * s.padded; p < (n + 1) * s.padded; p += Lanes<S>::W)
      store(state + p, s.sees ? load(state + p) * whole[n] : V<S>{});
  product<S, true>({state, s.padded}, {s.k_to, 1, s.across}, {s.u, s.padded}, s.of.states, s.padded, s.tokens);
}

template <class S> static void forward_head(void *task, int unit, char *scratch) {
  const Delta<S> &of = *(const Delta<S> *)task;
  SegmentOfDelta<S> s(of, scratch);
  for (int64_t chunk = 0; chunk < of.chunks(); chunk++) {
    bool begins = true;
    s.over_segments(unit, chunk, true, [&] {
      if (begins && of.kept) memcpy(s.kept(chunk), s.state(), of.states * s.padded * sizeof(S));
      begins = false;
      solve(s, s.state());
      outputs(s);
      if (s.feeds) next_state(s);
    });
  }
}
