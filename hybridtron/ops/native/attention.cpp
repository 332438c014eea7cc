// Attention as C functions, which return 0, or 1 if out of memory; equations in attention.h.
#include "attention.h"

// Turns scores into weights relative to the largest score so far, and rescales earlier sums to it.
template <class S> static void weigh(PieceOfHead<S> &p) {
  for (int64_t i = p.low; i < p.high; i += Lanes<S>::W) {
    const V<S> before = load(p.most + i);
    V<S> most = before, sum = V<S>{};
    for (int64_t t = 0; t < p.tile_keys; t++) {
      const V<S> score = load(p.scores + t * QUERIES + i);
      most = score > most ? score : most;
    }
    for (int64_t t = 0; t < p.tile_keys; t++) {
      const V<S> weight = exponential<S>(load(p.scores + t * QUERIES + i) - most);
      store(p.scores + t * QUERIES + i, weight);
      sum += weight;
    }
    const V<S> factor = exponential<S>(before - most);
    store(p.most + i, most), store(p.sum + i, load(p.sum + i) * factor + sum);
    for (int64_t d = 0; d < p.of.size; d++) store(p.made + d * QUERIES + i, load(p.made + d * QUERIES + i) * factor);
  }
}

// Adds the next tile for a single query, whose weighted sum is in grad_rows.
template <class S> static void weigh_alone(PieceOfHead<S> &p) {
  constexpr int64_t W = Lanes<S>::W;
  const int64_t padded = p.padded, filled = lanes<S>(p.tile_keys);
  S most = p.most[0];
  for (int64_t t = 0; t < p.tile_keys; t++) {
    V<S> sum = V<S>{};
    for (int64_t d = 0; d < padded; d += W) sum += load(p.query_rows + d) * load(p.key_rows + t * padded + d);
    p.scores[t] = total<S>(sum);
    most = p.scores[t] > most ? p.scores[t] : most;
  }
  for (int64_t t = p.tile_keys; t < filled; t++) p.scores[t] = (S)-INFINITY;
  V<S> sum = V<S>{};
  for (int64_t t = 0; t < filled; t += W) {
    const V<S> weight = exponential<S>(load(p.scores + t) - most);
    store(p.scores + t, weight), sum += weight;
  }
  const S factor = exponential<S>(same<S>(p.most[0] - most))[0];
  p.most[0] = most, p.sum[0] = p.sum[0] * factor + total<S>(sum);
  for (int64_t d = 0; d < padded; d += W) {
    V<S> made = load(p.grad_rows + d) * factor;
    for (int64_t t = 0; t < p.tile_keys; t++) made += p.scores[t] * load(p.value_rows + t * padded + d);
    store(p.grad_rows + d, made);
  }
}

template <class S> static void forward_alone(PieceOfHead<S> &p) {
  for (int64_t d = 0; d < p.padded; d++) p.grad_rows[d] = 0;
  p.most[0] = (S)-1e30, p.sum[0] = 0;
  p.over_tiles([&] { weigh_alone(p); });
  for (int64_t d = 0; d < p.padded; d++) p.grad_rows[d] /= p.sum[0];
  write(p.grad_rows, p.of.y, p.row, p.start, p.head * p.of.size, p.of.size);
  p.lse()[0] = p.most[0] + std::log(p.sum[0]);
}

template <class S> static void forward_piece(void *task, int unit, char *scratch) {
  const Attention<S> &of = *(const Attention<S> *)task;
  PieceOfHead<S> p(of, scratch);
  p.enter(unit / of.heads, unit % of.heads);
  if ((p.alone = p.count == 1)) return forward_alone(p);
  for (int64_t i = 0; i < of.size * QUERIES; i++) p.made[i] = 0;
  for (int64_t i = 0; i < QUERIES; i++) p.most[i] = (S)-1e30, p.sum[i] = 0;
  p.over_tiles([&] {
    weigh(p);
    product<S, true>({p.made + p.low, QUERIES}, {p.value_rows, 1, p.padded}, {p.scores + p.low, QUERIES}, of.size,
                     p.high - p.low, p.tile_keys);
  });
  for (int64_t i = 0; i < p.count; i++) {
    const S share = 1 / p.sum[i];
    for (int64_t d = 0; d < of.size; d++) p.query_rows[d] = p.made[d * QUERIES + i] * share;
    write(p.query_rows, of.y, p.row, p.start + i, p.head * of.size, of.size);
    p.lse()[i] = p.most[i] + std::log(p.sum[i]);
  }
}

