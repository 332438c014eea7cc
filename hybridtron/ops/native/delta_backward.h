// Backward pass of the delta rule; equations in delta.h.
#pragma once
#include "delta_forward.h"

// Computes du and x, from the last band to the first.
template <class S> static void solve_backward(SegmentOfDelta<S> &s) {
  constexpr int64_t C = CHUNK, W = Lanes<S>::W;
  const int64_t padded = s.padded;
  if (s.feeds)
    product<S, false>({s.grad_u, padded}, {s.k_to, s.across, 1}, {s.state(), padded}, s.tokens, padded, s.of.states);
  else
    memset(s.grad_u, 0, s.tokens * padded * sizeof(S));
  for (int64_t from = (s.tokens - 1) / BAND * BAND; from >= 0; from -= BAND) {
    const int64_t to = s.band_end(from);
    const Matrix<S> made{s.grad_u + from * padded, padded};
    product<S, true>(made, {s.scores + from * C + from, 1, C}, {s.grad + from * padded, padded}, to - from, padded,
                     s.tokens - from);
    product<S, true>(made, {s.minus_found + to * C + from, 1, C}, {s.x + to * padded, padded}, to - from, padded,
                     s.tokens - to);
    for (int64_t j = to - 1; j >= from; j--) {
      V<S> shared = V<S>{};
      for (int64_t p = 0; p < padded; p += W) {
        V<S> du = load(s.grad_u + j * padded + p);
        for (int64_t i = j + 1; i < to; i++) du += s.minus_found[i * C + j] * load(s.x + i * padded + p);
        store(s.x + j * padded + p, du * s.beta[j]), shared += du * load(s.w + j * padded + p);
      }
      s.of_beta[j] = total<S>(shared);
    }
  }
}

// Computes dA and x . u, and the gradients through them.
template <class S> static void through_pairs(SegmentOfDelta<S> &s) {
  constexpr int64_t C = CHUNK;
  const int64_t padded = s.padded, size = s.of.size;
  s.turn(s.u_turned, s.u, padded, size);
  s.over_bands([&](int64_t from, int64_t to) {
    const int64_t rows = to - from, wide = s.wide(from);
    const Matrix<S> values{s.u_turned, C};
    product<S, false>({s.of_scores + from * C, C}, {s.grad + from * padded, padded, 1}, values, rows, wide, size);
    product<S, false>({s.of_finding + from * C, C}, {s.x + from * padded, padded, 1}, values, rows, wide, size);
  });
  if (s.by_head()) backward_by_head(s);
  else backward_by_channel(s);
}

// to_tn = factor_tn times the sum over p of from_tp state_np
template <class S> static void by_state(SegmentOfDelta<S> &s, S *to, const S *from, const S *state, const S *factor) {
  for (int64_t p = 0; p < s.of.size; p++)
    for (int64_t n = 0; n < s.across; n++)
      s.turned[p * s.across + n] = n < s.of.states ? state[n * s.padded + p] : 0;
  product<S, false>({to, s.across}, {from, s.padded, 1}, {s.turned, s.across}, s.tokens, s.across, s.of.size);
  for (int64_t at = 0; at < s.tokens * s.across; at += Lanes<S>::W) store(to + at, load(to + at) * load(factor + at));
}

// Gradients of readers and keys through the states. dg sums `gains` from its token on, and `losses` before it.
template <class S> static void through_states(SegmentOfDelta<S> &s, const S *before, S *gains, S *losses) {
  const int64_t count = s.tokens * s.across;
  memset(gains, 0, count * sizeof(S)), memset(losses, 0, count * sizeof(S));
  auto add = [&](S *to, S *also, const S *factor, S sign) {
    for (int64_t at = 0; at < count; at += Lanes<S>::W) {
      const V<S> made = load(s.made_keys + at) * sign;
      store(to + at, load(to + at) + made), store(also + at, load(also + at) + made * load(factor + at));
    }
  };
  if (s.sees) {
    by_state(s, s.made_keys, s.grad, before, s.since);
    add(s.of_q, gains, s.q, 1);
    by_state(s, s.made_keys, s.x, before, s.since);
    add(s.of_found, gains, s.k, -1);
  }
  if (s.feeds) {
    by_state(s, s.made_keys, s.u, s.state(), s.to_end);
    add(s.of_k, losses, s.k, 1);
  }
}

