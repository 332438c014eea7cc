// Rows of numbers in a tensor's type, converted from and to the type that computes.
#pragma once
#include <cstdint>
#include <cstring>

enum Kind : int64_t { FLOAT = 0, DOUBLE = 1, BFLOAT16 = 2 };

// A tensor of tokens: the last axis is dense, rows and tokens have any strides, in elements.
struct Tokens {
  void *data;
  int64_t kind, row, token;

  char *at(int64_t r, int64_t t, int64_t first) const {
    int64_t place = r * row + t * token + first;
    return (char *)data + place * (kind == FLOAT ? 4 : kind == DOUBLE ? 8 : 2);
  }
};

static inline float widened(uint16_t narrow) {
  uint32_t bits = (uint32_t)narrow << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

static inline uint16_t narrowed(float wide) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &wide, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return wide == wide ? (uint16_t)rounded : 0x7fc0;
}

template <class S> static inline void read(S *to, const Tokens &from, int64_t r, int64_t t, int64_t first, int count) {
  const char *at = from.at(r, t, first);
  if (from.kind == FLOAT)
    for (int i = 0; i < count; i++) to[i] = (S)((const float *)at)[i];
  else if (from.kind == DOUBLE)
    for (int i = 0; i < count; i++) to[i] = (S)((const double *)at)[i];
  else
    for (int i = 0; i < count; i++) to[i] = (S)widened(((const uint16_t *)at)[i]);
}

template <class S>
static inline void write(const S *from, const Tokens &to, int64_t r, int64_t t, int64_t first, int count) {
  char *at = to.at(r, t, first);
  if (to.kind == FLOAT)
    for (int i = 0; i < count; i++) ((float *)at)[i] = (float)from[i];
  else if (to.kind == DOUBLE)
    for (int i = 0; i < count; i++) ((double *)at)[i] = (double)from[i];
  else
    for (int i = 0; i < count; i++) ((uint16_t *)at)[i] = narrowed((float)from[i]);
}
