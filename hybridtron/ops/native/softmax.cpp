// For each token's logits l: the largest, the sum of exp(l - largest), and the label's. Then the logits are overwritten
// with their gradients exp(l - lse) (1 + 2 z lse) - [v = label], 0 in masked rows.
#include "blocks.h"

template <class S> struct Softmax {
  int64_t tokens, size;
  Tokens logits;          // one row of tokens
  const int64_t *labels;  // relative to the first logit; others are in other parts
  const uint8_t *mask;
  const S *lse;
  S *greatest, *sum, *picked;
  double z_loss;
};

constexpr int FEW = 4;  // tokens per unit, since each has many logits

template <class S> static void sums_of_few(void *task, int unit, char *scratch) {
  const Softmax<S> &of = *(const Softmax<S> *)task;
  const int64_t W = Lanes<S>::W;
  S *part = (S *)scratch;
  for (int64_t t = unit * FEW; t < (unit + 1) * FEW && t < of.tokens; t++) {
    read(part, of.logits, 0, t, 0, of.size);
    S greatest = part[0];
    V<S> most = same<S>(greatest), sum = V<S>{};
    for (int64_t i = 0; i < of.size % W; i++) greatest = part[i] > greatest ? part[i] : greatest;
    for (int64_t i = of.size % W; i < of.size; i += W) {
      const V<S> v = load(part + i);
      most = v > most ? v : most;
    }
    for (int64_t k = 0; k < W; k++) greatest = most[k] > greatest ? most[k] : greatest;
    for (int64_t i = of.size; i < lanes<S>(of.size); i++) part[i] = -1.0 / 0.0;
    for (int64_t i = 0; i < of.size; i += W) sum += exponential<S>(load(part + i) - greatest);
    const int64_t label = of.labels[t];
    of.greatest[t] = greatest, of.sum[t] = total<S>(sum);
    of.picked[t] = label >= 0 && label < of.size ? part[label] : 0;
  }
}

template <class S> static void gradients_of_few(void *task, int unit, char *scratch) {
  const Softmax<S> &of = *(const Softmax<S> *)task;
  S *part = (S *)scratch;
  for (int64_t t = unit * FEW; t < (unit + 1) * FEW && t < of.tokens; t++) {
    if (of.mask[t]) {
      const S lse = of.lse[t], factor = 1 + 2 * (S)of.z_loss * lse;
      read(part, of.logits, 0, t, 0, of.size);
      for (int64_t i = 0; i < of.size; i += Lanes<S>::W) {
        store(part + i, exponential<S>(load(part + i) - lse) * factor);
      }
      const int64_t label = of.labels[t];
      if (label >= 0 && label < of.size) part[label] -= 1;
    } else {
      memset(part, 0, of.size * sizeof(S));
    }
    write(part, of.logits, 0, t, 0, of.size);
  }
}

template <class S> static int softmax(void (*work)(void *, int, char *), Softmax<S> *of, int threads) {
  return !share(work, of, parts(of->tokens, FEW), threads, lanes<S>(of->size) * sizeof(S));
}

extern "C" int softmax_sums_float(Softmax<float> *of, int threads) { return softmax(sums_of_few<float>, of, threads); }
extern "C" int softmax_sums_double(Softmax<double> *of, int threads) {
  return softmax(sums_of_few<double>, of, threads);
}
extern "C" int softmax_gradients_float(Softmax<float> *of, int threads) {
  return softmax(gradients_of_few<float>, of, threads);
}
extern "C" int softmax_gradients_double(Softmax<double> *of, int threads) {
  return softmax(gradients_of_few<double>, of, threads);
}
