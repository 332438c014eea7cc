// One decoding step: each row's next token through all sub-layers of a model, with states updated in place.
//
//     x = embedding[token];   x += mixer(norm(x)) for each sub-layer;   logits = head norm(x)
//
// Mixers: the selective scan with its convolution (scan/reference, conv/reference), sliding-window attention with a
// ring buffer of keys and values, and the gated MLP. One call per token reads every weight once for all rows, and
// allocates nothing. Names are those of inference/compiled_decode.py, which also makes sure that sizes are multiples of
// the vector width.
#include <cmath>
#include "threads.h"
#include "vectors.h"

enum StepKind : int64_t { SCAN, WINDOW, GATED };

template <class S> struct SubLayer {
  int64_t kind, inner, states, taps, rank, heads, groups, size, window, rotary;
  double stretch, inner_eps;  // multiplies rotated channels; epsilon of the norms of dt, B and C
  const S *norm, *in, *of_x, *of_dt, *out, *taps_WE, *conv_bias, *bias, *A, *D, *dt_norm, *B_norm, *C_norm;
  S *h, *tail, *keys, *values;
  const double *frequencies;
};

template <class S> struct Steps {
  int64_t rows, width, vocabulary, count;
  double eps;
  const SubLayer<S> *layers;
  const int64_t *tokens;
  int64_t *seen;  // number of tokens in each row before this one
  const S *embedding, *norm, *head;
  S *logits, *scratch;
};

// Dot products of N weight rows with one row; two accumulators each, since an addition waits for the one before it.
template <class S, int N> static inline void dots(S *y, const S *x, const S *w, int64_t across) {
  constexpr int64_t W = Lanes<S>::W;
  V<S> even[N] = {}, odd[N] = {};
  int64_t i = 0;
  for (; i + 2 * W <= across; i += 2 * W)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      even[n] += load(w + n * across + i) * load(x + i);
      odd[n] += load(w + n * across + i + W) * load(x + i + W);
    }
  for (int n = 0; n < N; n++) {
    S sum = total<S>(even[n] + odd[n]);
    for (int64_t k = i; k < across; k++) sum += w[n * across + k] * x[k];
    y[n] = sum;
  }
}

// y (rows, out) = x w^T, where rows of x have stride `apart`
template <class S>
static void project(S *y, const S *x, int64_t apart, const S *w, int64_t rows, int64_t out, int64_t across) {
  for (int64_t o = 0; o < out; o += 4)
    for (int64_t r = 0; r < rows; r++) {
      if (o + 4 <= out) dots<S, 4>(y + r * out + o, x + r * apart, w + o * across, across);
      else
        for (int64_t k = o; k < out; k++) dots<S, 1>(y + r * out + k, x + r * apart, w + k * across, across);
    }
}

template <class S> static void normed(S *y, const S *x, const S *weight, int64_t width, double eps) {
  V<S> squares = V<S>{};
  for (int64_t i = 0; i < width; i += Lanes<S>::W) squares += load(x + i) * load(x + i);
  const S root = 1 / std::sqrt(total<S>(squares) / (S)width + (S)eps);
  for (int64_t i = 0; i < width; i += Lanes<S>::W) store(y + i, load(x + i) * root * load(weight + i));
}

template <class S> static void scan_row(const SubLayer<S> &of, int64_t r, S *x, const S *z, const S *dt, const S *bc) {
  const int64_t E = of.inner, N = of.states;
  S *h = of.h + r * N * E;
  for (int64_t i = 0; i < E; i += Lanes<S>::W) {
    const V<S> shifted = load(dt + i) + load(of.bias + i), x_i = load(x + i), gate = load(z + i);
    const V<S> delta = softplus<S>(shifted, Logistic<S>(shifted)), step = delta * x_i;
    V<S> sum = load(of.D + i) * x_i;
    for (int64_t n = 0; n < N; n++) {
      const V<S> state = power<S>(delta, load(of.A + n * E + i)) * load(h + n * E + i) + step * bc[n];
      store(h + n * E + i, state);
      sum += state * bc[N + n];
    }
    store(x + i, sum * gate * Logistic<S>(gate).sigmoid(gate));
  }
}

