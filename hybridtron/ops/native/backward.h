// Backward pass of the recurrence; equations in recurrence.h.
#pragma once
#include "forward.h"

// Runs the gradients for TILE n of the state and one vector of channels back over a chunk.
template <class S>
static void retreat(Workspace<S> &w, int64_t tile, int64_t i, const V<S> *a, V<S> *grad_state, V<S> *grad_a,
                    bool added) {
  const int64_t lanes = w.lanes, padded = w.padded;
  V<S> g[TILE], of_a[TILE];
  for (int n = 0; n < TILE; n++) g[n] = grad_state[n], of_a[n] = V<S>{};
  for (int64_t t = w.tokens - 1; t >= 0; t--) {
    const V<S> delta = load(w.delta + t * lanes + i), step = load(w.step + t * lanes + i);
    const V<S> grad = load(w.grad + t * lanes + i);
    const S *b = w.b + t * padded + tile * TILE, *c = w.c + t * padded + tile * TILE;
    const V<S> *before = w.before + t * TILE, *factor = w.factor + t * TILE;
    V<S> *of_b = w.by_lane_b + t * TILE;
    V<S> of_step = tile ? load(w.grad_step + t * lanes + i) : V<S>{};
    V<S> of_delta = tile ? load(w.grad_delta + t * lanes + i) : V<S>{};
#pragma GCC unroll 8
    for (int n = 0; n < TILE; n++) {
      const V<S> here = g[n] + grad * c[n];
      of_b[n] = (added ? of_b[n] : V<S>{}) + here * step;
      of_step += here * b[n];
      g[n] = here * factor[n];
      const V<S> exponent = g[n] * before[n];
      of_delta += exponent * a[n];
      of_a[n] += exponent * delta;
    }
    if (w.starts && w.starts[t])
      for (int n = 0; n < TILE; n++) g[n] = V<S>{};
    store(w.grad_step + t * lanes + i, of_step), store(w.grad_delta + t * lanes + i, of_delta);
  }
  for (int n = 0; n < TILE; n++) grad_state[n] = g[n], grad_a[n] = of_a[n];
}

// Computes g, the gradients of y before the gate.
template <class S> static void read_gradients(Workspace<S> &w) {
  const Recurrence<S> &of = w.of;
  for (int64_t t = 0; t < w.tokens; t++) {
    S *grad = w.grad + t * w.lanes, *z = w.grad_step;
    w.clear_behind(grad);
    read(grad, of.grad_y, w.row, w.start + t, w.first, w.width);
    if (!of.z.data) continue;
    w.clear_behind(z);
    read(z, of.z, w.row, w.start + t, w.first, w.width);
    for (int64_t i = 0; i < w.lanes; i += Lanes<S>::W) {
      const V<S> gate = load(z + i);
      store(grad + i, load(grad + i) * gate * Logistic<S>(gate).sigmoid(gate));
    }
  }
}

// Stores the gradients of x, dt and z, and adds to those of D and bias.
template <class S> static void write_gradients(Workspace<S> &w) {
  const Recurrence<S> &of = w.of;
  const int64_t W = Lanes<S>::W;
  for (int64_t i = 0; i < w.width; i += W) {
    const V<S> D = w.part(of.D + w.first, i, w.width);
    V<S> of_D = V<S>{}, of_bias = V<S>{};
    for (int64_t t = 0; t < w.tokens; t++) {
      const int64_t at = t * w.lanes + i;
      const V<S> x = load(w.x + at), delta = load(w.delta + at), grad = load(w.grad + at);
      const V<S> of_step = load(w.grad_step + at);
      const V<S> of_delta = (load(w.grad_delta + at) * (S)LN2 + of_step * x) * load(w.slope + at);
      of_D += grad * x;
      of_bias += of_delta;
      store(w.grad_delta + at, of_delta), store(w.grad_step + at, of_step * delta + D * grad);
    }
    const int64_t place = w.row * of.channels + w.first;
    w.put(of.grad_D + place, w.part(of.grad_D + place, i, w.width) + of_D, i, w.width);
    w.put(of.grad_bias + place, w.part(of.grad_bias + place, i, w.width) + of_bias, i, w.width);
  }
  for (int64_t t = 0; t < w.tokens; t++) {
    S *z = w.x + t * w.lanes, *grad = w.delta + t * w.lanes;
    const S *sum = w.sum + t * w.lanes;
    write(w.grad_step + t * w.lanes, of.grad_x, w.row, w.start + t, w.first, w.width);
    write(w.grad_delta + t * w.lanes, of.grad_dt, w.row, w.start + t, w.first, w.width);
    if (!of.z.data) continue;
    w.clear_behind(z), w.clear_behind(grad);
    read(z, of.z, w.row, w.start + t, w.first, w.width), read(grad, of.grad_y, w.row, w.start + t, w.first, w.width);
    for (int64_t i = 0; i < w.lanes; i += W) {
      const V<S> gate = load(z + i), open = Logistic<S>(gate).sigmoid(gate);
      store(z + i, load(grad + i) * load(sum + i) * open * (1 + gate * (1 - open)));
    }
    write(z, of.grad_z, w.row, w.start + t, w.first, w.width);
  }
}

template <class S> static void backward_tile(Workspace<S> &w, int64_t tile) {
  const Recurrence<S> &of = w.of;
  const S *kept = w.kept();
  for (int64_t i = 0; i < w.width; i += Lanes<S>::W) {
    V<S> a[TILE], h[TILE], g[TILE], of_a[TILE];
    for (int n = 0; n < TILE; n++) {
      const int64_t place = tile * TILE + n;
      const bool real = place < of.states;
      h[n] = real ? w.part(kept + place * of.channels, i, w.width) : V<S>{};
      g[n] = real ? w.part(w.state(of.state, place), i, w.width) : V<S>{};
      a[n] = real ? w.part(of.A + place * of.channels + w.first, i, w.width) : V<S>{};
    }
    advance<S, true>(w, tile, i, a, h, i > 0), retreat<S>(w, tile, i, a, g, of_a, i > 0);
    for (int n = 0; n < TILE && tile * TILE + n < of.states; n++) {
      w.put(w.state(of.state, tile * TILE + n), g[n], i, w.width);
      S *sum = w.state(of.grad_A, tile * TILE + n);
      w.put(sum, w.part(sum, i, w.width) + of_a[n], i, w.width);
    }
  }
  for (int64_t t = 0; t < w.tokens; t++)
    for (int n = 0; n < TILE; n++) {
      w.of_b[t * w.padded + tile * TILE + n] = total<S>(w.by_lane_b[t * TILE + n]);
      w.of_c[t * w.padded + tile * TILE + n] = total<S>(w.by_lane_c[t * TILE + n]);
    }
}

template <class S> static void backward_chunk(Workspace<S> &w, int64_t row, int64_t unit, int64_t chunk) {
  w.enter(row, unit, chunk);
  read_gradients(w);
  w.add_D_x();
  for (int64_t tile = 0; tile < w.of.tiles(); tile++) backward_tile(w, tile);
  write_gradients(w);
}
