// A row's chunks of tokens, and a chunk's segments, each within one document.
#pragma once
#include "blocks.h"

constexpr int64_t CHUNK = 64;

template <class Task> static int64_t tokens_of(const Task &of, int64_t chunk) {
  return of.length - chunk * CHUNK < CHUNK ? of.length - chunk * CHUNK : CHUNK;
}

// Calls visit(from, to, sees, feeds) for each document's tokens in a chunk, forward or backward. sees: the document
// began before `from`, so a state enters; feeds: the chunk ends with this document, so its state leaves.
template <class Task, class Visit>
static inline void over_documents(const Task &of, int64_t row, int64_t chunk, bool forward, const Visit &visit) {
  const int64_t begin = chunk * CHUNK, end = begin + tokens_of(of, chunk);
  auto starts = [&](int64_t t) { return of.starts && of.starts[row * of.length + t]; };
  for (int64_t at = forward ? begin : end; forward ? at < end : at > begin;) {
    int64_t from = at, to = at;
    if (forward)
      for (to++; to < end && !starts(to);) to++;
    else
      for (from--; from > begin && !starts(from);) from--;
    visit(from, to, !starts(from), to == end);
    at = forward ? to : from;
  }
}
