// The recurrences of Mamba-1 and Mamba-2 as C functions; 0 means done, 1 that memory was short.
#include "backward.h"

template <class S> static int forward(Recurrence<S> *of, int threads) {
  return !share(forward_unit<S>, of, of->rows * of->units(), threads, Workspace<S>::size(*of));
}

// Sums over rows, and over the channels of a head, in a fixed order; they come to lie at the front.
template <class S> static void add_rows(const Recurrence<S> *of, S *sums, int64_t each, int64_t head) {
  for (int64_t row = 1; row < of->rows; row++)
    for (int64_t i = 0; i < each; i++) sums[i] += sums[row * each + i];
  for (int64_t i = 0; head > 1 && i < each; i++) sums[i / head] = (i % head ? sums[i / head] : 0) + sums[i];
}

template <class S> static int backward(Recurrence<S> *of, int threads) {
  const int64_t scratch = Workspace<S>::size(*of), sums = 2 * CHUNK * of->tiles() * TILE * sizeof(S);
  if (of->whole_rows) {
    if (!share(backward_row<S>, of, of->rows, threads, scratch + sums)) return 1;
  } else {
    if (!share(backward_unit<S>, of, of->rows * of->units(), threads, scratch)) return 1;
    if (!share(add_shares<S>, of, of->rows * of->chunks(), threads, 2 * of->states * sizeof(S))) return 1;
  }
  add_rows(of, of->grad_A, of->per_state ? of->states * of->channels : of->channels, of->per_state ? 1 : of->head);
  add_rows(of, of->grad_D, of->channels, of->head);
  add_rows(of, of->grad_bias, of->channels, of->head);
  return 0;
}

extern "C" int64_t recurrence_chunk() { return CHUNK; }
extern "C" int recurrence_forward_float(Recurrence<float> *of, int threads) { return forward(of, threads); }
extern "C" int recurrence_forward_double(Recurrence<double> *of, int threads) { return forward(of, threads); }
extern "C" int recurrence_backward_float(Recurrence<float> *of, int threads) { return backward(of, threads); }
extern "C" int recurrence_backward_double(Recurrence<double> *of, int threads) { return backward(of, threads); }
