// A tile over keys and values that are bytes. Queries, and probabilities times the values' scales, stand in fixed point: both
// products are sums of integers, and the scales come in where a score or a result is made of a sum.
#pragma once
#include "attention_tile.h"

namespace headrace {

template <>
struct Query<ByteCache> {
  alignas(64) int8_t rows[2 * MAX_ROWS * MAX_HEAD];  // [rows][high, low][padded_head]
  Fixed fixed[MAX_ROWS];
  template <class T>
  void load(int r, const T* from, long head_size) {
    const long width = (head_size + 31) / 32 * 32;
    auto at = [&](long i) { return headrace::load(from + i, first(head_size - i)); };
    Vec largest = zero();
    for (long i = 0; i < head_size; i += LANES) largest = max(largest, abs(at(i)));
    int8_t* high = rows + 2 * r * width;
    fixed[r] = to_fixed(reduce_max(largest), head_size, at, high, high + width);
  }
};
template <int MR, int W>
static INLINE void score(const Tile<ByteCache>& x, const Pieces<ByteCache>& pieces, bool first, int r0, long u,
                         Scores<float, MR>& s) {
  const ByteCache& c = x.cache;
  const Fixed* fixed = x.q.fixed + r0;
  Sums sums[W][2 * MR][2] = {};
  Tiles<uint8_t, W, 1> keys;
  const bf16* scales[W];
  for (int w = 0; w < W; w++) {
    const long g = (u + w) / PANELS, panel = (u + w) % PANELS, prefetches = c.head_size * UNIT / 64;
    uint8_t* piece = x.keys(pieces.group0 + g);
    scales[w] = c.key_scales(piece) + panel * UNIT;
    keys.p[w] = piece + panel * UNIT * ByteCache::P;
    keys.ahead[w] = (first ? pieces.ahead(g, PANELS * prefetches) : pieces.none()).after(panel * prefetches);
  }
  multiply<2 * MR>(x.q.rows + 2 * r0 * c.padded_head, c.padded_head, keys, c.head_size, sums);
  for (int w = 0; w < W; w++) {
    Vec acc[MR][2];
    for (int j = 0; j < 2; j++) {
      const Vec scale = load(scales[w] + j * LANES);
      for (int i = 0; i < MR; i++)
        acc[i][j] = mul(joined(sums[w][2 * i][j], sums[w][2 * i + 1][j], fixed[i]), scale);
    }
    store_scores(x.see, x.scale, x.cap, r0, pieces.group0 * GROUP + (u + w) * UNIT, acc, (u + w) * UNIT, s);
  }
}
template <int MR, int W>
static INLINE void weigh(const Tile<ByteCache>& x, const Pieces<ByteCache>& pieces, bool first, const int8_t (*p)[CHUNK],
                         const Fixed* fixed, long d, float* o) {
  const long tile = GROUP * 32, prefetches = GROUP * UNIT / 64;
  Sums sums[W][2 * MR][2] = {};
  for (long g = 0; g < pieces.groups; g++) {
    const Ahead<1> ahead =
        first ? pieces.ahead(pieces.groups * (1 + d / pieces.wide) + g, W * prefetches) : pieces.none();
    Tiles<uint8_t, W, 1> values;
    for (int w = 0; w < W; w++) {
      values.p[w] = x.values(pieces.group0 + g) + (d + w) / PANELS * tile + (d + w) % PANELS * UNIT * ByteCache::P;
      values.ahead[w] = ahead.after(w * prefetches);
    }
    multiply<2 * MR>(&p[0][g * GROUP], CHUNK, values, GROUP, sums);
  }
  for (int w = 0; w < W; w++)
    for (int i = 0; i < MR; i++)
      for (int j = 0; j < 2; j++)
        store(o + i * x.cache.padded_head + (d + w) * UNIT + j * LANES,
              joined(sums[w][2 * i][j], sums[w][2 * i + 1][j], fixed[i]));
}
// s: probabilities of a row, n tokens; changed. Their products with the values' scales as parts.
static INLINE Fixed scaled_parts(float* s, const float* scales, long n, int8_t* high, int8_t* low) {
  Vec largest = zero();
  for (long j = 0; j < n; j += LANES) {
    const Vec w = mul(load(s + j), load(scales + j));
    largest = max(largest, w);
    store(s + j, w);
  }
  return to_fixed(reduce_max(largest), n, [&](long j) { return load(s + j); }, high, low);
}
template <int MR>
static void chunk_rows(const Tile<ByteCache>& x, int r0, long t0, long g0, long g1, float* m, float* l, float* o) {
  constexpr int W = MR <= ByteCache::ROWS / 2 ? 2 : 1;
  Scores<float, MR> s;
  alignas(64) float scales[CHUNK];
  alignas(64) int8_t p[2 * MR][CHUNK];
  Fixed fixed[MR];
  const long n = (g1 - g0) * GROUP, token_units = n / UNIT, units = x.cache.padded_head / UNIT;
  const bool first = r0 == 0;
  const Pieces<ByteCache> pieces{x, t0 / GROUP + g0, g1 - g0, W};
  long u = 0, d = 0;
  for (; u + W <= token_units; u += W) score<MR, W>(x, pieces, first, r0, u, s);
  if (u < token_units) score<MR, 1>(x, pieces, first, r0, u, s);
  for (long g = 0; g < pieces.groups; g++) {
    const bf16* from = x.cache.value_scales(x.values(pieces.group0 + g));
    for (long j = 0; j < GROUP; j += LANES) store(scales + g * GROUP + j, load(from + j));
  }
  softmax(s, n, x.log2_scale, m, l);
  for (int i = 0; i < MR; i++) fixed[i] = scaled_parts(s.s[i], scales, n, p[2 * i], p[2 * i + 1]);
  for (; d + W <= units; d += W) weigh<MR, W>(x, pieces, first, p, fixed, d, o);
  if (d < units) weigh<MR, 1>(x, pieces, first, p, fixed, d, o);
}

}  // namespace headrace
