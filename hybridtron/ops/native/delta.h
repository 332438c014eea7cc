// The delta rule with decays, by a triangular system and matrix products over segments of tokens, in the cache:
//
//     s_t = diag(exp(g_t)) h_{t-1},   u_t = beta_t (v_t - s_t^T k_t),   h_t = s_t + k_t u_t^T,   y_t = h_t^T q_t
//
// A segment is at most CHUNK tokens of one document, of one head. With L_t the sum of g up to t, T the last token, and
//
//     A_ij = sum over n of q_in k_jn exp(L_in - L_jn)  for j <= i,   P_ij likewise with k_i for q_i, j < i
//
// the segment is (`ops/delta/chunked.py` derives this, and the gradients)
//
//     w_i   = v_i - (k_i exp(L_i)) h_in - sum_j P_ij u_j,   u_i = beta_i w_i         from the first token on
//     y_i   = (q_i exp(L_i)) h_in + sum_j A_ij u_j
//     h_out = exp(L_T) h_in + sum_j (k_j exp(L_T - L_j)) u_j^T
//     du_j  = sum_i A_ij dy_i + (k_j exp(L_T - L_j)) dh - sum_i P_ij x_i,   x_j = beta_j du_j   from the last token on
//     dv_j  = x_j,   dbeta_j = w_j . du_j,   dA_ij = dy_i . u_j,   dP_ij = - x_i . u_j
//
// Apart from A and P, one decay per head and one per key channel share all code: decays are rows of key channels. By
// head, the pairs' decays are one matrix. By channel, a segment is cut into bands of BAND tokens: a band's scores with
// earlier tokens are a product of queries decayed since the band's first token and keys decayed up to it; those inside
// the band are computed token by token. Keys decay there by multiplication, at most BAND times, so that no exponent is
// above 0 and no sum of strong decays blurs a weak one. L is float64 for the same reason.
//
// Sizes fix the order of all sums; backward reads the states that forward kept, one per chunk.
#pragma once
#include <initializer_list>
#include "products.h"
#include "segments.h"

constexpr int64_t BAND = 16;

// States are dense, (rows, heads, states, padded), in the type that computes.
template <class S> struct Delta {
  int64_t rows, length, heads, size, states, gates;  // gates: decays per head, 1 or `states`
  Tokens q, k, v, beta, g, y;
  const uint8_t *starts;  // (rows, length), or null if no document begins in a row
  S *state;               // first state on entry, last one on return; in backward, their gradients
  S *kept;                // (rows, chunks, heads, states, padded); null if no gradient will be asked for
  Tokens grad_y, grad_q, grad_k, grad_v, grad_beta, grad_g;

  int64_t chunks() const { return parts(length, CHUNK); }
  int64_t padded() const { return lanes<S>(size); }
  int64_t across() const { return lanes<S>(states); }
  int64_t sums() const { return gates == 1 ? 1 : across(); }
};

