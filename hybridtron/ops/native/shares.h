// Gradients of b and c, which many channels share: sums over units of channels, in order.
//
// A task has rows, groups of units, and chunks of tokens. Work is a thread's workspace; backward_chunk(work, row, unit,
// chunk) fills its of_b and of_c for the chunk's tokens. Either one thread takes all units of a row and adds up their
// gradients at once, or threads take single units and store them in `shares` until the end. Both give the same bits.
#pragma once
#include "segments.h"

template <class S, class Task, class Work> static void backward_unit(void *task, int number, char *scratch) {
  const Task &of = *(const Task *)task;
  Work w(of, scratch);
  for (int64_t chunk = of.chunks() - 1; chunk >= 0; chunk--) {
    backward_chunk(w, number / of.units(), number % of.units(), chunk);
    for (int64_t t = 0; t < tokens_of(of, chunk); t++) {
      S *share = of.shares + ((int64_t)number * of.length + chunk * CHUNK + t) * 2 * of.states;
      memcpy(share, w.of_b + t * of.across(), of.states * sizeof(S));
      memcpy(share + of.states, w.of_c + t * of.across(), of.states * sizeof(S));
    }
  }
}

template <class S, class Task, class Work> static void backward_row(void *task, int row, char *scratch) {
  const Task &of = *(const Task *)task;
  Work w(of, scratch);
  const int64_t across = of.across(), size = CHUNK * across, units = of.units() / of.groups;
  S *sums = (S *)(scratch + Work::size(of));
  for (int64_t chunk = of.chunks() - 1; chunk >= 0; chunk--)
    for (int64_t group = 0; group < of.groups; group++) {
      const int64_t tokens = tokens_of(of, chunk);
      for (int64_t unit = 0; unit < units; unit++) {
        backward_chunk(w, row, group * units + unit, chunk);
        for (int64_t k = 0; k < tokens * across; k++) {
          sums[k] = unit ? sums[k] + w.of_b[k] : w.of_b[k];
          sums[size + k] = unit ? sums[size + k] + w.of_c[k] : w.of_c[k];
        }
      }
      for (int64_t t = 0; t < tokens; t++) {
        write(sums + t * across, of.grad_b, row, chunk * CHUNK + t, group * of.states, of.states);
        write(sums + size + t * across, of.grad_c, row, chunk * CHUNK + t, group * of.states, of.states);
      }
    }
}

// Adds up the shares of all units, for one chunk of tokens.
template <class S, class Task> static void add_shares(void *task, int number, char *scratch) {
  const Task &of = *(const Task *)task;
  const int64_t row = number / of.chunks(), chunk = number % of.chunks(), units = of.units() / of.groups;
  S *sum = (S *)scratch;
  for (int64_t t = chunk * CHUNK; t < chunk * CHUNK + tokens_of(of, chunk); t++)
    for (int64_t group = 0; group < of.groups; group++) {
      for (int64_t unit = 0; unit < units; unit++) {
        const S *share = of.shares + ((row * of.units() + group * units + unit) * of.length + t) * 2 * of.states;
        for (int64_t n = 0; n < 2 * of.states; n++) sum[n] = unit ? sum[n] + share[n] : share[n];
      }
      write(sum, of.grad_b, row, t, group * of.states, of.states);
      write(sum + of.states, of.grad_c, row, t, group * of.states, of.states);
    }
}

// Returns false if out of memory.
template <class S, class Task, class Work> static bool backward_all(Task *of, int threads) {
  const size_t sums = 2 * CHUNK * of->across() * sizeof(S);
  if (of->whole_rows) return share(backward_row<S, Task, Work>, of, of->rows, threads, Work::size(*of) + sums);
  return share(backward_unit<S, Task, Work>, of, of->rows * of->units(), threads, Work::size(*of)) &&
         share(add_shares<S, Task>, of, of->rows * of->chunks(), threads, 2 * of->states * sizeof(S));
}
