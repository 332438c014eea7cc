// A linear recurrence over tokens, for many channels side by side:
//
//     h_t = a_t h_{t-1} + s_t b_t,   y_t = sum over n of c_t h_t + D x_t,   y_t silu(z_t) where there is a gate
//     a_t = exp(delta_t A),   s_t = delta_t x_t,   delta_t = softplus(dt_t + bias)
//
// h has an entry for each channel and each n. A has as many (the selective scan of Mamba-1), or one for each head of
// channels, which then share dt, D and bias too (SSD of Mamba-2). Channels of a group share b and c.
//
// Gradients, with G_t that of h_t and g_t that of y_t before the gate:
//
//     G_t = c_t g_t + a_{t+1} G_{t+1},   dc_t = sum over channels of g_t h_t,   db_t = sum over channels of G_t s_t
//     ds_t = sum over n of G_t b_t,   e_t = a_t G_t h_{t-1},   dA = sum over t of delta_t e_t
//     ddelta_t = sum over n of A e_t + x_t ds_t,   dx_t = delta_t ds_t + D g_t
//     dz_t = dy_t y_t silu'(z_t), with y_t before the gate
//
// Backward reads the states that forward kept, one of every CHUNK tokens, and makes those between them again. Where a
// document begins, h_{t-1} is 0 and nothing returns to it.
//
// The order of all sums is fixed by the sizes: n by n in TILEs, tokens one by one, lanes pairwise, and then units of
// channels in their order, whether one thread takes all units of a row or several threads do.
#pragma once
#include <initializer_list>
#include "numbers.h"
#include "threads.h"
#include "vectors.h"

constexpr int CHUNK = 64, TILE = 8;

// What a call is given. Parameters and states are dense and in the type to compute in; states are (rows, n, channels).
template <class S> struct Recurrence {
  int64_t rows, length, channels, states, groups, head, unit, per_state, whole_rows;
  Tokens x, dt, b, c, z, y;  // z.data is null without a gate
  const uint8_t *starts;     // (rows, length), or null where no document begins in a row
  const S *A, *D, *bias;     // A times log2(e): (states, channels), or one for each head
  S *state;                  // the first state on entry, the last one on return; backward: of the gradients
  S *kept;                   // (rows, chunks, states, channels); null where no gradient will be asked for
  Tokens grad_y, grad_x, grad_dt, grad_b, grad_c, grad_z;
  S *grad_A, *grad_D, *grad_bias;  // (rows, ...) as A, D and bias are, channel by channel; zeros on entry
  S *shares;                       // (rows, units, length, 2, states) where units of a row are shared among threads

  int64_t chunks() const { return (length + CHUNK - 1) / CHUNK; }
  int64_t units() const { return (channels + unit - 1) / unit; }
  int64_t lanes() const { return (unit + Lanes<S>::W - 1) / Lanes<S>::W * Lanes<S>::W; }
  int64_t tiles() const { return (states + TILE - 1) / TILE; }
};

