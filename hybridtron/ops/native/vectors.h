// Vectors as wide as the CPU's registers, with the functions that recurrences need.
//
// Sums and products are plain operators on the compiler's vector types. Exponentials are
//
//     2^t = 2^n p(f),   n the integer next to t,   f = t - n in [-1/2, 1/2],   p a polynomial
//
// where t is a product, so that f is one fused multiply-add of exact factors, rounded once.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

template <class S> struct Lanes;
template <> struct Lanes<float> {
  typedef float V __attribute__((vector_size(VECTOR_BYTES)));
  typedef int32_t I __attribute__((vector_size(VECTOR_BYTES)));
  static constexpr int W = VECTOR_BYTES / 4, MANTISSA = 23;
  static constexpr float ROUND = 12582912.f, LOWEST = -126.f, HIGHEST = 127.f;  // ROUND: 1.5 * 2^MANTISSA
  static constexpr float LOG2E_LOW = 1.92596303e-8f;  // log2(e) less its float
  static constexpr int EXP_TERMS = 7, LOG_TERMS = 8;
  // 2^f to 1e-8, in powers of f
  static constexpr float EXP[EXP_TERMS] = {1.f, 6.9314718e-1f, 2.4022651e-1f, 5.5504109e-2f, 9.6181291e-3f,
                                           1.3333558e-3f, 1.5403530e-4f};
};
template <> struct Lanes<double> {
  typedef double V __attribute__((vector_size(VECTOR_BYTES)));
  typedef int64_t I __attribute__((vector_size(VECTOR_BYTES)));
  static constexpr int W = VECTOR_BYTES / 8, MANTISSA = 52;
  static constexpr double ROUND = 6755399441055744., LOWEST = -1022., HIGHEST = 1023.;
  static constexpr double LOG2E_LOW = 2.0355273740931033e-17;
  static constexpr int EXP_TERMS = 15, LOG_TERMS = 18;
  // (ln 2)^k / k!, whose sum leaves 1e-18
  static constexpr double EXP[EXP_TERMS] = {
      1., 6.931471805599453094e-1, 2.402265069591007123e-1, 5.550410866482157995e-2, 9.618129107628477232e-3,
      1.333355814642844342e-3, 1.540353039338160995e-4, 1.525273380405984028e-5, 1.321548679014430949e-6,
      1.017808600923969973e-7, 7.054911620801123330e-9, 4.445538271870811498e-10, 2.567843599348820514e-11,
      1.369148885390412888e-12, 6.778726354822545633e-14};
};
template <class S> using V = typename Lanes<S>::V;

constexpr double LOG2E = 1.4426950408889634, LN2 = 0.6931471805599453;

template <class S> static inline V<S> same(S value) { return V<S>{} + value; }
template <class S> static inline V<S> load(const S *from) { V<S> v; memcpy(&v, from, sizeof v); return v; }
template <class S> static inline void store(S *to, V<S> v) { memcpy(to, &v, sizeof v); }

// p(f) 2^n; 0 or infinity if n is beyond the type's exponents. NaN stays NaN.
template <class S> static inline V<S> scaled(V<S> n_shifted, V<S> f) {
  using L = Lanes<S>;
  const V<S> low = same<S>(L::ROUND + L::LOWEST), high = same<S>(L::ROUND + L::HIGHEST), zero = same<S>(0);
  f = (n_shifted < low) | (n_shifted > high) ? zero : f;  // p(0) is 1: with these n its bits become 0 or infinity
  n_shifted = n_shifted < low ? low - 1 : n_shifted;
  n_shifted = n_shifted > high ? high + 1 : n_shifted;
  V<S> p = same<S>(L::EXP[L::EXP_TERMS - 1]);
#pragma GCC unroll 16
  for (int k = L::EXP_TERMS - 2; k >= 0; k--) p = p * f + L::EXP[k];
  return (V<S>)((typename L::I)p + ((typename L::I)n_shifted << L::MANTISSA));
}

// 2^(a b), for finite factors
template <class S> static inline V<S> power(V<S> a, V<S> b) {
  V<S> n_shifted = a * b + Lanes<S>::ROUND, n = n_shifted - Lanes<S>::ROUND;
  return scaled<S>(n_shifted, a * b - n);
}
#if defined(__AVX512F__)
template <> inline __m512 power<float>(__m512 a, __m512 b) {  // its instructions have no limits on n
  const float *c = Lanes<float>::EXP;
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(a, b), 8), f = _mm512_fmsub_ps(a, b, n), p = _mm512_set1_ps(c[6]);
#pragma GCC unroll 8
  for (int k = 5; k >= 0; k--) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c[k]));
  return _mm512_scalef_ps(p, n);
}
#endif

// e^x, also for infinite x
template <class S> static inline V<S> exponential(V<S> x) {
  const S log2e = (S)LOG2E;
  const V<S> far = same<S>(4096);
  x = x < -far ? -far : x;
  x = x > far ? far : x;
  V<S> n_shifted = x * log2e + Lanes<S>::ROUND, n = n_shifted - Lanes<S>::ROUND;
  V<S> f = x * log2e - n;
  return scaled<S>(n_shifted, x * Lanes<S>::LOG2E_LOW + f);
}

#if defined(__AVX512F__)
// Clamped for infinities; NaN stays NaN.
template <> inline __m512 exponential<float>(__m512 x) {
  const float *c = Lanes<float>::EXP;
  x = _mm512_min_ps(_mm512_set1_ps(4096), _mm512_max_ps(_mm512_set1_ps(-4096), x));
  const __m512 log2e = _mm512_set1_ps((float)LOG2E);
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, log2e), 8), f = _mm512_fmsub_ps(x, log2e, n);
  __m512 p = _mm512_set1_ps(c[6]);
  f = _mm512_fmadd_ps(x, _mm512_set1_ps(Lanes<float>::LOG2E_LOW), f);
#pragma GCC unroll 8
  for (int k = 5; k >= 0; k--) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c[k]));
  return _mm512_scalef_ps(p, n);
}
#endif

// e^-|x| and 1 / (1 + e^-|x|), from which sigmoid, SiLU and softplus follow
template <class S> struct Logistic {
  V<S> below, large;
  explicit Logistic(V<S> x) {
    below = exponential<S>(x < 0 ? x : -x);
    large = 1 / (1 + below);
  }
  V<S> sigmoid(V<S> x) const { return x < 0 ? below * large : large; }
};

// log(1 + e^x) as max(x, 0) + 2 atanh(w / (2 + w)) with w = e^-|x|; x itself above 20, as in torch
template <class S> static inline V<S> softplus(V<S> x, const Logistic<S> &of) {
  using L = Lanes<S>;
  V<S> y = of.below / (2 + of.below), square = y * y, sum = same<S>((S)(1.0 / (2 * L::LOG_TERMS - 1)));
#pragma GCC unroll 32
  for (int k = L::LOG_TERMS - 2; k >= 0; k--) sum = sum * square + (S)(1.0 / (2 * k + 1));
  V<S> small = 2 * y * sum;
  V<S> whole = x > 0 ? x + small : small;
  whole = x > 20 ? x : whole;
  return x == x ? whole : x;
}

template <class S> static inline S total(V<S> v) {  // pairwise, always in the same order
  S lanes[Lanes<S>::W];
  store<S>(lanes, v);
#pragma GCC unroll 8
  for (int half = Lanes<S>::W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}