// Replaces the convolution's input by its output, and appends the input to the tail.
template <class S> static void convolve_row(const SubLayer<S> &of, int64_t r, S *x) {
  const int64_t E = of.inner, before = of.taps - 1;
  S *tail = of.tail + r * before * E;
  for (int64_t i = 0; i < E; i += Lanes<S>::W) {
    const V<S> x_i = load(x + i);
    V<S> sum = load(of.conv_bias + i) + x_i * load(of.taps_WE + before * E + i);
    for (int64_t t = 0; t < before; t++) sum += load(tail + t * E + i) * load(of.taps_WE + t * E + i);
    for (int64_t t = 0; t + 1 < before; t++) store(tail + t * E + i, load(tail + (t + 1) * E + i));
    if (before) store(tail + (before - 1) * E + i, x_i);
    store(x + i, sum * Logistic<S>(sum).sigmoid(sum));
  }
}

// Replaces `width` values, of which there may be fewer than a vector has, by their norm.
template <class S> static void norm_inside(S *x, const S *weight, int64_t width, double eps) {
  S squares = 0;
  for (int64_t i = 0; i < width; i++) squares += x[i] * x[i];
  const S root = 1 / std::sqrt(squares / (S)width + (S)eps);
  for (int64_t i = 0; i < width; i++) x[i] *= root * weight[i];
}

template <class S> static void norm_parts(const SubLayer<S> &of, S *dt_bc) {
  if (!of.dt_norm) return;
  norm_inside(dt_bc, of.dt_norm, of.rank, of.inner_eps);
  norm_inside(dt_bc + of.rank, of.B_norm, of.states, of.inner_eps);
  norm_inside(dt_bc + of.rank + of.states, of.C_norm, of.states, of.inner_eps);
}

template <class S> static S *scan(const Steps<S> &all, const SubLayer<S> &of, const S *u, S *room) {
  const int64_t B = all.rows, E = of.inner, both = of.rank + 2 * of.states;
  S *xz = room, *dt_bc = xz + 2 * B * E, *dt = dt_bc + B * both, *y = dt + B * E;
  project(xz, u, all.width, of.in, B, 2 * E, all.width);
  for (int64_t r = 0; r < B; r++) convolve_row(of, r, xz + 2 * r * E);
  project(dt_bc, xz, 2 * E, of.of_x, B, both, E);
  for (int64_t r = 0; r < B; r++) norm_parts(of, dt_bc + r * both);
  project(dt, dt_bc, both, of.of_dt, B, E, of.rank);
  for (int64_t r = 0; r < B; r++)
    scan_row(of, r, xz + 2 * r * E, xz + (2 * r + 1) * E, dt + r * E, dt_bc + r * both + of.rank);
  project(y, xz, 2 * E, of.out, B, all.width, E);
  return y;
}

// Rotates channels i and i + rotary / 2 of every head by the angle of the token's position.
template <class S> static void rotate(const SubLayer<S> &of, S *x, int64_t heads, int64_t place) {
  const int64_t half = of.rotary / 2;
  for (int64_t i = 0; i < half; i++) {
    const double angle = std::remainder((double)place * of.frequencies[i], 2 * M_PI);
    const S c = (S)(float)(std::cos(angle) * of.stretch), s = (S)(float)(std::sin(angle) * of.stretch);
    for (int64_t k = 0; k < heads; k++) {
      S *first = x + k * of.size + i, *second = first + half;
      const S a = *first, b = *second;
      *first = a * c - b * s, *second = b * c + a * s;
    }
  }
}

