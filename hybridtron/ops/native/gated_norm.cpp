// The gated norm of Mamba-2, as two steps and in full; v = y silu(z):
//
//     squares:  out = sum of v^2 over a head                      dv = 2 v dout
//     scale:    out = v scale weight, a scale for each head       dv = dout weight scale,
//               dscale = sum over a head of dout weight v,        dweight = sum over tokens of dout v scale
//
// and in full, where a head is a group, with r = 1 / sqrt(mean of v^2 over it + eps):
//
//     norm:     out = v r weight                                  dv = r (dout weight - v r^2 mean(dout weight v)),
//                                                                 dweight = sum over tokens of dout v r
//
// and in all three dy = dv silu(z),   dz = dv y silu'(z).
#include <cmath>

#include "blocks.h"

template <class S> struct GatedNorm {
  int64_t rows, length, channels, head, scaled;
  Tokens y, z, heads, out, grad_out, grad_y, grad_z, grad_heads;  // heads: the squares, or the scales
  const S *weight;
  S *grad_weight;  // (blocks, channels)
  double eps;

  int64_t padded() const { return lanes<S>(channels); }
  int64_t units() const { return parts(rows * length, BLOCK); }
};

template <class S> static S sum_of_head(const S *from, int64_t head) {
  V<S> sum = V<S>{};
  S rest = 0;
  int64_t i = 0;
  for (; i + Lanes<S>::W <= head; i += Lanes<S>::W) sum += load(from + i);
  for (; i < head; i++) rest += from[i];
  return total<S>(sum) + rest;
}

template <class S> static S product_of_head(const S *a, const S *b, int64_t head) {
  V<S> sum = V<S>{};
  S rest = 0;
  int64_t i = 0;
  for (; i + Lanes<S>::W <= head; i += Lanes<S>::W) sum += load(a + i) * load(b + i);
  for (; i < head; i++) rest += a[i] * b[i];
  return total<S>(sum) + rest;
}

template <class S> static void over_heads(const GatedNorm<S> &of, const S *heads, S *channels) {
  for (int64_t h = 0; h < of.channels / of.head; h++)
    for (int64_t k = 0; k < of.head; k++) channels[h * of.head + k] = heads[h];
}

template <class S> static void forward_block(void *task, int unit, char *scratch) {
  const GatedNorm<S> &of = *(const GatedNorm<S> *)task;
  const int64_t W = Lanes<S>::W, padded = of.padded();
  S *y = (S *)scratch, *z = y + padded, *heads = z + padded, *scale = heads + padded, *weight = scale + padded;
  for (int64_t i = 0; i < padded; i++) weight[i] = of.scaled && i < of.channels ? of.weight[i] : 0, scale[i] = 0;
  for (int64_t k = unit * BLOCK; k < (unit + 1) * BLOCK && k < of.rows * of.length; k++) {
    const int64_t r = k / of.length, t = k % of.length, count = of.channels / of.head;
    read_padded(y, of.y, r, t, 0, of.channels), read_padded(z, of.z, r, t, 0, of.channels);
    if (of.scaled) read(heads, of.heads, r, t, 0, count), over_heads(of, heads, scale);
    for (int64_t i = 0; i < padded; i += W) {
      const V<S> gate = load(z + i), v = load(y + i) * gate * Logistic<S>(gate).sigmoid(gate);
      store(y + i, of.scaled ? v * load(scale + i) * load(weight + i) : v * v);
    }
    if (of.scaled) {
      write(y, of.out, r, t, 0, of.channels);
      continue;
    }
    for (int64_t h = 0; h < count; h++) heads[h] = sum_of_head(y + h * of.head, of.head);
    write(heads, of.heads, r, t, 0, count);
  }
}

