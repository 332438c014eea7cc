// Pairs of tokens in the delta rule: A and -P of a segment, and the gradients through them; equations in delta.h.
#pragma once
#include "delta.h"

// Scores by head: products of the tokens, times the pairs' decays
template <class S> static void scores_by_head(SegmentOfDelta<S> &s) {
  constexpr int64_t C = CHUNK, W = Lanes<S>::W;
  s.over_bands([&](int64_t from, int64_t to) {
    const Matrix<S> keys{s.k_turned, C};
    const int64_t rows = to - from, at = from * s.across;
    product<S, false>({s.scores + from * C, C}, {s.q + at, s.across, 1}, keys, rows, s.wide(from), s.of.states);
    product<S, false>({s.minus_found + from * C, C}, {s.k + at, s.across, 1}, keys, rows, s.wide(from), s.of.states);
  });
  for (int64_t i = 0; i < s.tokens; i++) {
    S *between = s.between + i * C, *scores = s.scores + i * C, *minus_found = s.minus_found + i * C;
    s.powers(between, s.wide(i), [&](int64_t j) { return s.sums[i] - s.sums[j]; });
    for (int64_t j = 0; j < s.wide(i); j += W) {
      const V<S> decay = s.below(i + 1, j, load(between + j));
      store(between + j, decay), store(scores + j, load(scores + j) * decay);
      store(minus_found + j, s.below(i, j, -load(minus_found + j) * decay));
    }
  }
}

// Gradients by head, from dA and x . u. dg_t adds exactly the pairs with i >= t > j.
template <class S> static void backward_by_head(SegmentOfDelta<S> &s) {
  constexpr int64_t C = CHUNK, W = Lanes<S>::W;
  S *open = s.fade;  // for each j, the sum over pairs with i from the current row on
  memset(open, 0, C * sizeof(S));
  for (int64_t i = s.tokens - 1; i >= 0; i--) {
    V<S> before = V<S>{};
    for (int64_t j = 0; j < s.wide(i); j += W) {
      S *of_scores = s.of_scores + i * C + j, *of_finding = s.of_finding + i * C + j;
      const V<S> decay = load(s.between + i * C + j), of_found = s.below(i, j, load(of_finding));
      const V<S> sum = load(open + j) + load(of_scores) * load(s.scores + i * C + j) +
                       of_found * load(s.minus_found + i * C + j);
      store(open + j, sum), before += s.below(i, j, sum);
      store(of_scores, load(of_scores) * decay), store(of_finding, -of_found * decay);
    }
    s.of_g[i] = total<S>(before);
  }
  s.over_bands([&](int64_t from, int64_t to) {
    const int64_t rows = to - from, at = from * s.across, across = s.across;
    product<S, false>({s.of_q + at, across}, {s.of_scores + from * C, C, 1}, {s.k, across}, rows, across, to);
    product<S, false>({s.of_found + at, across}, {s.of_finding + from * C, C, 1}, {s.k, across}, rows, across, to);
    const Left<S> to_scores{s.of_scores + from * C + from, 1, C}, to_finding{s.of_finding + from * C + from, 1, C};
    product<S, false>({s.of_k + at, across}, to_scores, {s.q + at, across}, rows, across, s.tokens - from);
    product<S, true>({s.of_k + at, across}, to_finding, {s.k + at, across}, rows, across, s.tokens - from);
  });
}

// Scores inside a band: lanes are keys, which decay by one step at every token that reads them.
template <class S> static void scores_in_band(SegmentOfDelta<S> &s, int64_t from, int64_t to) {
  constexpr int64_t C = CHUNK, W = Lanes<S>::W;
  for (int64_t i = from; i < to; i++)
    for (int64_t j = from; j < s.wide(from); j += W) {
      const S *q = s.q + i * s.across, *k = s.k + i * s.across, *step = s.step + i * s.across;
      V<S> read[2] = {}, found[2] = {};
      for (int64_t n = 0; n < s.across; n += 2)
        for (int half = 0; half < 2; half++) {
          S *at = s.run + (n + half) * C + j;
          const V<S> key = s.below(i, j, load(at) * step[n + half], load(at));
          store(at, key), read[half] += q[n + half] * key, found[half] += k[n + half] * key;
        }
      store(s.scores + i * C + j, s.below(i + 1, j, read[0] + read[1]));
      store(s.minus_found + i * C + j, s.below(i, j, -(found[0] + found[1])));
    }
}

// Decays from a band's first token to the next band's, as a row of keys
template <class S> static const S *across_band(SegmentOfDelta<S> &s, int64_t from, int64_t to) {
  const double *first = s.sums + from * s.across, *next = s.sums + to * s.across;
  s.powers(s.g, s.across, [&](int64_t n) { return next[n] - first[n]; });
  return s.g;
}

