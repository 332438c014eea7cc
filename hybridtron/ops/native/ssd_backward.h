// Backward pass of SSD; equations in ssd.h.
#pragma once
#include "ssd_forward.h"

// Gradients through a segment's pairs: of the scores, of x . s and g for each token, and of w
template <class S> static void through_pairs(SegmentOfHeads<S> &s, const S *delta, const S *own, S *of_own) {
  constexpr int64_t W = Lanes<S>::W;
  S *open = s.scaled;  // for each j, the sum over pairs with i from the current row on
  for (int64_t j = 0; j < s.filled; j += W) store(s.from_pairs + j, V<S>{}), store(open + j, V<S>{});
  for (int64_t i = s.tokens - 1; i >= 0; i--) {
    V<S> before = V<S>{};
    const int64_t self = i * CHUNK + i;
    const S of_others = s.of_scores[self], of_later = s.from_pairs[i];
    for (int64_t j = 0; j < s.wide(i); j += W) {
      const int64_t at = i * CHUNK + j;
      const V<S> decay = s.between(i, j), step = load(delta + j), of_score = decay * load(s.inner + at);
      const V<S> pair = load(s.scores + at) * of_score, sum = load(open + j) + pair * step;
      store(s.pairs + at, load(s.scores + at) * decay * step);
      store(s.of_scores + at, load(s.of_scores + at) + of_score * step);
      store(s.from_pairs + j, load(s.from_pairs + j) + pair), store(open + j, sum);
      before += s.below(i, j, sum);
    }
    if (s.of.own.data) {
      s.pairs[self] = s.scores[self] * own[i], of_own[i] = s.scores[self] * s.inner[self];
      s.of_scores[self] = of_others + s.inner[self] * own[i], s.from_pairs[i] = of_later;
    }
    s.crossing[i] = total<S>(before);
  }
}

// Dot products over n of two (states, CHUNK), for each token
template <class S> static void dots_of_tokens(const SegmentOfHeads<S> &s, S *to, const S *one, const S *other) {
  for (int64_t t = 0; t < s.filled; t += Lanes<S>::W) {
    V<S> sum = V<S>{};
    for (int64_t n = 0; n < s.of.states; n++) sum += load(one + n * CHUNK + t) * load(other + n * CHUNK + t);
    store(to + t, sum);
  }
}

// to += factor_t from_nt; a null factor means 1
template <class S> static void add_by_token(const SegmentOfHeads<S> &s, S *to, const S *from, const S *factor) {
  for (int64_t n = 0; n < s.of.states; n++)
    for (int64_t t = 0; t < s.filled; t += Lanes<S>::W) {
      const V<S> one = load(from + n * CHUNK + t);
      store(to + n * CHUNK + t, load(to + n * CHUNK + t) + (factor ? one * load(factor + t) : one));
    }
}

template <class S> static void gradients_of_x(SegmentOfHeads<S> &s, const S *delta) {
  const int64_t padded = s.padded;
  const S D = s.D;
  const Matrix<S> made{s.made, padded};
  if (s.feeds) product<S, false>(made, {s.b, s.across, 1}, {s.state(), padded}, s.tokens, padded, s.of.states);
  for (int64_t t = 0; t < s.tokens; t++) {
    const S factor = s.to_end[t] * delta[t];
    for (int64_t k = t * padded; k < (t + 1) * padded; k += Lanes<S>::W)
      store(s.made + k, (s.feeds ? load(s.made + k) * factor : V<S>{}) + load(s.grad + k) * D);
  }
  s.over_rows([&](int64_t j, int64_t rows) {
    product<S, true>({s.made + j * padded, padded}, {s.pairs + j * CHUNK + j, 1, CHUNK}, {s.grad + j * padded, padded},
                     rows, padded, s.tokens - j);
  });
  for (int64_t t = 0; t < s.tokens; t++)
    write(s.made + t * padded, s.of.grad_x, s.row, s.start + t, s.head * s.of.size, s.of.size);
}

// Gradients of c and b through the states before and after the segment
template <class S> static void through_states(SegmentOfHeads<S> &s, const S *delta, const S *before) {
  const int64_t states = s.of.states, size = s.of.size;
  for (int64_t t = 0; t < s.filled; t += Lanes<S>::W) store(s.from_state + t, V<S>{}), store(s.from_next + t, V<S>{});
  if (s.sees) {
    for (int64_t t = 0; t < s.tokens; t++) s.scale(s.scaled + t * s.padded, s.grad + t * s.padded, s.since[t]);
    s.turn(s.grad_turned, s.scaled, s.padded, size);
    product<S, false>({s.found, CHUNK}, {before, s.padded, 1}, {s.grad_turned, CHUNK}, states, s.filled, size);
    dots_of_tokens(s, s.from_state, s.c_turned, s.found);
    add_by_token(s, s.of_c_turned, s.found, (const S *)nullptr);
  }
  if (s.feeds) {
    for (int64_t k = 0; k < size * CHUNK; k += Lanes<S>::W)
      store(s.x_turned + k, load(s.x_turned + k) * load(s.to_end + k % CHUNK));
    product<S, false>({s.found, CHUNK}, {s.state(), s.padded, 1}, {s.x_turned, CHUNK}, states, s.filled, size);
    dots_of_tokens(s, s.from_next, s.b_turned, s.found);
    add_by_token(s, s.of_b_turned, s.found, delta);
  }
}