template <class S> static void backward_block(void *task, int unit, char *scratch) {
  const GatedNorm<S> &of = *(const GatedNorm<S> *)task;
  const int64_t W = Lanes<S>::W, padded = of.padded();
  S *y = (S *)scratch, *z = y + padded, *heads = z + padded, *scale = heads + padded, *weight = scale + padded;
  S *of_weight = weight + padded, *grad = of_weight + padded;
  for (int64_t i = 0; i < padded; i++)
    weight[i] = of.scaled && i < of.channels ? of.weight[i] : 0, scale[i] = of_weight[i] = grad[i] = 0;
  for (int64_t k = unit * BLOCK; k < (unit + 1) * BLOCK && k < of.rows * of.length; k++) {
    const int64_t r = k / of.length, t = k % of.length, count = of.channels / of.head;
    read_padded(y, of.y, r, t, 0, of.channels), read_padded(z, of.z, r, t, 0, of.channels);
    if (of.scaled) read(heads, of.heads, r, t, 0, count), read(grad, of.grad_out, r, t, 0, of.channels);
    else read(heads, of.grad_heads, r, t, 0, count);
    over_heads(of, heads, scale);
    for (int64_t i = 0; i < padded; i += W) {
      const V<S> gate = load(z + i), open = Logistic<S>(gate).sigmoid(gate), y_i = load(y + i), v = y_i * gate * open;
      V<S> of_v = 2 * v * load(scale + i);
      if (of.scaled) {
        const V<S> weighted = load(grad + i) * load(weight + i);
        store(of_weight + i, load(of_weight + i) + load(grad + i) * v * load(scale + i));
        of_v = weighted * load(scale + i);
        store(grad + i, weighted * v);
      }
      store(y + i, of_v * gate * open), store(z + i, of_v * y_i * open * (1 + gate * (1 - open)));
    }
    write(y, of.grad_y, r, t, 0, of.channels), write(z, of.grad_z, r, t, 0, of.channels);
    if (!of.scaled) continue;
    for (int64_t h = 0; h < count; h++) heads[h] = sum_of_head(grad + h * of.head, of.head);
    write(heads, of.grad_heads, r, t, 0, count);
  }
  if (of.scaled) memcpy(of.grad_weight + unit * of.channels, of_weight, of.channels * sizeof(S));
}

template <class S> static S root_mean_square_inverse(const GatedNorm<S> &of, const S *v) {
  return 1 / std::sqrt(product_of_head(v, v, of.head) / of.head + (S)of.eps);
}

template <class S> static void norm_forward_block(void *task, int unit, char *scratch) {
  const GatedNorm<S> &of = *(const GatedNorm<S> *)task;
  const int64_t W = Lanes<S>::W, padded = of.padded(), count = of.channels / of.head;
  S *v = (S *)scratch, *z = v + padded, *heads = z + padded, *scale = heads + padded, *weight = scale + padded;
  for (int64_t i = 0; i < padded; i++) weight[i] = i < of.channels ? of.weight[i] : 0, scale[i] = 0;
  for (int64_t k = unit * BLOCK; k < (unit + 1) * BLOCK && k < of.rows * of.length; k++) {
    const int64_t r = k / of.length, t = k % of.length;
    read_padded(v, of.y, r, t, 0, of.channels), read_padded(z, of.z, r, t, 0, of.channels);
    for (int64_t i = 0; i < padded; i += W) {
      const V<S> gate = load(z + i);
      store(v + i, load(v + i) * gate * Logistic<S>(gate).sigmoid(gate));
    }
    for (int64_t h = 0; h < count; h++) heads[h] = root_mean_square_inverse(of, v + h * of.head);
    over_heads(of, heads, scale);
    for (int64_t i = 0; i < padded; i += W) store(v + i, load(v + i) * load(scale + i) * load(weight + i));
    write(v, of.out, r, t, 0, of.channels);
  }
}