// Computes weights p and score gradients ds, from scores and dy . v.
template <class S> static void weigh_again(PieceOfHead<S> &p) {
  for (int64_t t = 0; t < p.tile_keys; t++)
    for (int64_t i = p.low; i < p.high; i += Lanes<S>::W) {
      const int64_t at = t * QUERIES + i;
      const V<S> weight = exponential<S>(load(p.scores + at) - load(p.most + i));
      store(p.scores + at, weight);
      store(p.of_scores + at, weight * (load(p.of_scores + at) - load(p.sum + i)));
    }
}

template <class S> static void add_to(const Tokens &to, PieceOfHead<S> &p, const S *rows) {
  S *sum = p.key_rows;  // no longer needed in this tile
  for (int64_t t = 0; t < p.tile_keys; t++) {
    read(sum, to, p.row, p.tile + t, p.group * p.of.size, p.of.size);
    for (int64_t d = 0; d < p.of.size; d++) sum[d] += rows[t * p.padded + d];
    write(sum, to, p.row, p.tile + t, p.group * p.of.size, p.of.size);
  }
}

template <class S> static void backward_tile(PieceOfHead<S> &p) {
  const Attention<S> &of = p.of;
  const int64_t across = p.high - p.low;
  const Matrix<S> of_scores{p.of_scores + p.low, QUERIES};
  product<S, false>(of_scores, {p.value_rows, p.padded, 1}, {p.grad + p.low, QUERIES}, p.tile_keys, across, of.size);
  weigh_again(p);
  product<S, true>({p.of_query + p.low, QUERIES}, {p.key_rows, 1, p.padded}, of_scores, of.size, across, p.tile_keys);
  const Matrix<S> queries{p.query_rows + p.low * p.padded, p.padded}, grads{p.grad_rows + p.low * p.padded, p.padded};
  const Left<S> by_score{p.of_scores + p.low, QUERIES, 1}, by_weight{p.scores + p.low, QUERIES, 1};
  product<S, false>({p.of_keys, p.padded}, by_score, queries, p.tile_keys, p.padded, across);
  product<S, false>({p.of_values, p.padded}, by_weight, grads, p.tile_keys, p.padded, across);
  add_to(of.grad_k, p, p.of_keys);
  add_to(of.grad_v, p, p.of_values);
}

// Takes all pieces of a row in the heads that share keys, since these add to the same gradients.
template <class S> static void backward_group(void *task, int unit, char *scratch) {
  const Attention<S> &of = *(const Attention<S> *)task;
  PieceOfHead<S> p(of, scratch);
  const int64_t row = unit / of.groups, group = unit % of.groups;
  for (int64_t piece = of.begins[row]; piece < of.begins[row + 1]; piece++)
    for (int64_t head = group * of.share(); head < (group + 1) * of.share(); head++) {
      p.enter(piece, head);
      for (int64_t i = 0; i < lanes<S>(p.count); i++) {
        p.read_turned(p.grad, of.grad_y, i, p.grad_rows, 1);
        p.most[i] = i < p.count ? p.lse()[i] : 0, p.sum[i] = 0;
        if (i < p.count) read(p.of_query, of.y, row, p.start + i, head * of.size, of.size);
        for (int64_t d = 0; i < p.count && d < of.size; d++) p.sum[i] += p.of_query[d] * p.grad_rows[i * p.padded + d];
      }
      for (int64_t i = 0; i < of.size * QUERIES; i++) p.of_query[i] = 0;
      p.over_tiles([&] { backward_tile(p); });
      for (int64_t i = 0; i < p.count; i++) {
        for (int64_t d = 0; d < of.size; d++) p.query_rows[d] = p.of_query[d * QUERIES + i] * (S)of.scale;
        write(p.query_rows, of.grad_q, row, p.start + i, head * of.size, of.size);
      }
    }
}

template <class S> static int forward(Attention<S> *of, int threads) {
  return !share(forward_piece<S>, of, of->begins[of->rows] * of->heads, threads, PieceOfHead<S>::room(*of));
}

template <class S> static int backward(Attention<S> *of, int threads) {
  return !share(backward_group<S>, of, of->rows * of->groups, threads, PieceOfHead<S>::room(*of));
}

extern "C" int64_t attention_piece() { return QUERIES; }
extern "C" int attention_forward_float(Attention<float> *of, int threads) { return forward(of, threads); }
extern "C" int attention_forward_double(Attention<double> *of, int threads) { return forward(of, threads); }
extern "C" int attention_backward_float(Attention<float> *of, int threads) { return backward(of, threads); }
extern "C" int attention_backward_double(Attention<double> *of, int threads) { return backward(of, threads); }
