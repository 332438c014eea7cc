// Rotation of adjacent channels by angles per token and head, after adding a head's bias:
//
//     (u, v) = (x_2i, x_2i+1) + bias,   y = (u cos - v sin, u sin + v cos)
//     (du, dv) = dy rotated back,   dangle = y_2i dy_2i+1 - y_2i+1 dy_2i,   dx = sum over the heads of a group
//
// Channels after the last pair are not rotated.
#include "blocks.h"

template <class S> struct Turns {
  int64_t rows, length, heads, size, groups, angles, add;  // add: accumulate in grad_angles
  Tokens x, cos, sin, y, grad_y, grad_x, grad_angles;
  const S *bias;   // (heads, size)
  S *grad_bias;    // (blocks, heads, size)

  int64_t tokens() const { return rows * length; }
  int64_t units() const { return parts(tokens(), BLOCK); }
  int64_t turned() const { return heads * angles; }
  int64_t channels() const { return heads * size; }
  int64_t group(int64_t head) const { return head * groups / heads; }
};

template <class S> static void forward_block(void *task, int unit, char *scratch) {
  const Turns<S> &of = *(const Turns<S> *)task;
  S *x = (S *)scratch, *y = x + of.channels(), *cos = y + of.channels(), *sin = cos + of.turned();
  for (int64_t k = unit * BLOCK; k < (unit + 1) * BLOCK && k < of.tokens(); k++) {
    const int64_t r = k / of.length, t = k % of.length;
    read(x, of.x, r, t, 0, of.groups * of.size);
    read(cos, of.cos, r, t, 0, of.turned()), read(sin, of.sin, r, t, 0, of.turned());
    for (int64_t h = 0; h < of.heads; h++) {
      const S *from = x + of.group(h) * of.size, *bias = of.bias + h * of.size;
      const S *c = cos + h * of.angles, *s = sin + h * of.angles;
      S *to = y + h * of.size;
#pragma GCC ivdep
      for (int64_t i = 0; i < of.angles; i++) {
        const S one = from[2 * i] + bias[2 * i], other = from[2 * i + 1] + bias[2 * i + 1];
        to[2 * i] = one * c[i] - other * s[i], to[2 * i + 1] = one * s[i] + other * c[i];
      }
#pragma GCC ivdep
      for (int64_t n = 2 * of.angles; n < of.size; n++) to[n] = from[n] + bias[n];
    }
    write(y, of.y, r, t, 0, of.channels());
  }
}

template <class S> static void backward_block(void *task, int unit, char *scratch) {
  const Turns<S> &of = *(const Turns<S> *)task;
  S *y = (S *)scratch, *grad = y + of.channels(), *grad_x = grad + of.channels(), *cos = grad_x + of.channels();
  S *sin = cos + of.turned(), *grad_angles = sin + of.turned(), *of_bias = of.grad_bias + unit * of.channels();
  memset(of_bias, 0, of.channels() * sizeof(S));
  for (int64_t k = unit * BLOCK; k < (unit + 1) * BLOCK && k < of.tokens(); k++) {
    const int64_t r = k / of.length, t = k % of.length;
    read(y, of.y, r, t, 0, of.channels()), read(grad, of.grad_y, r, t, 0, of.channels());
    read(cos, of.cos, r, t, 0, of.turned()), read(sin, of.sin, r, t, 0, of.turned());
    if (of.add)
      read(grad_angles, of.grad_angles, r, t, 0, of.turned());
    else
      memset(grad_angles, 0, of.turned() * sizeof(S));
    memset(grad_x, 0, of.groups * of.size * sizeof(S));
    for (int64_t h = 0; h < of.heads; h++) {
      const S *c = cos + h * of.angles, *s = sin + h * of.angles, *made = y + h * of.size;
      S *g = grad + h * of.size, *angle = grad_angles + h * of.angles;
#pragma GCC ivdep
      for (int64_t i = 0; i < of.angles; i++) {
        const S one = g[2 * i], other = g[2 * i + 1];
        angle[i] += made[2 * i] * other - made[2 * i + 1] * one;
        g[2 * i] = one * c[i] + other * s[i], g[2 * i + 1] = other * c[i] - one * s[i];
      }
      S *sum = grad_x + of.group(h) * of.size, *bias = of_bias + h * of.size;
#pragma GCC ivdep
      for (int64_t n = 0; n < of.size; n++) sum[n] += g[n], bias[n] += g[n];
    }
    write(grad_x, of.grad_x, r, t, 0, of.groups * of.size);
    write(grad_angles, of.grad_angles, r, t, 0, of.turned());
  }
}

template <class S> static int forward(Turns<S> *of, int threads) {
  return !share(forward_block<S>, of, of->units(), threads, 2 * (of->channels() + of->turned()) * sizeof(S));
}

template <class S> static int backward(Turns<S> *of, int threads) {
  const int64_t room = 3 * (of->channels() + of->turned()) * sizeof(S);
  if (!share(backward_block<S>, of, of->units(), threads, room)) return 1;
  add_up(of->grad_bias, of->units(), of->channels());
  return 0;
}

extern "C" int turns_forward_float(Turns<float> *of, int threads) { return forward(of, threads); }
extern "C" int turns_forward_double(Turns<double> *of, int threads) { return forward(of, threads); }
extern "C" int turns_backward_float(Turns<float> *of, int threads) { return backward(of, threads); }
extern "C" int turns_backward_double(Turns<double> *of, int threads) { return backward(of, threads); }