// Replaces dh by the gradient before the segment; through_n is the sum over p of dh h_in, times the segment's decay.
template <class S> static void previous_state(SegmentOfDelta<S> &s, const S *before) {
  S *state = s.state();
  const S *whole = s.since + (s.tokens - 1) * s.across;
  memset(s.through, 0, s.across * sizeof(S));
  for (int64_t n = 0; n < s.of.states; n++) {
    V<S> shared = V<S>{};
    for (int64_t p = n * s.padded; p < (n + 1) * s.padded; p += Lanes<S>::W) {
      const V<S> here = s.sees && s.feeds ? load(state + p) * whole[n] : V<S>{};
      if (s.sees) shared += here * load(before + p);
      store(state + p, here);
    }
    s.through[n] = total<S>(shared);
  }
  if (!s.sees) return;
  const Matrix<S> made{state, s.padded};
  product<S, true>(made, {s.q_from, 1, s.across}, {s.grad, s.padded}, s.of.states, s.padded, s.tokens);
  product<S, true>(made, {s.minus_k_from, 1, s.across}, {s.x, s.padded}, s.of.states, s.padded, s.tokens);
}

// Stores dg: of_g, which has the part through pairs, plus paths from the state before and to the state after.
template <class S> static void gradients_of_g(SegmentOfDelta<S> &s, const S *gains, const S *losses) {
  const int64_t each = s.of.sums(), gates = s.of.gates;
  auto entry = [&](const S *row, int64_t n) {
    if (!s.by_head()) return (double)row[n];
    double sum = 0;
    for (int64_t m = 0; m < s.of.states; m++) sum += row[m];
    return sum;
  };
  for (int64_t n = 0; n < gates; n++) {
    double after = entry(s.through, n), before = 0;
    for (int64_t t = s.tokens - 1; t >= 0; t--) s.of_g[t * each + n] += after += entry(gains + t * s.across, n);
    for (int64_t t = 0; t < s.tokens; t++) {
      s.of_g[t * each + n] += before;
      before += entry(losses + t * s.across, n);
    }
    if (!s.sees) s.of_g[n] = 0;  // exactly 0, since it decays another document's state
  }
  for (int64_t t = 0; t < s.tokens; t++) {
    for (int64_t n = 0; n < gates; n++) s.g[n] = (S)s.of_g[t * each + n];
    write(s.g, s.of.grad_g, s.row, s.start + t, s.head * gates, gates);
  }
}

template <class S> static void backward_segment(SegmentOfDelta<S> &s, S *before) {
  const int64_t keys = s.head * s.of.states, values = s.head * s.of.size;
  S *gains = s.fade, *losses = s.faded;
  for (int64_t t = 0; t < s.tokens; t++)
    read_padded(s.grad + t * s.padded, s.of.grad_y, s.row, s.start + t, values, s.of.size);
  solve(s, before);
  solve_backward(s);
  through_pairs(s);
  through_states(s, before, gains, losses);
  previous_state(s, before);
  gradients_of_g(s, gains, losses);
  for (int64_t t = 0; t < s.tokens; t++) {
    const int64_t token = s.start + t;
    S *of_k = s.of_k + t * s.across;
    for (int64_t n = 0; n < s.of.states; n++) of_k[n] += s.of_found[t * s.across + n];
    write(s.of_q + t * s.across, s.of.grad_q, s.row, token, keys, s.of.states);
    write(of_k, s.of.grad_k, s.row, token, keys, s.of.states);
    write(s.x + t * s.padded, s.of.grad_v, s.row, token, values, s.of.size);
    write(s.of_beta + t, s.of.grad_beta, s.row, token, s.head, 1);
  }
}

template <class S> static void backward_head(void *task, int unit, char *scratch) {
  const Delta<S> &of = *(const Delta<S> *)task;
  SegmentOfDelta<S> s(of, scratch);
  for (int64_t chunk = of.chunks() - 1; chunk >= 0; chunk--)
    s.over_segments(unit, chunk, false, [&] { backward_segment(s, s.kept(chunk)); });
}
