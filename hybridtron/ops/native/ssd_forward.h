// Forward pass of SSD; equations in ssd.h.
#pragma once
#include "ssd.h"

template <class S> static void outputs(SegmentOfHeads<S> &s, const S *delta, const S *own) {
  const int64_t padded = s.padded;
  const S D = s.D;
  const Matrix<S> made{s.made, padded};
  if (s.sees) product<S, false>(made, {s.c, s.across, 1}, {s.state(), padded}, s.tokens, padded, s.of.states);
  for (int64_t t = 0; t < s.tokens; t++)
    for (int64_t k = t * padded; k < (t + 1) * padded; k += Lanes<S>::W)
      store(s.made + k, (s.sees ? load(s.made + k) * s.since[t] : V<S>{}) + load(s.x + k) * D);
  for (int64_t i = 0; i < s.tokens; i++)
    for (int64_t j = 0; j < s.wide(i); j += Lanes<S>::W)
      store(s.pairs + i * CHUNK + j, load(s.scores + i * CHUNK + j) * s.between(i, j) * load(delta + j));
  for (int64_t i = 0; s.of.own.data && i < s.tokens; i++) s.pairs[i * CHUNK + i] = s.scores[i * CHUNK + i] * own[i];
  s.over_rows([&](int64_t i, int64_t rows) {
    product<S, true>({s.made + i * padded, padded}, {s.pairs + i * CHUNK, CHUNK, 1}, {s.x, padded}, rows, padded,
                     s.deep(i));
  });
  for (int64_t t = 0; t < s.tokens; t++)
    write(s.made + t * padded, s.of.y, s.row, s.start + t, s.head * s.of.size, s.of.size);
}

template <class S> static void next_state(SegmentOfHeads<S> &s, const S *delta) {
  S *state = s.state();
  for (int64_t k = 0; k < s.of.states * s.padded; k += Lanes<S>::W)
    store(state + k, s.sees ? load(state + k) * s.whole : V<S>{});
  for (int64_t t = 0; t < s.tokens; t++) s.scale(s.scaled + t * s.padded, s.x + t * s.padded, s.to_end[t] * delta[t]);
  product<S, true>({state, s.padded}, {s.b, 1, s.across}, {s.scaled, s.padded}, s.of.states, s.padded, s.tokens);
}

template <class S> static void forward_unit(void *task, int unit, char *scratch) {
  const Ssd<S> &of = *(const Ssd<S> *)task;
  SegmentOfHeads<S> s(of, scratch);
  const int64_t row = unit / of.units();
  for (int64_t chunk = 0; chunk < of.chunks(); chunk++) {
    bool begins = true;
    s.over_segments(row, unit % of.units(), chunk, true, [&] {
      for (int64_t number = 0; number < of.unit; number++) {
        s.enter_head(number);
        if (begins && of.kept) memcpy(s.kept(chunk), s.state(), of.states * s.padded * sizeof(S));
        const S *delta = s.delta + number * CHUNK;
        outputs(s, delta, s.own + number * CHUNK);
        if (s.feeds) next_state(s, delta);
      }
      begins = false;
    });
  }
}
