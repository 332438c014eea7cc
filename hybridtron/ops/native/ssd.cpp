// SSD as C functions, which return 0, or 1 if out of memory.
#include "ssd_backward.h"

template <class S> static int forward(Ssd<S> *of, int threads) {
  return !share(forward_unit<S>, of, of->rows * of->units(), threads, SegmentOfHeads<S>::size(*of));
}

template <class S> static int backward(Ssd<S> *of, int threads) {
  if (!backward_all<S, Ssd<S>, SegmentOfHeads<S>>(of, threads)) return 1;
  for (S *sums : {of->grad_A, of->grad_D, of->grad_bias})
    if (sums) add_up(sums, of->rows, of->heads);
  return 0;
}

extern "C" int ssd_forward_float(Ssd<float> *of, int threads) { return forward(of, threads); }
extern "C" int ssd_forward_double(Ssd<double> *of, int threads) { return forward(of, threads); }
extern "C" int ssd_backward_float(Ssd<float> *of, int threads) { return backward(of, threads); }
extern "C" int ssd_backward_double(Ssd<double> *of, int threads) { return backward(of, threads); }
