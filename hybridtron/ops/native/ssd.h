// The recurrence with one decay per head (SSD of Mamba-2), by matrix products over segments of tokens, in the cache:
//
//     h_t = a_t h_{t-1} + b_t (delta_t x_t)^T,   y_t = c_t h_t + D x_t
//     a_t = exp(delta_t A),   delta_t = softplus(dt_t + bias)
//
// Without A, dt_t holds g_t and a_t = exp(g_t), and delta_t is an input per token, or 1. A token may then see itself
// with another step than later tokens see it: w_i in the place of delta_i where j = i.
//
// A segment is at most CHUNK tokens of one document. With L_t the sum of delta A up to t, E_ij = exp(L_i - L_j) for
// j <= i and zero above, and T the last token:
//
//     y_i   = sum_j (c_i . b_j) E_ij delta_j x_j + exp(L_i) c_i h_in + D x_i
//     h_out = exp(L_T) h_in + sum_j exp(L_T - L_j) b_j (delta_j x_j)^T
//
// Gradients, with dh that of h_out, X_ij = dy_i . x_j, and F_ij = (c_i . b_j) E_ij:
//
//     of delta x:  s_j = sum_i F_ij dy_i + exp(L_T - L_j) b_j dh,   dx_j = delta_j s_j + D dy_j
//     dc_i  = sum_j E_ij X_ij delta_j b_j + exp(L_i) h_in dy_i,   dh_in = exp(L_T) dh + sum_i exp(L_i) c_i dy_i^T
//     db_j  = sum_i E_ij X_ij delta_j c_i + exp(L_T - L_j) delta_j dh x_j
//     ddelta_j = x_j . s_j + A dg_j,   dA = sum of delta dg,   dD = sum of X_ii
//     dg_t = sum over pairs i >= t > j of F_ij X_ij delta_j                      (g_t = delta_t A lies between i and j)
//            + sum_{i >= t} exp(L_i) c_i . h_in dy_i + sum_{j < t} exp(L_T - L_j) delta_j b_j . dh x_j
//            + exp(L_T) dh . h_in
//
// With w, a token's terms with itself have w_i for delta_i, and dw_i = F_ii X_ii is left out of ddelta_i.
//
// The sum over pairs adds exactly these pairs: sums over all i >= t less those over all j >= t would cancel digits. L
// is float64, so that a strong decay does not blur later ones. Products that a segment does not need are skipped: a
// document's first segment has no h_in, and a segment that ends before its chunk has no h_out.
//
// Values that a group's heads share (c . b, and the sums for dc and db) are computed once per unit of heads. Sizes fix
// the order of all sums, as in recurrence.h; backward reads the states that forward kept, one per chunk.
#pragma once
#include <initializer_list>
#include "products.h"
#include "shares.h"

constexpr int64_t STEP = 16;  // rows of a triangle computed together

// Parameters and states are dense, in the type that computes; states are (rows, heads, states, padded).
template <class S> struct Ssd {
  int64_t rows, length, heads, size, groups, states, unit, whole_rows;
  Tokens x, dt, b, c, y;
  Tokens step, own;       // delta and w per token; both may be null, and are null with A
  const uint8_t *starts;  // (rows, length), or null if no document begins in a row
  const S *A, *D, *bias;  // A times log2(e); without A no bias, and D may be null
  S *state;               // first state on entry, last one on return; in backward, their gradients
  S *kept;                // (rows, chunks, heads, states, padded); null if no gradient will be asked for
  Tokens grad_y, grad_x, grad_dt, grad_b, grad_c, grad_step, grad_own;
  S *grad_A, *grad_D, *grad_bias;  // (rows, heads), for A, D and bias; zeros on entry
  S *shares;                       // (rows, units, length, 2, states), used if threads share a row's units

  int64_t chunks() const { return parts(length, CHUNK); }
  int64_t units() const { return heads / unit; }
  int64_t padded() const { return lanes<S>(size); }
  int64_t across() const { return lanes<S>(states); }
};

