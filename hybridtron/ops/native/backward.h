// The recurrence's gradients, from the last token to the first; equations in recurrence.h.
#pragma once
#include "forward.h"

// What comes back through the states of TILE n and one vector of channels, over a chunk.
template <class S, bool PER_STATE>
static void retreat(Workspace<S> &w, int64_t tile, int64_t i, const V<S> *a, V<S> *grad_state, V<S> *grad_a,
                    bool added) {
  const int64_t lanes = w.lanes, padded = w.padded;
  V<S> g[TILE], of_a[TILE];
  for (int n = 0; n < TILE; n++) g[n] = grad_state[n], of_a[n] = V<S>{};
  for (int64_t t = w.tokens - 1; t >= 0; t--) {
    const V<S> delta = load(w.delta + t * lanes + i), step = load(w.step + t * lanes + i);
    const V<S> grad = load(w.grad + t * lanes + i), decay = PER_STATE ? V<S>{} : load(w.decay + t * lanes + i);
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
      g[n] = here * (PER_STATE ? factor[n] : decay);
      const V<S> exponent = g[n] * before[n];
      of_delta += PER_STATE ? exponent * a[n] : exponent;
      if (PER_STATE) of_a[n] += exponent * delta;
    }
    if (w.starts && w.starts[t])
      for (int n = 0; n < TILE; n++) g[n] = V<S>{};
    store(w.grad_step + t * lanes + i, of_step), store(w.grad_delta + t * lanes + i, of_delta);
  }
  for (int n = 0; n < TILE; n++) grad_state[n] = g[n], grad_a[n] = of_a[n];
}

// Gradients of y before the gate
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