// What one thread works with: a chunk of tokens of one unit of channels, with zeros behind the unit's last channel.
template <class S> struct Workspace {
  const Recurrence<S> &of;
  int64_t lanes, padded;  // channels and states
  S *x, *delta, *decay, *step, *sum, *grad, *grad_step, *grad_delta, *slope;  // (CHUNK, lanes)
  S *b, *c, *of_b, *of_c;                                                     // (CHUNK, padded)
  V<S> *before, *factor, *by_lane_b, *by_lane_c;                              // (CHUNK, TILE)
  int64_t row, first, width, start, tokens;
  const uint8_t *starts;

  static int64_t size(const Recurrence<S> &of) {
    int64_t vectors = 4 * CHUNK * TILE * Lanes<S>::W;
    return sizeof(S) * (CHUNK * (9 * of.lanes() + 4 * of.tiles() * TILE) + vectors) + 64;
  }

  Workspace(const Recurrence<S> &of, char *scratch) : of(of), lanes(of.lanes()), padded(of.tiles() * TILE) {
    V<S> *vectors = (V<S> *)scratch;
    for (V<S> **part : {&before, &factor, &by_lane_b, &by_lane_c}) *part = vectors, vectors += CHUNK * TILE;
    S *numbers = (S *)vectors;
    for (S **part : {&x, &delta, &decay, &step, &sum, &grad, &grad_step, &grad_delta, &slope})
      *part = numbers, numbers += CHUNK * lanes;
    for (S **part : {&b, &c, &of_b, &of_c}) *part = numbers, numbers += CHUNK * padded;
  }

  S *state(S *all, int64_t n) const { return all + (row * of.states + n) * of.channels + first; }
  S *kept() const { return of.kept + (row * of.chunks() + start / CHUNK) * of.states * of.channels + first; }

  void enter(int64_t r, int64_t unit, int64_t chunk) {
    row = r, first = unit * of.unit, start = chunk * CHUNK;
    width = of.channels - first < of.unit ? of.channels - first : of.unit;
    tokens = of.length - start < CHUNK ? of.length - start : CHUNK;
    starts = of.starts ? of.starts + row * of.length + start : nullptr;
    int64_t group = first / (of.channels / of.groups), heads = width / of.head;
    for (int64_t t = 0; t < tokens; t++) {
      clear_behind(x + t * lanes), clear_behind(delta + t * lanes);
      read(x + t * lanes, of.x, row, start + t, first, width);
      read(delta + t * lanes, of.dt, row, start + t, first / of.head, heads);
      for (int64_t n = of.states; n < padded; n++) b[t * padded + n] = c[t * padded + n] = 0;
      read(b + t * padded, of.b, row, start + t, group * of.states, of.states);
      read(c + t * padded, of.c, row, start + t, group * of.states, of.states);
      steps(t, heads);
    }
  }

  void clear_behind(S *channel) const {
    for (int64_t i = width; i < lanes; i++) channel[i] = 0;
  }

  // delta, its slope, the decay of heads, and delta x
  void steps(int64_t t, int64_t heads) {
    S *delta_t = delta + t * lanes, *slope_t = slope + t * lanes, *decay_t = decay + t * lanes;
    const int64_t head = first / of.head;
    for (int64_t i = 0; i < heads; i += Lanes<S>::W) {
      V<S> shifted = load(delta_t + i) + part(of.bias + head, i, heads);
      Logistic<S> logistic(shifted);
      V<S> made = softplus<S>(shifted, logistic);
      store(delta_t + i, made), store(slope_t + i, logistic.sigmoid(shifted));
      if (!of.per_state) store(decay_t + i, power<S>(made, part(of.A + head, i, heads)));
    }
    if (of.head > 1)
      for (S *each : {delta_t, slope_t, decay_t})
        for (int64_t h = heads - 1; h >= 0; h--) {  // from the last: what is read lies before what is written
          const S value = each[h];
          for (int64_t k = 0; k < of.head; k++) each[h * of.head + k] = value;
        }
    clear_behind(delta_t), clear_behind(slope_t);
    if (!of.per_state) clear_behind(decay_t);
    for (int64_t i = 0; i < lanes; i += Lanes<S>::W)
      store(step + t * lanes + i, load(delta_t + i) * load(x + t * lanes + i));
  }

  // A vector of an array that ends after `count` numbers, zeros behind them
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

  S D(int64_t channel) const { return of.D[(first + channel) / of.head]; }

  void add_D_x() {
    for (int64_t i = 0; i < width; i++) {
      const S D_i = D(i);
      for (int64_t t = 0; t < tokens; t++) sum[t * lanes + i] = D_i * x[t * lanes + i];
    }
    for (int64_t t = 0; t < tokens; t++) clear_behind(sum + t * lanes);
  }
};