// Returns dh . h_in, and replaces dh by the gradient before the segment.
template <class S> static S previous_state(SegmentOfHeads<S> &s, const S *before) {
  S *state = s.state();
  const int64_t count = s.of.states * s.padded;
  V<S> shared = V<S>{};
  for (int64_t k = 0; k < count; k += Lanes<S>::W) {
    const V<S> here = s.feeds ? load(state + k) * s.whole : V<S>{};
    shared += s.sees ? here * load(before + k) : V<S>{};
    store(state + k, s.sees ? here : V<S>{});
  }
  if (s.sees)  // with dy as scaled by through_states
    product<S, true>({state, s.padded}, {s.c, 1, s.across}, {s.scaled, s.padded}, s.of.states, s.padded, s.tokens);
  return total<S>(shared);
}

// Gradients of dt and step, and partial sums for A, D and bias
template <class S> static void gradients_of_steps(SegmentOfHeads<S> &s, int64_t number, S carried) {
  const int64_t place = s.row * s.of.heads + s.head;
  const S *delta = s.delta + number * CHUNK, *slope = s.slope + number * CHUNK;
  const S A = s.of.A ? s.of.A[s.head] * (S)LN2 : 0;
  S of_A = 0, of_D = 0, of_bias = 0, after = carried, before = 0;
  for (int64_t t = s.tokens - 1; t >= 0; t--) s.crossing[t] += after += s.from_state[t];
  for (int64_t t = 0; t < s.tokens; t++) {
    const S of_g = s.crossing[t] + before;
    const S of_step = s.from_pairs[t] + s.from_next[t];
    const S of_dt = s.of.A ? (of_step + of_g * A) * slope[t] : of_g;
    before += delta[t] * s.from_next[t];
    const int64_t at = number * CHUNK + t;
    s.of_dt[at] = of_dt, s.of_step[at] = of_step;
    of_A += of_g * delta[t], of_bias += of_dt, of_D += s.inner[t * CHUNK + t];
  }
  if (s.of.A) s.of.grad_A[place] += of_A, s.of.grad_bias[place] += of_bias;
  if (s.of.D) s.of.grad_D[place] += of_D;
}

template <class S> static void backward_head(SegmentOfHeads<S> &s, int64_t number, int64_t chunk) {
  s.enter_head(number);
  const S *delta = s.delta + number * CHUNK, *before = s.kept(chunk);
  for (int64_t t = 0; t < s.tokens; t++)
    read_padded(s.grad + t * s.padded, s.of.grad_y, s.row, s.start + t, s.head * s.of.size, s.of.size);
  s.turn(s.x_turned, s.x, s.padded, s.of.size);
  s.over_rows([&](int64_t i, int64_t rows) {
    product<S, false>({s.inner + i * CHUNK, CHUNK}, {s.grad + i * s.padded, s.padded, 1}, {s.x_turned, CHUNK}, rows,
                      s.wide(i), s.of.size);
  });
  through_pairs(s, delta, s.own + number * CHUNK, s.of_own + number * CHUNK);
  gradients_of_x(s, delta);
  through_states(s, delta, before);
  gradients_of_steps(s, number, previous_state(s, before));
}

// Stores a segment's gradients of b, c, dt, delta and w, to which all heads of the unit have added.
template <class S> static void end_segment(SegmentOfHeads<S> &s, int64_t chunk) {
  const int64_t across = s.across, local = (s.start - chunk * CHUNK) * across;
  S *of_b = s.of_b + local, *of_c = s.of_c + local;
  for (int64_t t = 0; t < s.tokens; t++)
    for (int64_t n = 0; n < across; n++) {
      of_b[t * across + n] = n < s.of.states ? s.of_b_turned[n * CHUNK + t] : 0;
      of_c[t * across + n] = n < s.of.states ? s.of_c_turned[n * CHUNK + t] : 0;
    }
  s.over_rows([&](int64_t i, int64_t rows) {
    const S *below = s.of_scores + i * CHUNK;
    product<S, true>({of_c + i * across, across}, {below, CHUNK, 1}, {s.b, across}, rows, across, s.deep(i));
    product<S, true>({of_b + i * across, across}, {below + i, 1, CHUNK}, {s.c + i * across, across}, rows, across,
                     s.tokens - i);
  });
  s.write_heads(s.of_dt, s.of.grad_dt);
  if (s.of.step.data) s.write_heads(s.of_step, s.of.grad_step), s.write_heads(s.of_own, s.of.grad_own);
}

template <class S> static void backward_chunk(SegmentOfHeads<S> &s, int64_t row, int64_t unit, int64_t chunk) {
  s.over_segments(row, unit, chunk, false, [&] {
    s.turn(s.c_turned, s.c, s.across, s.of.states);
    memset(s.of_scores, 0, CHUNK * CHUNK * sizeof(S));
    for (S *sums : {s.of_b_turned, s.of_c_turned}) memset(sums, 0, s.of.states * CHUNK * sizeof(S));
    for (int64_t number = 0; number < s.of.unit; number++) backward_head(s, number, chunk);
    end_segment(s, chunk);
  });
}
