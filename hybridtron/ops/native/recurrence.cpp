// The recurrence as C functions, which return 0, or 1 if out of memory.
#include "backward.h"

template <class S> static int forward(Recurrence<S> *of, int threads) {
  return !share(forward_unit<S>, of, of->rows * of->units(), threads, Workspace<S>::size(*of));
}

template <class S> static int backward(Recurrence<S> *of, int threads) {
  if (!backward_all<S, Recurrence<S>, Workspace<S>>(of, threads)) return 1;
  add_up(of->grad_A, of->rows, of->states * of->channels);
  for (S *sums : {of->grad_D, of->grad_bias}) add_up(sums, of->rows, of->channels);
  return 0;
}

extern "C" int64_t chunk_tokens() { return CHUNK; }
extern "C" int64_t vector_bytes() { return VECTOR_BYTES; }
extern "C" int recurrence_forward_float(Recurrence<float> *of, int threads) { return forward(of, threads); }
extern "C" int recurrence_forward_double(Recurrence<double> *of, int threads) { return forward(of, threads); }
extern "C" int recurrence_backward_float(Recurrence<float> *of, int threads) { return backward(of, threads); }
extern "C" int recurrence_backward_double(Recurrence<double> *of, int threads) { return backward(of, threads); }
