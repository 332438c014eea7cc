// The K largest scores of each token, the order of choices by expert, and rows of tokens to and from experts.
//
//   rows[place[t, k]] = x[t],                         dx[t] = sum over k of drows[place[t, k]]
//   y[t] = sum over k of w[t, k] rows[place[t, k]],   drows[place[t, k]] = w[t, k] dy[t],
//                                                     dw[t, k] = dy[t] . rows[place[t, k]]
#include <cmath>
#include "blocks.h"

template <class S> struct Choice {
  int64_t tokens, experts, top_k, groups, group_limit;
  const S *scores, *correction;
  int64_t *chosen;
};

// As in torch's sorts, NaN is larger than any number.
template <class S> static inline bool larger(S a, S b) { return a > b || (a != a && b == b); }

// Writes the places of the `most` largest of `count` scores in falling order; the first of equal scores comes first.
template <class S> static inline void largest(const S *scores, int64_t count, int64_t most, int64_t *best) {
  for (int64_t i = 0, kept = 0; i < count; i++) {
    if (kept == most && !larger(scores[i], scores[best[kept - 1]])) continue;
    int64_t k = kept < most ? kept++ : kept - 1;
    for (; k > 0 && larger(scores[i], scores[best[k - 1]]); k--) best[k] = best[k - 1];
    best[k] = i;
  }
}

// Lowers to -infinity all scores but those in the groups with the largest sums of their two best.
template <class S> static void keep_groups(const Choice<S> &of, S *scores, S *worth, int64_t *best) {
  const int64_t size = of.experts / of.groups;
  for (int64_t g = 0; g < of.groups; g++) {
    largest(scores + g * size, size, size < 2 ? size : 2, best);
    worth[g] = size < 2 ? scores[g * size] : scores[g * size + best[0]] + scores[g * size + best[1]];
  }
  largest(worth, of.groups, of.group_limit, best);
  for (int64_t g = 0; g < of.groups; g++) {
    bool kept = false;
    for (int64_t i = 0; i < of.group_limit; i++) kept |= best[i] == g;
    for (int64_t e = g * size; !kept && e < (g + 1) * size; e++) scores[e] = -INFINITY;
  }
}

template <class S> static void choices(void *task, int unit, char *scratch) {
  const Choice<S> &of = *(const Choice<S> *)task;
  int64_t *best = (int64_t *)scratch;
  S *scores = (S *)(best + of.experts + 2), *worth = scores + of.experts;
  for (int64_t t = unit * BLOCK; t < (unit + 1) * BLOCK && t < of.tokens; t++) {
    const S *from = of.scores + t * of.experts;
    for (int64_t e = 0; e < of.experts; e++) scores[e] = of.correction ? from[e] + of.correction[e] : from[e];
    if (of.group_limit < of.groups) keep_groups(of, scores, worth, best);
    largest(scores, of.experts, of.top_k, of.chosen + t * of.top_k);
  }
}

template <class S> static int choose(Choice<S> *of, int threads) {
  const size_t scratch = (of->experts + 2) * (sizeof(int64_t) + 2 * sizeof(S));
  return !share(choices<S>, of, parts(of->tokens, BLOCK), threads, scratch);
}

extern "C" int experts_choose_float(Choice<float> *of, int threads) { return choose(of, threads); }
extern "C" int experts_choose_double(Choice<double> *of, int threads) { return choose(of, threads); }

struct Ordered {
  int64_t count, experts;
  const int64_t *chosen, *loads;
  int64_t *source, *place;
  int32_t *ends;
};

extern "C" int experts_order(Ordered *of, int threads) {  // a counting sort, whose passes are shorter than a thread's start
  int64_t *next = (int64_t *)malloc((of->experts + 1) * sizeof(int64_t)), end = 0;
  if (!next) return 1;
  for (int64_t e = 0; e < of->experts; e++) next[e] = end, of->ends[e] = (int32_t)(end += of->loads[e]);
  for (int64_t i = 0; i < of->count; i++) {
    const int64_t place = next[of->chosen[i]]++;
    of->place[i] = place, of->source[place] = i;
  }
  free(next);
  return 0;
}

