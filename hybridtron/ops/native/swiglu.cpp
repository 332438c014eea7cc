// y = silu(m gate) up;   dup = dy silu(m gate),   dgate = dy up m silu'(m gate), and again y where it was not kept
#include "blocks.h"

template <class S> struct SwiGLU {
  int64_t rows, length, channels;
  Tokens gate, up, y, grad_y, grad_gate, grad_up;
  double multiplier;

  int64_t groups() const { return parts(channels, GROUP); }
  int64_t units() const { return parts(rows * length, BLOCK); }
};

template <class S, bool BACK> static void block(void *task, int unit, char *scratch) {
  const SwiGLU<S> &of = *(const SwiGLU<S> *)task;
  const S m = of.multiplier;
  S *gate = (S *)scratch, *up = gate + GROUP, *grad = up + GROUP;
  for (int64_t k = unit * BLOCK; k < (unit + 1) * BLOCK && k < of.rows * of.length; k++)
    for (int64_t first = 0; first < of.channels; first += GROUP) {
      const int64_t r = k / of.length, t = k % of.length;
      const int64_t left = of.channels - first, count = left < GROUP ? left : GROUP;
      read_padded(gate, of.gate, r, t, first, count), read_padded(up, of.up, r, t, first, count);
      if (BACK) read_padded(grad, of.grad_y, r, t, first, count);
      for (int64_t i = 0; i < count; i += Lanes<S>::W) {
        const V<S> g = m * load(gate + i), u = load(up + i), open = Logistic<S>(g).sigmoid(g);
        if (!BACK) {
          store(gate + i, g * open * u);
          continue;
        }
        const V<S> dy = load(grad + i);
        store(grad + i, g * open * u);
        store(up + i, dy * (g * open)), store(gate + i, m * (dy * u * open * (1 + g * (1 - open))));
      }
      write(gate, BACK ? of.grad_gate : of.y, r, t, first, count);
      if (BACK) write(up, of.grad_up, r, t, first, count);
      if (BACK && of.y.data) write(grad, of.y, r, t, first, count);
    }
}

template <class S, bool BACK> static int swiglu(SwiGLU<S> *of, int threads) {
  return !share(block<S, BACK>, of, of->units(), threads, 3 * GROUP * sizeof(S));
}

extern "C" int swiglu_forward_float(SwiGLU<float> *of, int threads) { return swiglu<float, false>(of, threads); }
extern "C" int swiglu_forward_double(SwiGLU<double> *of, int threads) { return swiglu<double, false>(of, threads); }
extern "C" int swiglu_backward_float(SwiGLU<float> *of, int threads) { return swiglu<float, true>(of, threads); }
extern "C" int swiglu_backward_double(SwiGLU<double> *of, int threads) { return swiglu<double, true>(of, threads); }
