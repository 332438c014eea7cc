// Causal softmax attention for pieces of a row, over tiles of the keys that they read:
//
//     s_ij = scale q_i . k_j,   p_ij = exp(s_ij - lse_i),   y_i = sum over the visible j of p_ij v_j
//     D_i = dy_i . y_i,   ds_ij = p_ij (dy_i . v_j - D_i)
//     dq_i = scale sum over j of ds_ij k_j,   dk_j = scale sum over i of ds_ij q_i,   dv_j = sum over i of p_ij dy_i
//
// A piece is at most QUERIES tokens of a row. It reads chosen blocks of keys, all visible to all its queries, and then
// its own keys, of which query i sees those from first_i to itself. Both ends only grow along a row, so the queries
// that see any key of a tile are a range, and only these are computed. Vector lanes are queries: keys and values are
// read in place, and maxima and sums over keys need no exchange between lanes. lse comes from an online softmax.
//
// For a single query, as in decoding, forward has channels as lanes instead: a vector of queries would be almost empty.
//
// Sizes fix the order of all sums: tiles in order, keys one by one, and in backward pieces and a group's heads in
// order.
#pragma once
#include <cmath>
#include <initializer_list>
#include "blocks.h"
#include "products.h"

constexpr int64_t QUERIES = 64, KEYS = 32;

// A token's heads are contiguous; a row's `length` queries are the last of its keys.
template <class S> struct Attention {
  int64_t rows, length, keys, heads, groups, size, block;
  Tokens q, k, v, y, grad_y, grad_q, grad_k, grad_v;
  const int64_t *pieces;  // (number, 5): row, first token, tokens, index of its chosen blocks, their number
  const int64_t *begins;  // (rows + 1): index of each row's first piece
  const int64_t *first;   // (rows, length)
  const int64_t *chosen;  // (indices, groups): first key of a block; negative for no block
  S *lse;                 // (rows, heads, length)
  double scale;

  int64_t padded() const { return lanes<S>(size); }
  int64_t share() const { return heads / groups; }
};

// A thread's workspace: a piece's queries in one head, and a tile of their keys.
template <class S> struct PieceOfHead {
  const Attention<S> &of;
  const int64_t padded;
  S *query, *made, *grad, *of_query;              // (size, QUERIES)
  S *query_rows, *grad_rows;                      // (QUERIES, padded)
  S *key_rows, *value_rows, *of_keys, *of_values; // (KEYS, padded)
  S *scores, *of_scores;                          // (KEYS, QUERIES)
  S *first, *last, *most, *sum;                   // (QUERIES); the first two count from the piece's first own key
  int64_t row, start, count, head, group, tile, tile_keys, low, high;
  const int64_t *chosen;
  int64_t blocks;
  bool own, alone = false;  // alone: a single query, with channels as lanes

  static int64_t room(const Attention<S> &of) {
    const int64_t turned = 4 * of.size * QUERIES, rows = (2 * QUERIES + 4 * KEYS) * of.padded();
    return sizeof(S) * (turned + rows + (2 * KEYS + 4) * QUERIES);
  }

  PieceOfHead(const Attention<S> &of, char *scratch) : of(of), padded(of.padded()) {
    S *free = (S *)scratch;
    for (S **part : {&query, &made, &grad, &of_query}) *part = free, free += of.size * QUERIES;
    for (S **part : {&query_rows, &grad_rows}) *part = free, free += QUERIES * padded;
    for (S **part : {&key_rows, &value_rows, &of_keys, &of_values}) *part = free, free += KEYS * padded;
    for (S **part : {&scores, &of_scores}) *part = free, free += KEYS * QUERIES;
    for (S **part : {&first, &last, &most, &sum}) *part = free, free += QUERIES;
  }

  int64_t own_key(int64_t query) const { return of.keys - of.length + start + query; }
  S *lse() const { return of.lse + (row * of.heads + head) * of.length + start; }

  void enter(int64_t piece, int64_t number) {
    const int64_t *about = of.pieces + 5 * piece;
    row = about[0], start = about[1], count = about[2], blocks = about[4];
    head = number, group = head / of.share(), chosen = of.chosen + about[3] * of.groups + group;
    for (int64_t i = 0; i < lanes<S>(count); i++) {  // padding lanes see the same keys as the last query
      const int64_t real = i < count ? i : count - 1;
      first[i] = (S)(of.first[row * of.length + start + real] - own_key(0)), last[i] = (S)real;
    }
    for (int64_t i = 0; i < lanes<S>(count); i++) read_turned(query, of.q, i, query_rows, (S)of.scale);
  }

  // Reads a query into a row, and transposed into a lane; zeros beyond the last query.
  void read_turned(S *lanes_of, const Tokens &from, int64_t i, S *rows, S factor) {
    S *to = rows + i * padded;
    for (int64_t d = i < count ? of.size : 0; d < padded; d++) to[d] = 0;
    if (i < count) read(to, from, row, start + i, head * of.size, of.size);
    for (int64_t d = 0; d < of.size; d++) to[d] *= factor, lanes_of[d * QUERIES + i] = to[d];
  }

  // Calls visit() for every tile that the piece reads, in order.
  template <class Visit> void over_tiles(const Visit &visit) {
    own = false;
    for (int64_t c = 0; c < blocks; c++) {
      const int64_t begin = chosen[c * of.groups];
      for (int64_t key = begin; begin >= 0 && key < begin + of.block; key += KEYS)
        if (enter_tile(key, begin + of.block)) visit();
    }
    own = true;
    for (int64_t key = own_key(0) + (int64_t)first[0]; key < own_key(count); key += KEYS)
      if (enter_tile(key, own_key(count))) visit();
  }

  // Loads a tile, and finds the range of lanes that see any of it; returns false if none does.
  bool enter_tile(int64_t key, int64_t stop) {
    tile = key, tile_keys = stop - key < KEYS ? stop - key : KEYS, low = 0, high = count;
    if (own) {
      const S from = (S)(key - own_key(0)), to = from + (S)(tile_keys - 1);
      while (low < count && last[low] < from) low++;
      while (high > low && first[high - 1] > to) high--;
    }
    if (low == high) return false;
    low = low / Lanes<S>::W * Lanes<S>::W, high = lanes<S>(high);
    for (int64_t t = 0; t < tile_keys; t++) {
      read_padded(key_rows + t * padded, of.k, row, tile + t, group * of.size, of.size);
      read_padded(value_rows + t * padded, of.v, row, tile + t, group * of.size, of.size);
    }
    if (alone) return true;
    const Matrix<S> made{scores + low, QUERIES}, asked{query + low, QUERIES};
    product<S, false>(made, {key_rows, padded, 1}, asked, tile_keys, high - low, of.size);
    if (own) mask();
    return true;
  }

  void mask() {
    const S from = (S)(tile - own_key(0));
    if (last[low] >= from + (S)(tile_keys - 1) && first[high - 1] <= from) return;
    const V<S> nothing = same<S>((S)-INFINITY);
    for (int64_t t = 0; t < tile_keys; t++)
      for (int64_t i = low; i < high; i += Lanes<S>::W) {
        const V<S> key = same<S>(from + (S)t);
        V<S> score = load(scores + t * QUERIES + i);
        score = key < load(first + i) ? nothing : score;
        store(scores + t * QUERIES + i, key > load(last + i) ? nothing : score);
      }
  }
};