template <class S> static void norm_backward_block(void *task, int unit, char *scratch) {
  const GatedNorm<S> &of = *(const GatedNorm<S> *)task;
  const int64_t W = Lanes<S>::W, padded = of.padded(), count = of.channels / of.head;
  S *y = (S *)scratch, *z = y + padded, *v = z + padded, *heads = v + padded, *scale = heads + padded;
  S *weight = scale + padded, *of_weight = weight + padded, *grad = of_weight + padded, *back = grad + padded;
  for (int64_t i = 0; i < padded; i++)
    weight[i] = i < of.channels ? of.weight[i] : 0, scale[i] = of_weight[i] = grad[i] = back[i] = 0;
  for (int64_t k = unit * BLOCK; k < (unit + 1) * BLOCK && k < of.rows * of.length; k++) {
    const int64_t r = k / of.length, t = k % of.length;
    read_padded(y, of.y, r, t, 0, of.channels), read_padded(z, of.z, r, t, 0, of.channels);
    read(grad, of.grad_out, r, t, 0, of.channels);
    for (int64_t i = 0; i < padded; i += W) {  // from here on y is silu(z), and z is y silu'(z)
      const V<S> gate = load(z + i), open = Logistic<S>(gate).sigmoid(gate), y_i = load(y + i);
      store(v + i, y_i * gate * open), store(y + i, gate * open);
      store(z + i, y_i * open * (1 + gate * (1 - open)));
    }
    for (int64_t h = 0; h < count; h++) heads[h] = root_mean_square_inverse(of, v + h * of.head);
    over_heads(of, heads, scale);
    for (int64_t i = 0; i < padded; i += W) {  // from here on v is normed, and grad is dout weight
      const V<S> normed = load(v + i) * load(scale + i), grad_i = load(grad + i);
      store(of_weight + i, load(of_weight + i) + grad_i * normed);
      store(v + i, normed), store(grad + i, grad_i * load(weight + i));
    }
    for (int64_t h = 0; h < count; h++)
      heads[h] = product_of_head(grad + h * of.head, v + h * of.head, of.head) / of.head;
    over_heads(of, heads, back);
    for (int64_t i = 0; i < padded; i += W) {
      const V<S> of_v = load(scale + i) * (load(grad + i) - load(v + i) * load(back + i));
      store(y + i, of_v * load(y + i)), store(z + i, of_v * load(z + i));
    }
    write(y, of.grad_y, r, t, 0, of.channels), write(z, of.grad_z, r, t, 0, of.channels);
  }
  memcpy(of.grad_weight + unit * of.channels, of_weight, of.channels * sizeof(S));
}

template <class S> static int norm_forward(GatedNorm<S> *of, int threads) {
  return !share(norm_forward_block<S>, of, of->units(), threads, 5 * of->padded() * sizeof(S));
}

template <class S> static int norm_backward(GatedNorm<S> *of, int threads) {
  if (!share(norm_backward_block<S>, of, of->units(), threads, 9 * of->padded() * sizeof(S))) return 1;
  add_up(of->grad_weight, of->units(), of->channels);
  return 0;
}

template <class S> static int forward(GatedNorm<S> *of, int threads) {
  return !share(forward_block<S>, of, of->units(), threads, 5 * of->padded() * sizeof(S));
}

template <class S> static int backward(GatedNorm<S> *of, int threads) {
  if (!share(backward_block<S>, of, of->units(), threads, 7 * of->padded() * sizeof(S))) return 1;
  if (of->scaled) add_up(of->grad_weight, of->units(), of->channels);
  return 0;
}

extern "C" int gated_norm_forward_float(GatedNorm<float> *of, int threads) { return forward(of, threads); }
extern "C" int gated_norm_forward_double(GatedNorm<double> *of, int threads) { return forward(of, threads); }
extern "C" int gated_norm_backward_float(GatedNorm<float> *of, int threads) { return backward(of, threads); }
extern "C" int gated_norm_backward_double(GatedNorm<double> *of, int threads) { return backward(of, threads); }
extern "C" int gated_norm_norm_forward_float(GatedNorm<float> *of, int threads) { return norm_forward(of, threads); }
extern "C" int gated_norm_norm_forward_double(GatedNorm<double> *of, int threads) { return norm_forward(of, threads); }
extern "C" int gated_norm_norm_backward_float(GatedNorm<float> *of, int threads) { return norm_backward(of, threads); }
extern "C" int gated_norm_norm_backward_double(GatedNorm<double> *of, int threads) { return norm_backward(of, threads); }