// A thread's workspace: a segment of tokens, for the heads of one unit and then for one of them.
template <class S> struct SegmentOfHeads {
  const Ssd<S> &of;
  const int64_t padded, across;         // channels of a head, and states
  S *b, *c, *of_b, *of_c;               // (CHUNK, across)
  S *b_turned, *c_turned;               // (states, CHUNK), as the next three
  S *of_b_turned, *of_c_turned, *found;
  S *scores, *of_scores, *pairs, *inner;                       // (CHUNK, CHUNK): c . b, their gradients, F delta, X
  S *x, *grad, *made, *scaled;                                 // (CHUNK, padded)
  S *x_turned, *grad_turned;                                   // (padded, CHUNK)
  S *delta, *slope, *own, *of_dt, *of_step, *of_own;           // (unit, CHUNK)
  S *since, *to_end, *crossing, *from_pairs, *from_state, *from_next;  // (CHUNK,)
  double *sums;                                                // (CHUNK,)
  S whole, D;
  int64_t row, first, group, start, tokens, filled, head;
  bool sees, feeds;  // a state enters the segment; one leaves it

  static int64_t size(const Ssd<S> &of) {
    const int64_t states = 4 * of.across() + 5 * of.states, channels = 6 * of.padded();
    return CHUNK * (sizeof(S) * (states + channels + 4 * CHUNK + 6 * of.unit + 6) + sizeof(double));
  }

  SegmentOfHeads(const Ssd<S> &of, char *scratch) : of(of), padded(of.padded()), across(of.across()) {
    sums = (double *)scratch;
    S *free = (S *)(sums + CHUNK);
    auto take = [&](int64_t count, std::initializer_list<S **> all) {
      for (S **part : all) *part = free, free += CHUNK * count;
    };
    take(across, {&b, &c, &of_b, &of_c});
    take(of.states, {&b_turned, &c_turned, &of_b_turned, &of_c_turned, &found});
    take(CHUNK, {&scores, &of_scores, &pairs, &inner});
    take(padded, {&x, &grad, &made, &scaled, &x_turned, &grad_turned});
    take(of.unit, {&delta, &slope, &own, &of_dt, &of_step, &of_own});
    take(1, {&since, &to_end, &crossing, &from_pairs, &from_state, &from_next});
  }

  S *state() const { return of.state + (row * of.heads + head) * of.states * padded; }
  S *kept(int64_t chunk) const {
    return of.kept + ((row * of.chunks() + chunk) * of.heads + head) * of.states * padded;
  }
  // End of the block of rows that contains row i, limited to the depth or the lanes
  static int64_t block_end(int64_t i) { return (i / STEP + 1) * STEP; }
  int64_t deep(int64_t i) const { return block_end(i) < tokens ? block_end(i) : tokens; }
  int64_t wide(int64_t i) const { return block_end(i) < filled ? block_end(i) : filled; }

  // Calls visit() for each segment of a chunk, forward or backward.
  template <class Visit> void over_segments(int64_t r, int64_t unit, int64_t chunk, bool forward, const Visit &visit) {
    row = r, first = unit * of.unit, group = unit * of.groups / of.units();
    over_documents(of, row, chunk, forward, [&](int64_t from, int64_t to, bool before, bool after) {
      sees = before, feeds = after;
      enter(from, to - from);
      visit();
    });
  }

  void enter(int64_t from, int64_t count) {
    start = from, tokens = count, filled = lanes<S>(count);
    for (int64_t t = 0; t < tokens; t++) {
      read_padded(b + t * across, of.b, row, start + t, group * of.states, of.states);
      read_padded(c + t * across, of.c, row, start + t, group * of.states, of.states);
    }
    turn(b_turned, b, across, of.states);
    over_rows([&](int64_t i, int64_t rows) {
      product<S, false>({scores + i * CHUNK, CHUNK}, {c + i * across, across, 1}, {b_turned, CHUNK}, rows, wide(i),
                        of.states);
    });
    steps();
  }

  // Calls visit(first row, rows) for each block of rows in a triangle.
  template <class Visit> void over_rows(const Visit &visit) const {
    for (int64_t i = 0; i < tokens; i += STEP) visit(i, deep(i) - i);
  }

  // Transposes: tokens become lanes, with zeros beyond the last one.
  void turn(S *to, const S *from, int64_t apart, int64_t count) const {
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t k = 0; k < count; k++) to[k * CHUNK + t] = from[t * apart + k];
    for (int64_t k = 0; k < count; k++)
      for (int64_t t = tokens; t < filled; t++) to[k * CHUNK + t] = 0;
  }

  // Reads a number per token and head into rows by head, with zeros beyond the last token.
  void read_heads(S *to, const Tokens &from) {
    for (int64_t t = 0; t < tokens; t++) {
      read(made, from, row, start + t, first, of.unit);
      for (int64_t h = 0; h < of.unit; h++) to[h * CHUNK + t] = made[h];
    }
    for (int64_t h = 0; h < of.unit; h++)
      for (int64_t t = tokens; t < filled; t++) to[h * CHUNK + t] = 0;
  }
  void write_heads(const S *from, const Tokens &to) {
    for (int64_t t = 0; t < tokens; t++) {
      for (int64_t h = 0; h < of.unit; h++) made[h] = from[h * CHUNK + t];
      write(made, to, row, start + t, first, of.unit);
    }
  }

  // Computes delta of all heads, its slope, and w; dt is read into the place of its gradients.
  void steps() {
    read_heads(of_dt, of.dt);
    for (int64_t h = 0; h < of.unit; h++)
      for (int64_t t = 0; t < filled; t++) delta[h * CHUNK + t] = slope[h * CHUNK + t] = 1;
    if (of.step.data) read_heads(delta, of.step), read_heads(own, of.own);
    for (int64_t h = 0; of.A && h < of.unit; h++) {
      for (int64_t t = 0; t < filled; t += Lanes<S>::W) {
        const V<S> shifted = load(of_dt + h * CHUNK + t) + of.bias[first + h];
        const Logistic<S> logistic(shifted);
        store(delta + h * CHUNK + t, softplus<S>(shifted, logistic));
        store(slope + h * CHUNK + t, logistic.sigmoid(shifted));
      }
    }
  }

  // Selects a head, and computes its decays and reads its tokens.
  void enter_head(int64_t number) {
    head = first + number, D = of.D ? of.D[head] : 0;
    double sum = 0;
    for (int64_t t = 0; t < tokens; t++) {
      const int64_t at = number * CHUNK + t;
      const double step = of.A ? (double)delta[at] * (double)of.A[head] : (double)of_dt[at] * LOG2E;
      sums[t] = sum += step < -2500 ? -2500 : step;  // 0 in any type; keeps others' digits
    }
    for (int64_t t = tokens; t < filled; t++) sums[t] = sum;
    for (int64_t t = 0; t < filled; t++) since[t] = (S)sums[t], to_end[t] = (S)(sum - sums[t]);
    for (int64_t t = 0; t < filled; t += Lanes<S>::W) {
      store(since + t, power<S>(load(since + t), same<S>(1)));
      store(to_end + t, power<S>(load(to_end + t), same<S>(1)));
    }
    whole = since[tokens - 1];
    for (int64_t t = 0; t < tokens; t++)
      read_padded(x + t * padded, of.x, row, start + t, head * of.size, of.size);
  }

  // E in row i, for the lanes from j on
  V<S> between(int64_t i, int64_t j) const {
    S apart[Lanes<S>::W];
    for (int64_t k = 0; k < Lanes<S>::W; k++) apart[k] = (S)(sums[i] - sums[j + k]);
    return below(i + 1, j, power<S>(load(apart), same<S>(1)));
  }

  // The lanes from j on that are below i, zeros elsewhere
  static V<S> below(int64_t i, int64_t j, V<S> v) {
    V<S> lane;
#pragma GCC unroll 16
    for (int k = 0; k < Lanes<S>::W; k++) lane[k] = (S)k;
    return lane < same<S>((S)(i - j)) ? v : V<S>{};
  }

  // to = factor from, a row of channels
  void scale(S *to, const S *from, S factor) const {
    for (int64_t k = 0; k < padded; k += Lanes<S>::W) store(to + k, load(from + k) * factor);
  }
};
