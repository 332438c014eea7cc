// Backward pass of gated linear attention; equations in gla.h.
#pragma once
#include "gla_forward.h"

// Transposes: tokens become lanes, with zeros beyond the last one.
template <class S> static void turn_tokens(const GlaSegment<S> &s, S *to, const S *from) {
  constexpr int64_t T = STEP_TOKENS;
  for (int64_t p = 0; p < s.of.values; p++) {
    for (int64_t t = 0; t < s.tokens; t++) to[p * T + t] = from[t * s.padded + p];
    for (int64_t t = s.tokens; t < s.filled(); t++) to[p * T + t] = 0;
  }
}

// Computes A again, and dq and dk through pairs of different tokens, for WIDE vectors of keys.
template <class S, int WIDE> static inline void pairs_of_keys(GlaSegment<S> &s, int64_t n) {
  constexpr int64_t W = Lanes<S>::W, T = STEP_TOKENS;
  for (int64_t t = 0; t < s.tokens; t++)
    for (int w = 0; w < WIDE; w++) store(s.of_q + t * s.across + n + w * W, V<S>{});
  for (int64_t j = 0; j < s.tokens; j++) {
    V<S> key[WIDE], decay[WIDE], of_key[WIDE];
    S *diagonal = s.sums + (j * T + j) * W;
    V<S> score = n ? load(diagonal) : V<S>{};
    for (int w = 0; w < WIDE; w++) {
      key[w] = load(s.k + j * s.across + n + w * W), decay[w] = same<S>(1), of_key[w] = V<S>{};
      score += key[w] * load(s.q + j * s.across + n + w * W);
    }
    store(diagonal, score);
    for (int64_t i = j + 1; i < s.tokens; i++) {
      S *sum = s.sums + (i * T + j) * W;
      const S inner = s.inner[i * T + j];
      score = n ? load(sum) : V<S>{};
#pragma GCC unroll 4
      for (int w = 0; w < WIDE; w++) {
        const int64_t at = i * s.across + n + w * W;
        decay[w] *= load(s.a + at);
        const V<S> carried = decay[w] * key[w], query = load(s.q + at);
        score += carried * query;
        store(s.of_q + at, load(s.of_q + at) + carried * inner);
        of_key[w] += decay[w] * query * inner;
      }
      store(sum, score);
    }
    for (int w = 0; w < WIDE; w++) store(s.of_k + j * s.across + n + w * W, of_key[w]);
  }
}

template <class S> static void through_pairs(GlaSegment<S> &s) {
  constexpr int64_t W = Lanes<S>::W, T = STEP_TOKENS;
  product<S, false>({s.inner, T}, {s.grad, s.padded, 1}, {s.v_turned, T}, s.tokens, s.filled(), s.of.values);
  int64_t n = 0;
  for (; n + 2 * W <= s.across; n += 2 * W) pairs_of_keys<S, 2>(s, n);
  for (; n < s.across; n += W) pairs_of_keys<S, 1>(s, n);
  add_lanes(s);
}

template <class S> static void gradients_of_values(GlaSegment<S> &s) {
  constexpr int64_t T = STEP_TOKENS;
  const Matrix<S> made{s.made, s.padded};
  product<S, false>(made, {s.scores, 1, T}, {s.grad, s.padded}, s.tokens, s.padded, s.tokens);
  if (s.feeds)
    product<S, true>(made, {s.kept_k, s.across, 1}, {s.state(), s.padded}, s.tokens, s.padded, s.of.keys);
  for (int64_t t = 0; t < s.tokens; t++)
    write(s.made + t * s.padded, s.of.grad_v, s.row, s.start + t, s.head * s.of.values, s.of.values);
}

// Computes the parts of dq and dk through the states, and replaces dh by the gradient before the segment.
template <class S> static void through_states(GlaSegment<S> &s, const S *before) {
  constexpr int64_t W = Lanes<S>::W, T = STEP_TOKENS;
  const int64_t keys = s.of.keys, values = s.of.values, padded = s.padded;
  S *state = s.state();
  if (s.sees) product<S, false>({s.found_q, T}, {before, padded, 1}, {s.grad_turned, T}, keys, s.filled(), values);
  if (s.feeds) product<S, false>({s.found_k, T}, {state, padded, 1}, {s.v_turned, T}, keys, s.filled(), values);
  for (int64_t n = 0; n < s.across; n++) s.through[n] = 0;
  if (!s.sees) return;  // earlier tokens belong to another document
  for (int64_t n = 0; n < keys; n++) {
    V<S> shared = V<S>{};
    for (int64_t p = n * padded; p < (n + 1) * padded; p += W) {
      const V<S> here = s.feeds ? load(state + p) * s.whole(n) : V<S>{};
      if (s.feeds) shared += here * load(before + p);
      store(state + p, here);
    }
    s.through[n] = total<S>(shared);
  }
  product<S, true>({state, padded}, {s.read, 1, s.across}, {s.grad, padded}, keys, padded, s.tokens);
}

