// A linear recurrence over tokens, for many channels in parallel:
//
//     h_t = a_t h_{t-1} + s_t b_t,   y_t = sum over n of c_t h_t + D x_t,   times silu(z_t) if there is a gate
//     a_t = exp(delta_t A),   s_t = delta_t x_t,   delta_t = softplus(dt_t + bias)
//
// h and A have an entry for each channel and each n (the selective scan of Mamba-1); all channels share b and c.
//
// Gradients, with G_t that of h_t and g_t that of y_t before the gate:
//
//     G_t = c_t g_t + a_{t+1} G_{t+1},   dc_t = sum over channels of g_t h_t,   db_t = sum over channels of G_t s_t
//     ds_t = sum over n of G_t b_t,   e_t = a_t G_t h_{t-1},   dA = sum over t of delta_t e_t
//     ddelta_t = sum over n of A e_t + x_t ds_t,   dx_t = delta_t ds_t + D g_t
//     dz_t = dy_t y_t silu'(z_t), with y_t before the gate
//
// Backward reads the states that forward kept, one per CHUNK tokens, and computes those between them again. Where a
// document begins, h_{t-1} is 0 and receives no gradient.
//
// Sizes fix the order of all sums: n by n in TILEs, tokens one by one, lanes pairwise, and then units of channels in
// order, whether one thread takes all units of a row or several threads share them.
#pragma once
#include <initializer_list>
#include "shares.h"

constexpr int TILE = 8;

// Arguments of a call. Parameters and states are dense, in the type that computes; states are (rows, n, channels).
template <class S> struct Recurrence {
  int64_t rows, length, channels, states, groups, unit, whole_rows;  // groups: 1
  Tokens x, dt, b, c, z, y;  // z.data is null without a gate
  const uint8_t *starts;     // (rows, length), or null if no document begins in a row
  const S *A, *D, *bias;     // A times log2(e): (states, channels)
  S *state;                  // first state on entry, last one on return; in backward, their gradients
  S *kept;                   // (rows, chunks, states, channels); null if no gradient will be asked for
  Tokens grad_y, grad_x, grad_dt, grad_b, grad_c, grad_z;
  S *grad_A, *grad_D, *grad_bias;  // (rows, ...), else shaped as A, D and bias; zeros on entry
  S *shares;                       // (rows, units, length, 2, states), used if threads share a row's units

  int64_t chunks() const { return parts(length, CHUNK); }
  int64_t units() const { return parts(channels, unit); }
  int64_t tiles() const { return parts(states, TILE); }
  int64_t across() const { return tiles() * TILE; }
};

// A thread's workspace: a chunk of tokens for one unit of channels, with zeros beyond the unit's last channel.
template <class S> struct Workspace {
  const Recurrence<S> &of;
  int64_t lanes, padded;  // channels and states
  S *x, *delta, *step, *sum, *grad, *grad_step, *grad_delta, *slope;  // (CHUNK, lanes)
  S *b, *c, *of_b, *of_c;                                                     // (CHUNK, padded)
  V<S> *before, *factor, *by_lane_b, *by_lane_c;                              // (CHUNK, TILE)
  int64_t row, first, width, start, tokens;
  const uint8_t *starts;

  static int64_t size(const Recurrence<S> &of) {
    int64_t vectors = 4 * CHUNK * TILE * Lanes<S>::W;
    return sizeof(S) * (CHUNK * (8 * ::lanes<S>(of.unit) + 4 * of.across()) + vectors) + 64;
  }

  Workspace(const Recurrence<S> &of, char *scratch) : of(of), lanes(::lanes<S>(of.unit)), padded(of.across()) {
    V<S> *vectors = (V<S> *)scratch;
    for (V<S> **part : {&before, &factor, &by_lane_b, &by_lane_c}) *part = vectors, vectors += CHUNK * TILE;
    S *numbers = (S *)vectors;
    for (S **part : {&x, &delta, &step, &sum, &grad, &grad_step, &grad_delta, &slope})
      *part = numbers, numbers += CHUNK * lanes;
    for (S **part : {&b, &c, &of_b, &of_c}) *part = numbers, numbers += CHUNK * padded;
  }

  S *state(S *all, int64_t n) const { return all + (row * of.states + n) * of.channels + first; }
  S *kept() const { return of.kept + (row * of.chunks() + start / CHUNK) * of.states * of.channels + first; }

  void enter(int64_t r, int64_t unit, int64_t chunk) {
    row = r, first = unit * of.unit, start = chunk * CHUNK;
    width = of.channels - first < of.unit ? of.channels - first : of.unit;
    tokens = tokens_of(of, chunk);
    starts = of.starts ? of.starts + row * of.length + start : nullptr;
    for (int64_t t = 0; t < tokens; t++) {
      clear_behind(x + t * lanes), clear_behind(delta + t * lanes);
      read(x + t * lanes, of.x, row, start + t, first, width);
      read(delta + t * lanes, of.dt, row, start + t, first, width);
      for (int64_t n = of.states; n < padded; n++) b[t * padded + n] = c[t * padded + n] = 0;
      read(b + t * padded, of.b, row, start + t, 0, of.states);
      read(c + t * padded, of.c, row, start + t, 0, of.states);
      steps(t);
    }
  }

  void clear_behind(S *channel) const {
    for (int64_t i = width; i < lanes; i++) channel[i] = 0;
  }

  // Computes delta, its slope, and delta x.
  void steps(int64_t t) {
    for (int64_t i = 0; i < lanes; i += Lanes<S>::W) {
      const int64_t at = t * lanes + i;
      const V<S> shifted = load(delta + at) + part(of.bias + first, i, width);
      const Logistic<S> logistic(shifted);
      store(delta + at, softplus<S>(shifted, logistic)), store(slope + at, logistic.sigmoid(shifted));
    }
    clear_behind(delta + t * lanes), clear_behind(slope + t * lanes);
    for (int64_t i = t * lanes; i < (t + 1) * lanes; i += Lanes<S>::W) store(step + i, load(delta + i) * load(x + i));
  }

  // Loads a vector from an array of `count` numbers, zeros beyond.
  static V<S> part(const S *from, int64_t place, int64_t count) {
    if (place + Lanes<S>::W <= count) return load(from + place);
    V<S> v = V<S>{};
    for (int64_t i = 0; place + i < count; i++) v[i] = from[place + i];
    return v;
  }

  static void put(S *to, V<S> v, int64_t place, int64_t count) {
    if (place + Lanes<S>::W <= count) return store(to + place, v);
    for (int64_t i = 0; place + i < count; i++) to[place + i] = v[i];
  }

  void add_D_x() {
    for (int64_t i = 0; i < width; i++) {
      const S D_i = of.D[first + i];
      for (int64_t t = 0; t < tokens; t++) sum[t * lanes + i] = D_i * x[t * lanes + i];
    }
    for (int64_t t = 0; t < tokens; t++) clear_behind(sum + t * lanes);
  }
};