// Gradients of x, dt and z, and the sums for D, A of heads, and bias
template <class S> static void write_gradients(Workspace<S> &w) {
  const Recurrence<S> &of = w.of;
  const int64_t W = Lanes<S>::W;
  for (int64_t i = 0; i < w.width; i += W) {
    V<S> D = V<S>{}, of_D = V<S>{}, of_A = V<S>{}, of_bias = V<S>{}, A = V<S>{};
    for (int64_t k = 0; k < W && i + k < w.width; k++) {
      D[k] = w.D(i + k);
      if (!of.per_state) A[k] = of.A[(w.first + i + k) / of.head];
    }
    for (int64_t t = 0; t < w.tokens; t++) {
      const int64_t at = t * w.lanes + i;
      const V<S> x = load(w.x + at), delta = load(w.delta + at), grad = load(w.grad + at);
      const V<S> of_step = load(w.grad_step + at);
      V<S> of_delta = load(w.grad_delta + at);
      of_D += grad * x;
      if (!of.per_state) of_A += of_delta * delta, of_delta *= A;
      of_delta = (of_delta * (S)LN2 + of_step * x) * load(w.slope + at);
      of_bias += of_delta;
      store(w.grad_delta + at, of_delta), store(w.grad_step + at, of_step * delta + D * grad);
    }
    const int64_t place = w.row * of.channels + w.first;
    w.put(of.grad_D + place, w.part(of.grad_D + place, i, w.width) + of_D, i, w.width);
    w.put(of.grad_bias + place, w.part(of.grad_bias + place, i, w.width) + of_bias, i, w.width);
    if (!of.per_state) w.put(of.grad_A + place, w.part(of.grad_A + place, i, w.width) + of_A, i, w.width);
  }
  const int64_t heads = w.width / of.head;
  for (int64_t t = 0; t < w.tokens; t++) {
    S *of_dt = w.grad_delta + t * w.lanes, *z = w.x + t * w.lanes, *grad = w.delta + t * w.lanes;
    const S *sum = w.sum + t * w.lanes;
    write(w.grad_step + t * w.lanes, of.grad_x, w.row, w.start + t, w.first, w.width);
    if (of.head > 1)
      for (int64_t h = 0; h < heads; h++) {
        S all = 0;
        for (int64_t k = 0; k < of.head; k++) all += of_dt[h * of.head + k];
        of_dt[h] = all;
      }
    write(of_dt, of.grad_dt, w.row, w.start + t, w.first / of.head, heads);
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
      a[n] = real && of.per_state ? w.part(of.A + place * of.channels + w.first, i, w.width) : V<S>{};
    }
    if (of.per_state) advance<S, true, true>(w, tile, i, a, h, i > 0), retreat<S, true>(w, tile, i, a, g, of_a, i > 0);
    else advance<S, false, true>(w, tile, i, a, h, i > 0), retreat<S, false>(w, tile, i, a, g, of_a, i > 0);
    for (int n = 0; n < TILE && tile * TILE + n < of.states; n++) {
      w.put(w.state(of.state, tile * TILE + n), g[n], i, w.width);
      if (!of.per_state) continue;
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

template <class S> static void backward_chunk(Workspace<S> &w) {
  read_gradients(w);
  w.add_D_x();
  for (int64_t tile = 0; tile < w.of.tiles(); tile++) backward_tile(w, tile);
  write_gradients(w);
}

// One unit's sums over channels go beside those of the others, and are added up in the end.
template <class S> static void backward_unit(void *task, int number, char *scratch) {
  const Recurrence<S> &of = *(const Recurrence<S> *)task;
  Workspace<S> w(of, scratch);
  for (int64_t chunk = of.chunks() - 1; chunk >= 0; chunk--) {
    w.enter(number / of.units(), number % of.units(), chunk);
    backward_chunk(w);
    for (int64_t t = 0; t < w.tokens; t++) {
      S *share = of.shares + ((int64_t)number * of.length + w.start + t) * 2 * of.states;
      memcpy(share, w.of_b + t * w.padded, of.states * sizeof(S));
      memcpy(share + of.states, w.of_c + t * w.padded, of.states * sizeof(S));
    }
  }
}

// One thread takes all units of a row, and adds their sums up at once: the same sums, without the room for shares.
template <class S> static void backward_row(void *task, int row, char *scratch) {
  const Recurrence<S> &of = *(const Recurrence<S> *)task;
  Workspace<S> w(of, scratch);
  const int64_t size = CHUNK * w.padded, units = of.units() / of.groups;
  S *sums = (S *)(scratch + Workspace<S>::size(of)) ;
  for (int64_t chunk = of.chunks() - 1; chunk >= 0; chunk--)
    for (int64_t group = 0; group < of.groups; group++) {
      for (int64_t unit = 0; unit < units; unit++) {
        w.enter(row, group * units + unit, chunk);
        backward_chunk(w);
        for (int64_t k = 0; k < w.tokens * w.padded; k++) {
          sums[k] = unit ? sums[k] + w.of_b[k] : w.of_b[k];
          sums[size + k] = unit ? sums[size + k] + w.of_c[k] : w.of_c[k];
        }
      }
      for (int64_t t = 0; t < w.tokens; t++) {
        write(sums + t * w.padded, of.grad_b, row, w.start + t, group * of.states, of.states);
        write(sums + size + t * w.padded, of.grad_c, row, w.start + t, group * of.states, of.states);
      }
    }
}

// The shares of all units, a chunk of tokens at a time
template <class S> static void add_shares(void *task, int number, char *scratch) {
  const Recurrence<S> &of = *(const Recurrence<S> *)task;
  const int64_t row = number / of.chunks(), start = number % of.chunks() * CHUNK, units = of.units() / of.groups;
  S *sum = (S *)scratch;
  for (int64_t t = start; t < start + CHUNK && t < of.length; t++)
    for (int64_t group = 0; group < of.groups; group++) {
      for (int64_t unit = 0; unit < units; unit++) {
        const S *share = of.shares + ((row * of.units() + group * units + unit) * of.length + t) * 2 * of.states;
        for (int64_t n = 0; n < 2 * of.states; n++) sum[n] = unit ? sum[n] + share[n] : share[n];
      }
      write(sum, of.grad_b, row, t, group * of.states, of.states);
      write(sum + of.states, of.grad_c, row, t, group * of.states, of.states);
    }
}
