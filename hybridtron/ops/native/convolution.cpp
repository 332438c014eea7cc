// The short causal convolution with SiLU:
//
//     p_t = bias + sum over k < width of weight_{width-1-k} x_{t-k},   y_t = silu(p_t), or p_t without activation
//     g_t = dy_t silu'(p_t),   dx_s = sum over k of weight_{width-1-k} g_{s+k}
//     dweight_{width-1-k} = sum over t of g_t x_{t-k}
//
// k stops where the token's document begins. The row's tail comes before it, and belongs to its first document.
#include "blocks.h"

constexpr int MOST_TAPS = 32;

template <class S> struct Convolution {
  int64_t rows, length, channels, width, activation;
  Tokens x, tail, y, grad_y, grad_x, grad_tail;  // tail.data is null if zeros precede the row
  const uint8_t *starts;                         // (rows, length), or null
  const S *weight, *bias;                        // (width, channels), (channels)
  S *grad_weight;                                // (rows, blocks, width + 1, channels), the bias last

  int64_t blocks() const { return parts(length, BLOCK); }
  int64_t groups() const { return parts(channels, GROUP); }
  int64_t units() const { return rows * blocks() * groups(); }
  int64_t scratch() const { return 2 * (BLOCK + 2 * MOST_TAPS) * GROUP * sizeof(S); }
};

// A block of tokens and a group of channels. WIDTH: the number of taps if fixed at compile time, else 0.
template <class S, int WIDTH> struct ConvolutionBlock {
  typedef V<S> Taps[WIDTH ? WIDTH : MOST_TAPS];  // by a tap's distance
  const Convolution<S> &of;
  const int reach;
  int64_t row, block, first, count, padded, start, stop;
  S *x, *g;                             // by token; x begins `reach` tokens before the block
  int8_t backs[BLOCK + MOST_TAPS];      // how far back each token's document reaches

  ConvolutionBlock(const Convolution<S> &of, int unit, char *scratch) : of(of), reach((WIDTH ? WIDTH : of.width) - 1) {
    first = unit % of.groups() * GROUP, unit /= of.groups();
    block = unit % of.blocks(), row = unit / of.blocks();
    count = of.channels - first < GROUP ? of.channels - first : GROUP, padded = lanes<S>(count);
    start = block * BLOCK, stop = start + BLOCK < of.length ? start + BLOCK : of.length;
    x = (S *)scratch, g = x + (BLOCK + 2 * MOST_TAPS) * GROUP;
  }

  void read_x(int64_t end) {
    for (int64_t t = start - reach; t < end; t++) {
      S *to = at(x, t + reach);
      if (t >= start) backs[t - start] = back(t);
      if (t >= 0) read_padded(to, of.x, row, t, first, count);
      else if (of.tail.data) read_padded(to, of.tail, row, t + reach, first, count);
      else for (int64_t i = 0; i < padded; i++) to[i] = 0;
    }
  }

  S *at(S *array, int64_t t) const { return array + (t - start) * GROUP; }

  int8_t back(int64_t t) const {
    if (of.starts)
      for (int k = 0; k < reach && k <= t; k++)
        if (of.starts[row * of.length + t - k]) return k;
    return reach;
  }

  V<S> parameter(const S *from, int64_t i) const {
    V<S> v = V<S>{};
    for (int64_t k = 0; k < Lanes<S>::W && i + k < count; k++) v[k] = from[first + i + k];
    return v;
  }

  void taps(V<S> *weight, int64_t i) const {
    for (int k = 0; k <= reach; k++) weight[k] = parameter(of.weight + (reach - k) * of.channels, i);
  }

  V<S> sum(const V<S> *weight, V<S> bias, int64_t t, int64_t i) const {
    const int most = backs[t - start];
    if (most < reach) {
      for (int k = most; k >= 0; k--) bias += weight[k] * load(at(x, t - k + reach) + i);
      return bias;
    }
#pragma GCC unroll 4
    for (int k = reach; k >= 0; k--) bias += weight[k] * load(at(x, t - k + reach) + i);
    return bias;
  }
};

template <class S, int WIDTH> static void forward_block(void *task, int unit, char *scratch) {
  const Convolution<S> &of = *(const Convolution<S> *)task;
  ConvolutionBlock<S, WIDTH> c(of, unit, scratch);
  c.read_x(c.stop);
  for (int64_t i = 0; i < c.padded; i += Lanes<S>::W) {
    typename ConvolutionBlock<S, WIDTH>::Taps weight;
    c.taps(weight, i);
    const V<S> bias = c.parameter(of.bias, i);
    for (int64_t t = c.start; t < c.stop; t++) {
      const V<S> p = c.sum(weight, bias, t, i);
      store(c.at(c.g, t) + i, of.activation ? p * Logistic<S>(p).sigmoid(p) : p);
    }
  }
  for (int64_t t = c.start; t < c.stop; t++) write(c.at(c.g, t), of.y, c.row, t, c.first, c.count);
}

