// Gated linear attention as C functions, which return 0, or 1 if out of memory.
#include "gla_backward.h"

template <class S> static int forward(Gla<S> *of, int threads) {
  return !share(forward_head<S>, of, of->rows * of->heads, threads, GlaSegment<S>::size(*of));
}

template <class S> static int backward(Gla<S> *of, int threads) {
  return !share(backward_head<S>, of, of->rows * of->heads, threads, GlaSegment<S>::size(*of));
}

extern "C" int gla_forward_float(Gla<float> *of, int threads) { return forward(of, threads); }
extern "C" int gla_forward_double(Gla<double> *of, int threads) { return forward(of, threads); }
extern "C" int gla_backward_float(Gla<float> *of, int threads) { return backward(of, threads); }
extern "C" int gla_backward_double(Gla<double> *of, int threads) { return backward(of, threads); }
