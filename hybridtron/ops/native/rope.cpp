// Rotary positions: rotates the pair (i, i + half) in every head by the token's angle i, or back by it.
#include "blocks.h"

template <class S> struct Rope {
  int64_t rows, length, heads, size, half, back;
  Tokens x, cos, sin, y;
};

template <class S> static void block(void *task, int unit, char *scratch) {
  const Rope<S> &of = *(const Rope<S> *)task;
  const int64_t channels = of.heads * of.size, half = of.half;
  S *x = (S *)scratch, *cos = x + channels, *sin = cos + half;
  for (int64_t k = unit * BLOCK; k < (unit + 1) * BLOCK && k < of.rows * of.length; k++) {
    const int64_t r = k / of.length, t = k % of.length;
    read(x, of.x, r, t, 0, channels), read(cos, of.cos, r, t, 0, half), read(sin, of.sin, r, t, 0, half);
    for (int64_t i = 0; of.back && i < half; i++) sin[i] = -sin[i];
    for (int64_t h = 0; h < of.heads; h++) {
      S *first = x + h * of.size, *second = first + half;
#pragma GCC ivdep
      for (int64_t i = 0; i < half; i++) {
        const S one = first[i], other = second[i];
        first[i] = one * cos[i] - other * sin[i], second[i] = other * cos[i] + one * sin[i];
      }
    }
    write(x, of.y, r, t, 0, channels);
  }
}

template <class S> static int rope(Rope<S> *of, int threads) {
  const int64_t room = (of->heads * of->size + 2 * of->half) * sizeof(S);
  return !share(block<S>, of, parts(of->rows * of->length, BLOCK), threads, room);
}

extern "C" int rope_float(Rope<float> *of, int threads) { return rope(of, threads); }
extern "C" int rope_double(Rope<double> *of, int threads) { return rope(of, threads); }
