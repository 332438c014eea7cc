// Root-mean-square norm of one tensor, or of a sum:
//
//     s = x + added,  r = 1 / sqrt(mean of s^2 + eps),  y = s r weight
//     u = dy weight,  dx = r (u - s r^2 mean of u s) + ds,   dweight = sum over tokens of dy s r
#include <cmath>
#include "blocks.h"

template <class S> struct Norm {
  int64_t rows, length, channels;
  Tokens x, added, sum, y, grad_y, grad_sum, grad_x;  // added and grad_sum can be null; backward's x is the sum
  const S *weight;
  S *grad_weight;  // (blocks, channels)
  double eps;

  int64_t padded() const { return lanes<S>(channels); }
  int64_t tokens() const { return rows * length; }
  int64_t units() const { return parts(tokens(), BLOCK); }
};

template <class S> static S reciprocal_root(const Norm<S> &of, const S *x) {
  V<S> squares = V<S>{};
  for (int64_t i = 0; i < of.padded(); i += Lanes<S>::W) squares += load(x + i) * load(x + i);
  return 1 / std::sqrt(total<S>(squares) / (S)of.channels + (S)of.eps);
}

template <class S> static void forward_block(void *task, int unit, char *scratch) {
  const Norm<S> &of = *(const Norm<S> *)task;
  S *x = (S *)scratch, *added = x + of.padded(), *weight = added + of.padded();
  for (int64_t i = 0; i < of.padded(); i++) weight[i] = i < of.channels ? of.weight[i] : 0;
  for (int64_t k = unit * BLOCK; k < (unit + 1) * BLOCK && k < of.tokens(); k++) {
    const int64_t r = k / of.length, t = k % of.length;
    read_padded(x, of.x, r, t, 0, of.channels);
    if (of.added.data) {
      read_padded(added, of.added, r, t, 0, of.channels);
      for (int64_t i = 0; i < of.channels; i++) x[i] += added[i];
      write(x, of.sum, r, t, 0, of.channels);
      read(x, of.sum, r, t, 0, of.channels);  // as rounded when stored
    }
    const S root = reciprocal_root(of, x);
    for (int64_t i = 0; i < of.padded(); i += Lanes<S>::W) store(x + i, load(x + i) * root * load(weight + i));
    write(x, of.y, r, t, 0, of.channels);
  }
}

template <class S> static void backward_block(void *task, int unit, char *scratch) {
  const Norm<S> &of = *(const Norm<S> *)task;
  const int64_t W = Lanes<S>::W, padded = of.padded();
  S *x = (S *)scratch, *grad = x + padded, *weight = grad + padded, *of_weight = weight + padded;
  for (int64_t i = 0; i < padded; i++) weight[i] = i < of.channels ? of.weight[i] : 0, of_weight[i] = 0;
  for (int64_t k = unit * BLOCK; k < (unit + 1) * BLOCK && k < of.tokens(); k++) {
    const int64_t r = k / of.length, t = k % of.length;
    read_padded(x, of.x, r, t, 0, of.channels), read_padded(grad, of.grad_y, r, t, 0, of.channels);
    const S root = reciprocal_root(of, x);
    V<S> product = V<S>{};
    for (int64_t i = 0; i < padded; i += W) product += load(grad + i) * load(weight + i) * load(x + i);
    const S mean = total<S>(product) / (S)of.channels * root * root;
    for (int64_t i = 0; i < padded; i += W) {
      const V<S> x_i = load(x + i), grad_i = load(grad + i);
      store(of_weight + i, load(of_weight + i) + grad_i * x_i * root);
      store(x + i, (grad_i * load(weight + i) - x_i * mean) * root);
    }
    if (of.grad_sum.data) {
      write(x, of.grad_x, r, t, 0, of.channels);
      read(x, of.grad_x, r, t, 0, of.channels);  // rounded alone first, for the bits of a norm after a separate sum
      read(grad, of.grad_sum, r, t, 0, of.channels);
      for (int64_t i = 0; i < of.channels; i++) x[i] += grad[i];
    }
    write(x, of.grad_x, r, t, 0, of.channels);
  }
  memcpy(of.grad_weight + unit * of.channels, of_weight, of.channels * sizeof(S));
}

template <class S> static int forward(Norm<S> *of, int threads) {
  return !share(forward_block<S>, of, of->units(), threads, 3 * of->padded() * sizeof(S));
}

template <class S> static int backward(Norm<S> *of, int threads) {
  if (!share(backward_block<S>, of, of->units(), threads, 4 * of->padded() * sizeof(S))) return 1;
  add_up(of->grad_weight, of->units(), of->channels);
  return 0;
}

extern "C" int norm_forward_float(Norm<float> *of, int threads) { return forward(of, threads); }
extern "C" int norm_forward_double(Norm<double> *of, int threads) { return forward(of, threads); }
extern "C" int norm_backward_float(Norm<float> *of, int threads) { return backward(of, threads); }
extern "C" int norm_backward_double(Norm<double> *of, int threads) { return backward(of, threads); }