// Transposes the products by key into rows by token, in the place of F and L, and adds the pairs' parts: dq, dk and dg.
template <class S> static void add_up_gradients(GlaSegment<S> &s) {
  constexpr int64_t W = Lanes<S>::W, T = STEP_TOKENS;
  const int64_t across = s.across;
  for (int64_t t = 0; t < s.tokens; t++)
    for (int64_t n = 0; n < s.of.keys; n++) {
      s.since[t * across + n] = s.sees ? s.since[t * across + n] * s.found_q[n * T + t] : 0;
      s.to_end[t * across + n] = s.feeds ? s.to_end[t * across + n] * s.found_k[n * T + t] : 0;
    }
  for (int64_t n = 0; n < across; n += W) {
    V<S> before = V<S>{}, after = load(s.through + n);
    for (int64_t t = 0; t < s.tokens; t++) {  // paths from earlier tokens to the state after the segment
      const int64_t at = t * across + n;
      store(s.a + at, before);
      before += load(s.k + at) * load(s.to_end + at);
    }
    V<S> pairs = V<S>{};
    for (int64_t t = s.tokens - 1; t >= 0; t--) {
      const int64_t at = t * across + n;
      const V<S> query = load(s.q + at), key = load(s.k + at), inner = same<S>(s.inner[t * T + t]);
      const V<S> of_q = load(s.of_q + at), of_k = load(s.of_k + at);
      after += query * load(s.since + at);
      pairs += query * of_q - key * of_k;
      store(s.a + at, load(s.a + at) + after + (t ? pairs : V<S>{}));
      store(s.of_q + at, of_q + load(s.since + at) + inner * key);
      store(s.of_k + at, of_k + load(s.to_end + at) + inner * query);
    }
  }
  if (!s.sees) memset(s.a, 0, across * sizeof(S));  // the first token's decay acts on nothing
}

template <class S> static void backward_segment(GlaSegment<S> &s, const S *before) {
  s.enter_queries();
  for (int64_t t = 0; t < s.tokens; t++)
    read_padded(s.grad + t * s.padded, s.of.grad_y, s.row, s.start + t, s.head * s.of.values, s.of.values);
  turn_tokens(s, s.v_turned, s.v);
  turn_tokens(s, s.grad_turned, s.grad);
  through_pairs(s);
  gradients_of_values(s);
  through_states(s, before);
  add_up_gradients(s);
  for (int64_t t = 0; t < s.tokens; t++) {
    const int64_t from = t * s.across, first = s.head * s.of.keys;
    write(s.of_q + from, s.of.grad_q, s.row, s.start + t, first, s.of.keys);
    write(s.of_k + from, s.of.grad_k, s.row, s.start + t, first, s.of.keys);
    write(s.a + from, s.of.grad_g, s.row, s.start + t, first, s.of.keys);
  }
}

template <class S> static void backward_head(void *task, int unit, char *scratch) {
  const Gla<S> &of = *(const Gla<S> *)task;
  GlaSegment<S> s(of, scratch);
  s.row = unit / of.heads, s.head = unit % of.heads;
  int64_t places[CHUNK + 1];
  const S *before[CHUNK];  // the state before each segment
  for (int64_t chunk = of.chunks() - 1; chunk >= 0; chunk--) {
    const int64_t count = s.cut(chunk, places);
    S *free = s.before;
    before[0] = s.kept(chunk);
    for (int64_t c = 0; c + 1 < count; c++) {  // a segment of the same document follows only a full one
      if (s.begins(places[c + 1])) continue;
      s.enter(places[c], places[c + 1]);
      s.next_state(free, before[c]);
      before[c + 1] = free, free += of.states();
    }
    for (int64_t c = count - 1; c >= 0; c--) s.enter(places[c], places[c + 1]), backward_segment(s, before[c]);
  }
}
