// Forward pass of the recurrence; equations in recurrence.h.
#pragma once
#include "recurrence.h"

// Advances TILE n of the state and one vector of channels over a chunk. RETRACED: also stores values for backward.
template <class S, bool RETRACED>
static void advance(Workspace<S> &w, int64_t tile, int64_t i, const V<S> *a, V<S> *state, bool added) {
  const int64_t lanes = w.lanes, padded = w.padded;
  V<S> h[TILE];
  for (int n = 0; n < TILE; n++) h[n] = state[n];
  for (int64_t t = 0; t < w.tokens; t++) {
    if (w.starts && w.starts[t])
      for (int n = 0; n < TILE; n++) h[n] = V<S>{};
    const V<S> rate = load(w.delta + t * lanes + i), step = load(w.step + t * lanes + i);
    const S *b = w.b + t * padded + tile * TILE, *c = w.c + t * padded + tile * TILE;
    V<S> sum = load(w.sum + t * lanes + i), grad = V<S>{};
    V<S> *before = w.before + t * TILE, *factor = w.factor + t * TILE, *of_c = w.by_lane_c + t * TILE;
    if (RETRACED) grad = load(w.grad + t * lanes + i);
#pragma GCC unroll 8
    for (int n = 0; n < TILE; n++) {
      const V<S> decay = power<S>(rate, a[n]);
      if (RETRACED) before[n] = h[n], factor[n] = decay;
      h[n] = decay * h[n] + step * b[n];
      sum += h[n] * c[n];
      if (RETRACED) of_c[n] = (added ? of_c[n] : V<S>{}) + grad * h[n];
    }
    store(w.sum + t * lanes + i, sum);
  }
  for (int n = 0; n < TILE; n++) state[n] = h[n];
}

template <class S> static void forward_chunk(Workspace<S> &w) {
  const Recurrence<S> &of = w.of;
  for (int64_t n = 0; n < of.states && of.kept; n++)
    memcpy(w.kept() + n * of.channels, w.state(of.state, n), w.width * sizeof(S));
  w.add_D_x();
  for (int64_t tile = 0; tile < of.tiles(); tile++)
    for (int64_t i = 0; i < w.width; i += Lanes<S>::W) {
      V<S> a[TILE], h[TILE];
      for (int n = 0; n < TILE; n++) {
        const int64_t place = tile * TILE + n;
        const bool real = place < of.states;
        h[n] = real ? w.part(w.state(of.state, place), i, w.width) : V<S>{};
        a[n] = real ? w.part(of.A + place * of.channels + w.first, i, w.width) : V<S>{};
      }
      advance<S, false>(w, tile, i, a, h, false);
      for (int n = 0; n < TILE && tile * TILE + n < of.states; n++)
        w.put(w.state(of.state, tile * TILE + n), h[n], i, w.width);
    }
  for (int64_t t = 0; t < w.tokens; t++) {
    S *sum = w.sum + t * w.lanes, *z = w.grad;
    if (of.z.data) {
      w.clear_behind(z);
      read(z, of.z, w.row, w.start + t, w.first, w.width);
      for (int64_t i = 0; i < w.lanes; i += Lanes<S>::W) {
        const V<S> gate = load(z + i);
        store(sum + i, load(sum + i) * gate * Logistic<S>(gate).sigmoid(gate));
      }
    }
    write(sum, of.y, w.row, w.start + t, w.first, w.width);
  }
}

template <class S> static void forward_unit(void *task, int unit, char *scratch) {
  const Recurrence<S> &of = *(const Recurrence<S> *)task;
  Workspace<S> w(of, scratch);
  for (int64_t chunk = 0; chunk < of.chunks(); chunk++) {
    w.enter(unit / of.units(), unit % of.units(), chunk);
    forward_chunk(w);
  }
}
