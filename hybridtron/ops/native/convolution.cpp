// The short causal convolution with SiLU:
//
//     p_t = bias + sum over k < width of weight_{width-1-k} x_{t-k},   y_t = silu(p_t), or p_t without activation
//     g_t = dy_t silu'(p_t),   dx_s = sum over k of weight_{width-1-k} g_{s+k},   dweight_{width-1-k} = sum over t of g_t x_{t-k}
//
// k reaches no further back than the token's document does. What is before the row is its tail, of the first document.
#include "blocks.h"

template <class S> struct Convolution {
  int64_t rows, length, channels, width, activation;
  Tokens x, tail, y, grad_y, grad_x, grad_tail;  // tail.data is null where zeros come before the row
  const uint8_t *starts;                         // (rows, length), or null
  const S *weight, *bias;                        // (width, channels), (channels)
  S *grad_weight;                                // (rows, blocks, width + 1, channels): the last is the bias's

  int64_t blocks() const { return parts(length, BLOCK); }
  int64_t groups() const { return parts(channels, GROUP); }
  int64_t units() const { return rows * blocks() * groups(); }
  int64_t span() const { return BLOCK + 2 * (width - 1); }  // of a block and what its taps and gradients reach
  int64_t scratch() const { return (2 * span() + 2 * width + 2) * GROUP * sizeof(S); }
};

template <class S> struct ConvolutionBlock {
  const Convolution<S> &of;
  int64_t row, block, first, count, padded, start, stop, reach;
  S *x, *g, *weight, *of_weight;  // x begins `reach` tokens before the block, g with it

  ConvolutionBlock(const Convolution<S> &of, int unit, char *scratch) : of(of), reach(of.width - 1) {
    first = unit % of.groups() * GROUP, unit /= of.groups();
    block = unit % of.blocks(), row = unit / of.blocks();
    count = of.channels - first < GROUP ? of.channels - first : GROUP, padded = lanes<S>(count);
    start = block * BLOCK, stop = start + BLOCK < of.length ? start + BLOCK : of.length;
    x = (S *)scratch, g = x + of.span() * GROUP, weight = g + of.span() * GROUP, of_weight = weight + (of.width + 1) * GROUP;
    for (int64_t k = 0; k <= of.width; k++) {
      const S *from = k < of.width ? of.weight + k * of.channels : of.bias;
      for (int64_t i = 0; i < padded; i++) weight[k * GROUP + i] = i < count ? from[first + i] : 0, of_weight[k * GROUP + i] = 0;
    }
  }

  void read_x(int64_t end) {
    for (int64_t t = start - reach; t < end; t++) {
      S *to = x + (t - start + reach) * GROUP;
      if (t >= 0) read_padded(to, of.x, row, t, first, count);
      else if (of.tail.data) read_padded(to, of.tail, row, t + reach, first, count);
      else for (int64_t i = 0; i < padded; i++) to[i] = 0;
    }
  }

  // How far back a token's document reaches
  int64_t back(int64_t t) const {
    if (of.starts)
      for (int64_t k = 0; k < reach && k <= t; k++)
        if (of.starts[row * of.length + t - k]) return k;
    return reach;
  }

  V<S> tap(int64_t k, int64_t i) const { return load(weight + (reach - k) * GROUP + i); }

  V<S> sum(int64_t t, int64_t back, int64_t i) const {
    V<S> p = load(weight + of.width * GROUP + i);
    for (int64_t k = back; k >= 0; k--) p += tap(k, i) * load(x + (t - k - start + reach) * GROUP + i);
    return p;
  }
};

template <class S> static void forward_block(void *task, int unit, char *scratch) {
  const Convolution<S> &of = *(const Convolution<S> *)task;
  ConvolutionBlock<S> c(of, unit, scratch);
  c.read_x(c.stop);
  for (int64_t t = c.start; t < c.stop; t++) {
    const int64_t back = c.back(t);
    for (int64_t i = 0; i < c.padded; i += Lanes<S>::W) {
      V<S> p = c.sum(t, back, i);
      store(c.g + i, of.activation ? p * Logistic<S>(p).sigmoid(p) : p);
    }
    write(c.g, of.y, c.row, t, c.first, c.count);
  }
}

// g of the block and of the tokens behind it whose taps reach into it; the weight's gradient of the block alone
template <class S> static void make_g(ConvolutionBlock<S> &c, int64_t end) {
  const Convolution<S> &of = c.of;
  for (int64_t t = c.start; t < end; t++) {
    const int64_t back = c.back(t);
    S *g = c.g + (t - c.start) * GROUP;
    read_padded(g, of.grad_y, c.row, t, c.first, c.count);
    for (int64_t i = 0; i < c.padded; i += Lanes<S>::W) {
      V<S> made = load(g + i);
      if (of.activation) {
        const V<S> p = c.sum(t, back, i), open = Logistic<S>(p).sigmoid(p);
        made = made * open * (1 + p * (1 - open));
        store(g + i, made);
      }
      if (t >= c.stop) continue;
      S *bias = c.of_weight + of.width * GROUP + i;
      store(bias, load(bias) + made);
      for (int64_t k = 0; k <= back; k++) {
        S *weight = c.of_weight + (c.reach - k) * GROUP + i;
        store(weight, load(weight) + made * load(c.x + (t - k - c.start + c.reach) * GROUP + i));
      }
    }
  }
}

template <class S> static void backward_block(void *task, int unit, char *scratch) {
  const Convolution<S> &of = *(const Convolution<S> *)task;
  ConvolutionBlock<S> c(of, unit, scratch);
  const int64_t end = c.stop + c.reach < of.length ? c.stop + c.reach : of.length;
  c.read_x(end);
  make_g(c, end);
  for (int64_t s = c.block ? c.start : -c.reach; s < c.stop; s++) {
    S *sum = c.x;  // the inputs are not needed any more
    for (int64_t i = 0; i < c.padded; i++) sum[i] = 0;
    for (int64_t k = s < 0 ? -s : 0; k <= c.reach && s + k < end; k++) {
      if (c.back(s + k) < k) break;
      for (int64_t i = 0; i < c.padded; i += Lanes<S>::W)
        store(sum + i, load(sum + i) + c.tap(k, i) * load(c.g + (s + k - c.start) * GROUP + i));
    }
    if (s >= 0) write(sum, of.grad_x, c.row, s, c.first, c.count);
    else if (of.tail.data) write(sum, of.grad_tail, c.row, s + c.reach, c.first, c.count);
  }
  S *to = of.grad_weight + (c.row * of.blocks() + c.block) * (of.width + 1) * of.channels + c.first;
  for (int64_t k = 0; k <= of.width; k++) memcpy(to + k * of.channels, c.of_weight + k * GROUP, c.count * sizeof(S));
}

template <class S> static int forward(Convolution<S> *of, int threads) {
  return !share(forward_block<S>, of, of->units(), threads, of->scratch());
}

template <class S> static int backward(Convolution<S> *of, int threads) {
  if (!share(backward_block<S>, of, of->units(), threads, of->scratch())) return 1;
  add_up(of->grad_weight, of->rows * of->blocks(), (of->width + 1) * of->channels);
  return 0;
}

extern "C" int64_t token_block() { return BLOCK; }
extern "C" int convolution_forward_float(Convolution<float> *of, int threads) { return forward(of, threads); }
extern "C" int convolution_forward_double(Convolution<double> *of, int threads) { return forward(of, threads); }
extern "C" int convolution_backward_float(Convolution<float> *of, int threads) { return backward(of, threads); }
extern "C" int convolution_backward_double(Convolution<double> *of, int threads) { return backward(of, threads); }
