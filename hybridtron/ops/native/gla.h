// The recurrence with one decay per key channel (gated linear attention), by matrix products over short segments:
//
//     h_t = diag(a_t) h_{t-1} + k_t v_t^T,   y_t = h_t^T q_t,   a_t = exp(g_t) <= 1
//
// A segment is at most STEP_TOKENS tokens of one document, inside a chunk. With E_ij the product of a over the tokens
// after j up to i, for each key channel, F_i over all tokens up to i, L_j over those after j, and W over all:
//
//     y_i   = sum_{j <= i} A_ij v_j + h_in^T (F_i q_i),   A_ij = sum over n of q_in E_ijn k_jn
//     h_out = diag(W) h_in + sum_j (L_j k_j) v_j^T
//
// E grows from token to token by one factor. So nothing is divided, no exponent is above 0, no sum of log decays is
// rounded, and there is one exponential per token and key. Segments are short because each pair of tokens needs a
// separate product over the keys; states cross segments by two matrix products.
//
// Gradients, with dh that of h_out and M_ij = dy_i . v_j for j <= i:
//
//     dq_i = sum_j M_ij E_ij k_j + F_i h_in dy_i,   dk_j = sum_i M_ij E_ij q_i + L_j dh v_j
//     dv_j = sum_i A_ij dy_i + dh^T (L_j k_j),      dh_in = diag(W) dh + sum_i (F_i q_i) dy_i^T
//     dg_t = sum over pairs i >= t > j of M_ij q_i E_ij k_j                           (a_t lies between i and j)
//            + sum_{i >= t} F_i q_i h_in dy_i + sum_{j < t} L_j k_j dh v_j + W sum over values of h_in dh
//
// for each key channel. The first sum is that over all pairs with i >= t less those that also have j >= t. A document's
// first segment has no h_in, and h_out is skipped where a document ends.
//
// One thread takes a head of a row, and sizes fix the order of its sums. Forward keeps one state per chunk, from which
// backward computes those of the segments again.
#pragma once
#include <initializer_list>
#include "products.h"
#include "segments.h"

constexpr int64_t STEP_TOKENS = 16, MOST_STATES = CHUNK / STEP_TOKENS;

// States are dense, (rows, heads, keys, padded), in the type that computes.
template <class S> struct Gla {
  int64_t rows, length, heads, keys, values;
  Tokens q, k, v, g, y;
  const uint8_t *starts;  // (rows, length), or null if no document begins in a row
  S *state;               // first state on entry, last one on return; in backward, their gradients
  S *kept;                // (rows, chunks, heads, keys, padded); null if no gradient will be asked for
  Tokens grad_y, grad_q, grad_k, grad_v, grad_g;

  int64_t chunks() const { return parts(length, CHUNK); }
  int64_t padded() const { return lanes<S>(values); }
  int64_t across() const { return lanes<S>(keys); }
  int64_t states() const { return keys * padded(); }  // numbers in a state
};