// Scores by channel: those with tokens before a band by products, with keys in `run` decayed up to its first token
template <class S> static void scores_by_channel(SegmentOfDelta<S> &s) {
  constexpr int64_t C = CHUNK, W = Lanes<S>::W;
  const int64_t across = s.across;
  memcpy(s.run, s.k_turned, across * C * sizeof(S));
  s.over_bands([&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; t++)
      for (int64_t at = t * across; at < (t + 1) * across; at += W) {
        const V<S> decay = t == from ? same<S>(1) : load(s.band + at - across) * load(s.step + at);
        store(s.band + at, decay), store(s.band_q + at, load(s.q + at) * decay);
        store(s.minus_band_k + at, -load(s.k + at) * decay);
      }
    const Left<S> queries{s.band_q + from * across, across, 1}, minus_keys{s.minus_band_k + from * across, across, 1};
    product<S, false>({s.scores + from * C, C}, queries, {s.run, C}, to - from, from, s.of.states);
    product<S, false>({s.minus_found + from * C, C}, minus_keys, {s.run, C}, to - from, from, s.of.states);
    scores_in_band(s, from, to);
    if (to == s.tokens) return;
    const S *whole = across_band(s, from, to), *step = s.step + to * across;
    for (int64_t n = 0; n < across; n++)
      for (int64_t j = 0; j < to; j += W) {
        S *at = s.run + n * C + j;
        store(at, load(at) * (j < from ? whole[n] : step[n]));
      }
  });
}

// Gradients through pairs inside a band; lanes are channels.
template <class S> static void backward_in_band(SegmentOfDelta<S> &s, int64_t from, int64_t to) {
  constexpr int64_t C = CHUNK, W = Lanes<S>::W;
  for (int64_t n = 0; n < s.across; n += W)
    for (int64_t i = from; i < to; i++) {
      const int64_t here = i * s.across + n;
      const V<S> q = load(s.q + here), k = load(s.k + here);
      V<S> of_q = load(s.of_q + here), of_found = load(s.of_found + here), decay = same<S>(1);
      for (int64_t j = i; j >= from; j--) {
        const int64_t there = j * s.across + n;
        const S of_score = s.of_scores[i * C + j], of_finding = s.of_finding[i * C + j];
        const V<S> key = load(s.k + there) * decay;
        of_q += of_score * key, of_found -= of_finding * key;
        store(s.of_k + there, load(s.of_k + there) + decay * (of_score * q - of_finding * k));
        decay *= load(s.step + there);
      }
      store(s.of_q + here, of_q), store(s.of_found + here, of_found);
    }
}

// Gradients through pairs of a band with earlier tokens, with decays up to its first token in `fade`
template <class S> static void backward_before_band(SegmentOfDelta<S> &s, int64_t from, int64_t to) {
  constexpr int64_t C = CHUNK, W = Lanes<S>::W;
  const int64_t across = s.across, rows = to - from, here = from * across;
  for (int64_t at = 0; at < here; at += W) store(s.faded + at, load(s.k + at) * load(s.fade + at));
  const Matrix<S> keys{s.faded, across}, made{s.made_keys, across};
  product<S, false>({s.of_q + here, across}, {s.of_scores + from * C, C, 1}, keys, rows, across, from);
  product<S, false>({s.of_found + here, across}, {s.of_finding + from * C, C, 1}, keys, rows, across, from);
  for (int64_t at = here; at < to * across; at += W) {
    store(s.of_q + at, load(s.of_q + at) * load(s.band + at));
    store(s.of_found + at, -load(s.of_found + at) * load(s.band + at));
  }
  product<S, false>(made, {s.of_scores + from * C, 1, C}, {s.band_q + here, across}, from, across, rows);
  product<S, true>(made, {s.of_finding + from * C, 1, C}, {s.minus_band_k + here, across}, from, across, rows);
  for (int64_t at = 0; at < here; at += W)
    store(s.of_k + at, load(s.of_k + at) + load(s.made_keys + at) * load(s.fade + at));
}

template <class S> static void backward_by_channel(SegmentOfDelta<S> &s) {
  constexpr int64_t C = CHUNK, W = Lanes<S>::W;
  const int64_t across = s.across;
  for (int64_t i = 0; i < s.tokens; i++)
    for (int64_t at = i * C, j = 0; j < s.wide(i); j += W, at += W) {
      store(s.of_scores + at, s.below(i + 1, j, load(s.of_scores + at)));
      store(s.of_finding + at, s.below(i, j, load(s.of_finding + at)));
    }
  memset(s.of_k, 0, s.tokens * across * sizeof(S));
  s.over_bands([&](int64_t from, int64_t to) {
    backward_before_band(s, from, to);
    backward_in_band(s, from, to);
    if (to == s.tokens) return;
    const S *whole = across_band(s, from, to);
    for (int64_t n = 0; n < across; n += W) {
      for (int64_t at = n; at < from * across; at += across) store(s.fade + at, load(s.fade + at) * load(whole + n));
      V<S> decay = load(s.step + to * across + n);
      for (int64_t j = to - 1; j >= from; j--) {
        store(s.fade + j * across + n, decay);
        decay *= load(s.step + j * across + n);
      }
    }
  });
  for (int64_t n = 0; n < across; n++) {
    double sum = 0;
    for (int64_t at = (s.tokens - 1) * across + n; at >= 0; at -= across)
      s.of_g[at] = sum += (double)s.q[at] * s.of_q[at] + (double)s.k[at] * ((double)s.of_found[at] - s.of_k[at]);
  }
}