// A thread's workspace: a segment of tokens in one head.
template <class S> struct SegmentOfDelta {
  static constexpr int64_t C = CHUNK, W = Lanes<S>::W;
  const Delta<S> &of;
  const int64_t padded, across;
  S *q, *k, *since, *to_end, *q_from, *minus_k_from, *k_to;  // (C, across), as the next three lines
  S *of_q, *of_found, *of_k, *made_keys;
  S *step, *band, *fade, *faded;  // exp(g); decays since a band's first token, and up to it; keys with the latter
  S *band_q, *minus_band_k;       // decayed since a band's first token
  S *scores, *minus_found, *of_scores, *of_finding, *between;  // (C, C): A, -P, dA, dP
  S *w, *u, *made, *grad, *grad_u, *x;                         // (C, padded)
  S *k_turned, *run;                                           // (across, C)
  S *u_turned;                                                 // (padded, C)
  S *beta, *of_beta;                                           // (C,)
  S *g, *through;                                              // (across,)
  S *turned;                                                   // (padded, across): a state
  double *sums, *of_g;                                         // (C, sums)
  int64_t row, head, start, tokens, filled;
  bool sees, feeds;  // a state enters the segment; one leaves it

  static int64_t size(const Delta<S> &of) {
    const int64_t floats = C * (19 * of.across() + 7 * of.padded() + 5 * C + 2) + of.across() * (of.padded() + 2);
    return floats * sizeof(S) + 2 * C * of.sums() * sizeof(double);
  }

  SegmentOfDelta(const Delta<S> &of, char *scratch) : of(of), padded(of.padded()), across(of.across()) {
    sums = (double *)scratch, of_g = sums + C * of.sums();
    S *free = (S *)(of_g + C * of.sums());
    auto take = [&](int64_t count, std::initializer_list<S **> all) {
      for (S **part : all) *part = free, free += count;
    };
    take(C * across, {&q, &k, &since, &to_end, &q_from, &minus_k_from, &k_to, &of_q, &of_found, &of_k, &made_keys});
    take(C * across, {&step, &band, &fade, &faded, &band_q, &minus_band_k, &k_turned, &run});
    take(C * C, {&scores, &minus_found, &of_scores, &of_finding, &between});
    take(C * padded, {&w, &u, &made, &grad, &grad_u, &x, &u_turned});
    take(C, {&beta, &of_beta});
    take(across, {&g, &through});
    take(across * padded, {&turned});
  }

  S *state() const { return of.state + (row * of.heads + head) * of.states * padded; }
  S *kept(int64_t chunk) const {
    return of.kept + ((row * of.chunks() + chunk) * of.heads + head) * of.states * padded;
  }
  bool by_head() const { return of.gates == 1; }
  int64_t band_end(int64_t i) const { return i / BAND * BAND + BAND < tokens ? i / BAND * BAND + BAND : tokens; }
  int64_t wide(int64_t i) const { return i / BAND * BAND + BAND < filled ? i / BAND * BAND + BAND : filled; }
  // Calls visit(first row, end) for each band of a segment.
  template <class Visit> void over_bands(const Visit &visit) const {
    for (int64_t i = 0; i < tokens; i += BAND) visit(i, band_end(i));
  }

  // Calls visit() for each segment of a chunk, forward or backward.
  template <class Visit> void over_segments(int64_t unit, int64_t chunk, bool forward, const Visit &visit) {
    row = unit / of.heads, head = unit % of.heads;
    over_documents(of, row, chunk, forward, [&](int64_t from, int64_t to, bool before, bool after) {
      sees = before, feeds = after;
      enter(from, to - from);
      visit();
    });
  }

  void enter(int64_t from, int64_t count) {
    start = from, tokens = count, filled = lanes<S>(count);
    for (int64_t t = 0; t < tokens; t++) {
      read_padded(q + t * across, of.q, row, start + t, head * of.states, of.states);
      read_padded(k + t * across, of.k, row, start + t, head * of.states, of.states);
      read_padded(w + t * padded, of.v, row, start + t, head * of.size, of.size);
      read(beta + t, of.beta, row, start + t, head, 1);
    }
    add_decays();
    for (int64_t at = 0; at < tokens * across; at += W) {
      store(q_from + at, load(q + at) * load(since + at));
      store(minus_k_from + at, -load(k + at) * load(since + at));
      store(k_to + at, load(k + at) * load(to_end + at));
    }
    turn(k_turned, k, across, across);
  }

  // 2^exponent(i) for `count` lanes; exponents are float64
  template <class Exponent> static void powers(S *to, int64_t count, const Exponent &exponent) {
    for (int64_t at = 0; at < count; at += W) {
      S lane[W];
      for (int64_t i = 0; i < W; i++) lane[i] = (S)exponent(at + i);
      store(to + at, power<S>(load(lane), same<S>(1)));
    }
  }

  // Computes sums of g in powers of two, and decays since the state before and up to the state after the segment.
  void add_decays() {
    const int64_t each = of.sums();
    for (int64_t t = 0; t < tokens; t++) {
      read_padded(g, of.g, row, start + t, head * of.gates, of.gates);
      for (int64_t n = 0; n < each; n++) {
        const double one = (double)g[n] * LOG2E;  // 0 in any type; the limit keeps the sum's digits for others
        sums[t * each + n] = (t ? sums[(t - 1) * each + n] : 0) + (one < -2500 ? -2500 : one);
      }
    }
    const double *last = sums + (tokens - 1) * each;
    if (by_head()) {
      S by_token[2 * C];
      for (int64_t t = tokens; t < filled; t++) sums[t] = *last;
      powers(by_token, filled, [&](int64_t t) { return sums[t]; });
      powers(by_token + C, filled, [&](int64_t t) { return *last - sums[t]; });
      for (int64_t t = 0; t < tokens; t++)
        for (int64_t at = t * across; at < (t + 1) * across; at += W)
          store(since + at, same<S>(by_token[t])), store(to_end + at, same<S>(by_token[C + t]));
      return;
    }
    powers(since, tokens * across, [&](int64_t at) { return sums[at]; });
    for (int64_t t = 0; t < tokens; t++) {
      const double *here = sums + t * across, *before = t ? here - across : nullptr;
      powers(to_end + t * across, across, [&](int64_t n) { return last[n] - here[n]; });
      powers(step + t * across, across, [&](int64_t n) { return here[n] - (before ? before[n] : 0); });
    }
  }

  // Transposes: tokens become lanes, with zeros beyond the last one.
  void turn(S *to, const S *from, int64_t apart, int64_t count) const {
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t n = 0; n < count; n++) to[n * C + t] = from[t * apart + n];
    for (int64_t n = 0; n < count; n++)
      for (int64_t t = tokens; t < filled; t++) to[n * C + t] = 0;
  }

  // The lanes from j on that are below i; `otherwise` elsewhere
  static V<S> below(int64_t i, int64_t j, V<S> v, V<S> otherwise = V<S>{}) {
    V<S> lane;
#pragma GCC unroll 16
    for (int n = 0; n < W; n++) lane[n] = (S)n;
    return lane < same<S>((S)(i - j)) ? v : otherwise;
  }
};
