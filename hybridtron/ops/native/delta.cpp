// The delta rule as C functions, which return 0, or 1 if out of memory.
#include "delta_backward.h"

template <class S> static int run(void (*work)(void *, int, char *), Delta<S> *of, int threads) {
  return !share(work, of, of->rows * of->heads, threads, SegmentOfDelta<S>::size(*of));
}

extern "C" int delta_forward_float(Delta<float> *of, int threads) { return run(forward_head<float>, of, threads); }
extern "C" int delta_forward_double(Delta<double> *of, int threads) { return run(forward_head<double>, of, threads); }
extern "C" int delta_backward_float(Delta<float> *of, int threads) { return run(backward_head<float>, of, threads); }
extern "C" int delta_backward_double(Delta<double> *of, int threads) { return run(backward_head<double>, of, threads); }