// Computes g for the block and for later tokens whose taps reach into it, and the weight's gradient for the block.
template <class S, int WIDTH>
static void make_g(ConvolutionBlock<S, WIDTH> &c, const V<S> *weight, int64_t i, int64_t end) {
  const Convolution<S> &of = c.of;
  const V<S> bias = c.parameter(of.bias, i);
  typename ConvolutionBlock<S, WIDTH>::Taps of_weight;
  V<S> of_bias = V<S>{};
  for (int k = 0; k <= c.reach; k++) of_weight[k] = V<S>{};
  for (int64_t t = c.start; t < end; t++) {
    V<S> made = load(c.at(c.g, t) + i);
    if (of.activation) {
      const V<S> p = c.sum(weight, bias, t, i), open = Logistic<S>(p).sigmoid(p);
      made = made * open * (1 + p * (1 - open));
      store(c.at(c.g, t) + i, made);
    }
    if (t >= c.stop) continue;
    of_bias += made;
    const int back = c.backs[t - c.start];
#pragma GCC unroll 4
    for (int k = 0; k <= c.reach; k++)
      if (k <= back) of_weight[k] += made * load(c.at(c.x, t - k + c.reach) + i);
  }
  S *to = of.grad_weight + (c.row * of.blocks() + c.block) * (of.width + 1) * of.channels + c.first;
  for (int64_t lane = 0; lane < Lanes<S>::W && i + lane < c.count; lane++) {
    for (int k = 0; k <= c.reach; k++) to[(c.reach - k) * of.channels + i + lane] = of_weight[k][lane];
    to[of.width * of.channels + i + lane] = of_bias[lane];
  }
}

template <class S, int WIDTH> static void backward_block(void *task, int unit, char *scratch) {
  const Convolution<S> &of = *(const Convolution<S> *)task;
  ConvolutionBlock<S, WIDTH> c(of, unit, scratch);
  const int64_t end = c.stop + c.reach < of.length ? c.stop + c.reach : of.length, begin = c.block ? c.start : -c.reach;
  c.read_x(end);
  for (int64_t t = c.start; t < end; t++) read_padded(c.at(c.g, t), of.grad_y, c.row, t, c.first, c.count);
  for (int64_t i = 0; i < c.padded; i += Lanes<S>::W) {
    typename ConvolutionBlock<S, WIDTH>::Taps weight;
    c.taps(weight, i);
    make_g(c, weight, i, end);
    for (int64_t s = begin; s < c.stop; s++) {  // this token's x is no longer needed
      V<S> sum = V<S>{};
#pragma GCC unroll 4
      for (int k = 0; k <= c.reach; k++)
        if (s + k >= 0 && s + k < end && c.backs[s + k - c.start] >= k) sum += weight[k] * load(c.at(c.g, s + k) + i);
      store(c.at(c.x, s + c.reach) + i, sum);
    }
  }
  for (int64_t s = begin; s < c.stop; s++) {
    const S *sum = c.at(c.x, s + c.reach);
    if (s >= 0) write(sum, of.grad_x, c.row, s, c.first, c.count);
    else if (of.tail.data) write(sum, of.grad_tail, c.row, s + c.reach, c.first, c.count);
  }
}

template <class S> static int forward(Convolution<S> *of, int threads) {
  auto work = of->width == 4 ? forward_block<S, 4> : forward_block<S, 0>;
  return !share(work, of, of->units(), threads, of->scratch());
}

template <class S> static int backward(Convolution<S> *of, int threads) {
  auto work = of->width == 4 ? backward_block<S, 4> : backward_block<S, 0>;
  if (!share(work, of, of->units(), threads, of->scratch())) return 1;
  add_up(of->grad_weight, of->rows * of->blocks(), (of->width + 1) * of->channels);
  return 0;
}

extern "C" int64_t token_block() { return BLOCK; }
extern "C" int convolution_forward_float(Convolution<float> *of, int threads) { return forward(of, threads); }
extern "C" int convolution_forward_double(Convolution<double> *of, int threads) { return forward(of, threads); }
extern "C" int convolution_backward_float(Convolution<float> *of, int threads) { return backward(of, threads); }
extern "C" int convolution_backward_double(Convolution<double> *of, int threads) { return backward(of, threads); }
