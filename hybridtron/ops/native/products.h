// Products of small matrices in the cache, as steps of an op: C = A B, or C += A B.
//
// Rows of B and C are dense and full vectors; A has any strides, since each entry is read alone and broadcast to a
// vector. Sums run over the depth in order, so a product's bits depend on its factors alone.
#pragma once
#include "vectors.h"

#if defined(__AVX__) && !defined(__AVX512F__) || defined(__SSE2__) && !defined(__AVX__)
constexpr int ACROSS = 2;  // vectors of C computed together; with TALL rows they fill 16 registers
#else
constexpr int ACROSS = 4;  // 32 registers
#endif
constexpr int TALL = 6;

// The left factor, with entry (r, k) at r row + k step.
template <class S> struct Left {
  const S *at;
  int64_t row, step;
};

// Dense rows of numbers, with stride `row`
template <class S> struct Matrix {
  S *at;
  int64_t row;
};

template <class S, int ROWS, int WIDE, bool ADD>
static inline void product_tile(const Matrix<S> &c, const Left<S> &a, const Matrix<S> &b, int64_t depth) {
  constexpr int64_t W = Lanes<S>::W;
  V<S> sum[ROWS][WIDE];
  for (int r = 0; r < ROWS; r++)
    for (int w = 0; w < WIDE; w++) sum[r][w] = ADD ? load(c.at + r * c.row + w * W) : V<S>{};
  for (int64_t k = 0; k < depth; k++) {
    V<S> right[WIDE];
    for (int w = 0; w < WIDE; w++) right[w] = load(b.at + k * b.row + w * W);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const S left = a.at[r * a.row + k * a.step];
#pragma GCC unroll 8
      for (int w = 0; w < WIDE; w++) sum[r][w] += left * right[w];
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int w = 0; w < WIDE; w++) store(c.at + r * c.row + w * W, sum[r][w]);
}

template <class S, int WIDE, bool ADD>
static void product_column(Matrix<S> c, Left<S> a, const Matrix<S> &b, int64_t rows, int64_t depth) {
  for (; rows >= TALL; rows -= TALL, c.at += TALL * c.row, a.at += TALL * a.row)
    product_tile<S, TALL, WIDE, ADD>(c, a, b, depth);
  if (rows & 4) product_tile<S, 4, WIDE, ADD>(c, a, b, depth), c.at += 4 * c.row, a.at += 4 * a.row;
  if (rows & 2) product_tile<S, 2, WIDE, ADD>(c, a, b, depth), c.at += 2 * c.row, a.at += 2 * a.row;
  if (rows & 1) product_tile<S, 1, WIDE, ADD>(c, a, b, depth);
}

// `across` counts numbers, a multiple of the vector width.
template <class S, bool ADD>
static void product(Matrix<S> c, const Left<S> &a, Matrix<S> b, int64_t rows, int64_t across, int64_t depth) {
  for (int64_t left = across / Lanes<S>::W; left > 0; left -= ACROSS) {
    const int64_t wide = left < ACROSS ? left : ACROSS;
    if (wide == 1) product_column<S, 1, ADD>(c, a, b, rows, depth);
    else if (wide == 2) product_column<S, 2, ADD>(c, a, b, rows, depth);
    else if (wide == 3) product_column<S, 3, ADD>(c, a, b, rows, depth);
    else product_column<S, 4, ADD>(c, a, b, rows, depth);
    c.at += wide * Lanes<S>::W, b.at += wide * Lanes<S>::W;
  }
}