template <class S>
static void attend_row(const SubLayer<S> &of, int64_t r, int64_t place, S *q, S *kv, S *y, S *score) {
  const int64_t K = of.size, apart = of.groups * K, W = Lanes<S>::W;
  const int64_t seen = place + 1 < of.window ? place + 1 : of.window, padded = (seen + W - 1) / W * W;
  S *keys = of.keys + r * of.window * apart, *values = of.values + r * of.window * apart;
  rotate(of, q, of.heads, place), rotate(of, kv, of.groups, place);
  memcpy(keys + place % of.window * apart, kv, apart * sizeof(S));
  memcpy(values + place % of.window * apart, kv + apart, apart * sizeof(S));
  const S scale = (S)(1 / std::sqrt((double)K));
  for (int64_t head = 0; head < of.heads; head++) {
    const int64_t group = head / (of.heads / of.groups) * K;
    S greatest = -INFINITY, sum, *out = y + head * K;
    for (int64_t j = 0; j < seen; j++) {
      dots<S, 1>(score + j, q + head * K, keys + j * apart + group, K);
      score[j] *= scale;
      greatest = score[j] > greatest ? score[j] : greatest;
    }
    for (int64_t j = seen; j < padded; j++) score[j] = -INFINITY;
    V<S> sums = V<S>{};
    for (int64_t j = 0; j < padded; j += W) {
      const V<S> weight = exponential<S>(load(score + j) - greatest);
      store(score + j, weight);
      sums += weight;
    }
    sum = total<S>(sums);
    for (int64_t k = 0; k < K; k++) out[k] = 0;
    for (int64_t j = 0; j < seen; j++) {
      const S weight = score[j] / sum, *value = values + j * apart + group;
      for (int64_t k = 0; k < K; k++) out[k] += weight * value[k];
    }
  }
}

template <class S> static S *attend(const Steps<S> &all, const SubLayer<S> &of, const S *u, S *room) {
  const int64_t B = all.rows, queries = of.heads * of.size, both = 2 * of.groups * of.size;
  S *q = room, *kv = q + B * queries, *heads = kv + B * both, *y = heads + B * queries, *score = y + B * all.width;
  project(q, u, all.width, of.in, B, queries, all.width);
  project(kv, u, all.width, of.of_x, B, both, all.width);
  for (int64_t r = 0; r < B; r++)
    attend_row(of, r, all.seen[r], q + r * queries, kv + r * both, heads + r * queries, score);
  project(y, heads, queries, of.out, B, all.width, queries);
  return y;
}

template <class S> static S *gated(const Steps<S> &all, const SubLayer<S> &of, const S *u, S *room) {
  const int64_t B = all.rows, E = of.inner;
  S *both = room, *y = both + 2 * B * E;
  project(both, u, all.width, of.in, B, 2 * E, all.width);
  for (int64_t r = 0; r < B; r++)
    for (int64_t i = 0; i < E; i += Lanes<S>::W) {
      const V<S> gate = load(both + 2 * r * E + i), up = load(both + (2 * r + 1) * E + i);
      store(both + 2 * r * E + i, gate * Logistic<S>(gate).sigmoid(gate) * up);
    }
  project(y, both, 2 * E, of.out, B, all.width, E);
  return y;
}

template <class S> static int step(Steps<S> *of) {
  FlushTiny tiny;
  const Steps<S> &all = *of;
  const int64_t size = all.rows * all.width;
  S *x = all.scratch, *u = x + size, *room = u + size;
  for (int64_t r = 0; r < all.rows; r++)
    memcpy(x + r * all.width, all.embedding + all.tokens[r] * all.width, all.width * sizeof(S));
  for (int64_t n = 0; n < all.count; n++) {
    const SubLayer<S> &layer = all.layers[n];
    for (int64_t r = 0; r < all.rows; r++)
      normed(u + r * all.width, x + r * all.width, layer.norm, all.width, all.eps);
    const S *y = layer.kind == SCAN ? scan(all, layer, u, room)
                 : layer.kind == WINDOW ? attend(all, layer, u, room) : gated(all, layer, u, room);
    for (int64_t i = 0; i < size; i += Lanes<S>::W) store(x + i, load(x + i) + load(y + i));
  }
  for (int64_t r = 0; r < all.rows; r++) {
    normed(u + r * all.width, x + r * all.width, all.norm, all.width, all.eps);
    all.seen[r]++;
  }
  project(all.logits, u, all.width, all.head, all.rows, all.vocabulary, all.width);
  return 0;
}

extern "C" int steps_float(Steps<float> *of, int) { return step(of); }
extern "C" int steps_double(Steps<double> *of, int) { return step(of); }