// A thread's workspace: a segment of tokens in one head.
template <class S> struct GlaSegment {
  static constexpr int64_t W = Lanes<S>::W, T = STEP_TOKENS;
  const Gla<S> &of;
  const int64_t padded, across;
  S *q, *k, *a, *since, *to_end;            // (T, across): F and L are the last two
  S *read, *kept_k, *of_q, *of_k;           // (T, across): F q, L k, and the gradients through pairs
  S *v, *grad, *made;                       // (T, padded)
  S *v_turned, *grad_turned;                // (values, T)
  S *found_q, *found_k;                     // (keys, T): h_in dy and dh v
  S *through;                               // (across,): W times the sum of h_in dh
  S *scores, *inner;                        // (T, T): A and M
  S *sums;                                  // (T, T, W): A before its lanes are added up
  S *before;                                // states before a chunk's segments that see one, except the first
  int64_t row, head, start, tokens;
  bool sees, feeds;  // a state enters the segment; one leaves it

  static int64_t size(const Gla<S> &of) {
    const int64_t by_token = 9 * of.across() + 3 * of.padded() + 2 * of.values + 2 * of.keys + (2 + W) * T;
    return sizeof(S) * (T * by_token + of.across() + MOST_STATES * of.states());
  }

  GlaSegment(const Gla<S> &of, char *scratch) : of(of), padded(of.padded()), across(of.across()) {
    S *free = (S *)scratch;
    auto take = [&](int64_t count, std::initializer_list<S **> all) {
      for (S **part : all) *part = free, free += count;
    };
    take(T * across, {&q, &k, &a, &since, &to_end, &read, &kept_k, &of_q, &of_k});
    take(T * padded, {&v, &grad, &made});
    take(T * of.values, {&v_turned, &grad_turned});
    take(T * of.keys, {&found_q, &found_k});
    take(T * T, {&scores, &inner});
    take(T * T * W, {&sums});
    take(across, {&through});
    take(MOST_STATES * of.states(), {&before});
  }

  S *state() const { return of.state + (row * of.heads + head) * of.states(); }
  S *kept(int64_t chunk) const { return of.kept + ((row * of.chunks() + chunk) * of.heads + head) * of.states(); }
  bool begins(int64_t t) const { return of.starts && of.starts[row * of.length + t]; }
  int64_t filled() const { return lanes<S>(tokens); }

  // Stores the first token of each segment in a chunk, and the chunk's end; returns their number.
  int64_t cut(int64_t chunk, int64_t *places) const {
    int64_t count = 0, end = chunk * CHUNK + tokens_of(of, chunk);
    for (int64_t t = chunk * CHUNK; t < end; t++)
      if (!count || t - places[count - 1] == T || begins(t)) places[count++] = t;
    places[count] = end;
    return count;
  }

  // Reads keys, values and decays, and computes L, W and L k.
  void enter(int64_t from, int64_t end) {
    start = from, tokens = end - from;
    sees = !begins(from), feeds = end == of.length || !begins(end);
    for (int64_t t = 0; t < tokens; t++) {
      read_padded(k + t * across, of.k, row, start + t, head * of.keys, of.keys);
      read_padded(a + t * across, of.g, row, start + t, head * of.keys, of.keys);
      read_padded(v + t * padded, of.v, row, start + t, head * of.values, of.values);
    }
    for (int64_t n = 0; n < tokens * across; n += W) store(a + n, exponential<S>(load(a + n)));
    for (int64_t n = 0; n < across; n += W) {
      V<S> left = same<S>(1);
      for (int64_t t = tokens - 1; t >= 0; left *= load(a + t * across + n), t--) {
        store(to_end + t * across + n, left);
        store(kept_k + t * across + n, left * load(k + t * across + n));
      }
    }
  }

  // Reads queries, and computes F and F q.
  void enter_queries() {
    for (int64_t t = 0; t < tokens; t++)
      read_padded(q + t * across, of.q, row, start + t, head * of.keys, of.keys);
    for (int64_t n = 0; n < across; n += W) {
      V<S> left = same<S>(1);
      for (int64_t t = 0; t < tokens; t++) {
        left *= load(a + t * across + n);
        store(since + t * across + n, left);
        store(read + t * across + n, left * load(q + t * across + n));
      }
    }
  }

  // W of key n
  S whole(int64_t n) const { return to_end[n] * a[n]; }

  // Computes h_out from h_in, possibly in place.
  void next_state(S *to, const S *from) const {
    for (int64_t n = 0; n < of.keys; n++)
      for (int64_t p = n * padded; p < (n + 1) * padded; p += W)
        store(to + p, sees ? load(from + p) * whole(n) : V<S>{});
    product<S, true>({to, padded}, {kept_k, 1, across}, {v, padded}, of.keys, padded, tokens);
  }
};