template <class S> struct ExpertRows {
  int64_t tokens, top_k, channels;
  Tokens x, rows, grad_x, grad_rows;  // each one row of tokens or choices
  const int64_t *place;
  const S *weights;  // null: all are 1
  S *grad_weights;
};

template <class S> static void copy(void *task, int unit, char *) {
  const ExpertRows<S> &of = *(const ExpertRows<S> *)task;
  const size_t bytes = of.x.at(0, 0, of.channels) - of.x.at(0, 0, 0);
  for (int64_t t = unit * BLOCK; t < (unit + 1) * BLOCK && t < of.tokens; t++)
    for (int64_t k = 0; k < of.top_k; k++) memcpy(of.rows.at(0, of.place[t * of.top_k + k], 0), of.x.at(0, t, 0), bytes);
}

template <class S> static void add(void *task, int unit, char *scratch) {
  const ExpertRows<S> &of = *(const ExpertRows<S> *)task;
  S *sum = (S *)scratch, *row = sum + GROUP;
  for (int64_t t = unit * BLOCK; t < (unit + 1) * BLOCK && t < of.tokens; t++)
    for (int64_t first = 0; first < of.channels; first += GROUP) {
      const int64_t left = of.channels - first, count = left < GROUP ? left : GROUP;
      for (int64_t k = 0; k < of.top_k; k++) {
        const int64_t choice = t * of.top_k + k;
        const S weight = of.weights ? of.weights[choice] : 1;
        read_padded(row, of.rows, 0, of.place[choice], first, count);
        for (int64_t i = 0; i < count; i += Lanes<S>::W)
          store(sum + i, k ? load(sum + i) + weight * load(row + i) : weight * load(row + i));
      }
      write(sum, of.x, 0, t, first, count);
    }
}

template <class S> static void spread(void *task, int unit, char *scratch) {
  const ExpertRows<S> &of = *(const ExpertRows<S> *)task;
  S *grad = (S *)scratch, *row = grad + lanes<S>(of.channels);
  for (int64_t t = unit * BLOCK; t < (unit + 1) * BLOCK && t < of.tokens; t++) {
    read_padded(grad, of.grad_x, 0, t, 0, of.channels);
    for (int64_t k = 0; k < of.top_k; k++) {
      const int64_t choice = t * of.top_k + k;
      const S weight = of.weights[choice];
      V<S> dot = V<S>{};
      read_padded(row, of.rows, 0, of.place[choice], 0, of.channels);
      for (int64_t i = 0; i < of.channels; i += Lanes<S>::W) {
        dot += load(grad + i) * load(row + i);
        store(row + i, weight * load(grad + i));
      }
      of.grad_weights[choice] = total<S>(dot);
      write(row, of.grad_rows, 0, of.place[choice], 0, of.channels);
    }
  }
}

template <class S> static int rows(void (*work)(void *, int, char *), ExpertRows<S> *of, int threads, int64_t scratch) {
  return !share(work, of, parts(of->tokens, BLOCK), threads, scratch * sizeof(S));
}

extern "C" int experts_copy(ExpertRows<float> *of, int threads) { return rows(copy<float>, of, threads, 0); }
extern "C" int experts_add_float(ExpertRows<float> *of, int threads) { return rows(add<float>, of, threads, 2 * GROUP); }
extern "C" int experts_add_double(ExpertRows<double> *of, int threads) {
  return rows(add<double>, of, threads, 2 * GROUP);
}
extern "C" int experts_spread_float(ExpertRows<float> *of, int threads) {
  return rows(spread<float>, of, threads, 2 * lanes<float>(of->channels));
}
extern "C" int experts_spread_double(ExpertRows<double> *of, int threads) {
  return rows(spread<double>, of, threads, 2 * lanes<double>(of->channels));
}
