// Causal attention of a tile: up to MAX_ROWS query rows of one sequence and KV head over one chunk of its tokens.
#pragma once
#include "kv_cache.h"

namespace headrace {

static const int CHUNK = 256;     // tokens that share one softmax; chunks count from position 0 and are folded in order
static const int GROUPS = CHUNK / GROUP;
static const int MAX_ROWS = 48;   // query rows (token x head of the group) of a tile

struct Part {  // of MAX_ROWS rows: maximum, sum of exponentials, weighted values (not yet divided by the sum)
  float m[MAX_ROWS], l[MAX_ROWS];
  float* o;  // [MAX_ROWS][padded_head]
};
struct Visible {  // tokens a row sees: low <= t < end
  long low[MAX_ROWS], end[MAX_ROWS];
};
struct Coming {  // keys of the chunk to come
  const int32_t* table;
  long head, group0, groups;  // 0 groups: nothing comes
};
template <class C>
struct Query {  // rows of a tile, as the product with keys takes them
  alignas(64) typename C::Value rows[MAX_ROWS * MAX_HEAD];  // [rows][head_size]
  void load(int r, const typename C::Value* from, long head_size) {
    memcpy(rows + r * head_size, from, head_size * sizeof(*from));
  }
};
template <class C>
struct Tile {
  using T = typename C::Value;
  const Query<C>& q;
  C cache;
  const int32_t* table;
  long head;
  float scale, cap;
  Visible see;
  Coming coming;

  T* keys(long group) const { return cache.keys(table[group / cache.groups], head, group % cache.groups); }
  T* values(long group) const { return cache.values(table[group / cache.groups], head, group % cache.groups); }
  Stored stored_keys(long group) const { return cache.stored_keys(table[group / cache.groups], head, group % cache.groups); }
  Stored stored_values(long group) const { return cache.stored_values(table[group / cache.groups], head, group % cache.groups); }
};
// The cache lies in pieces of some KiB at random places, which hardware does not foresee. So what is read a few pieces
// later is prefetched. At 2 to 4 pieces decode attention took an eighth less CPU time than with the whole chunk to come.
static const long PIECES_AHEAD = 3;
// The pieces of a chunk in the order in which they are read: keys of each group, then values of each group, `wide` units
// of columns at a time, then the keys of the chunk to come.
template <class C>
struct Pieces {
  const Tile<C>& x;
  long group0, groups, wide;

  Ahead<1> ahead(long i, long prefetches) const {  // to be spread over so many prefetches
    const long units = x.cache.padded_head / UNIT, passes = (units + wide - 1) / wide;
    i += PIECES_AHEAD;
    if (i < groups) return spread(x.stored_keys(group0 + i), 0, 1, 1, prefetches);
    i -= groups;
    if (i < groups * passes) {
      const long d = i / groups * wide, some = std::min(wide, units - d);
      return spread(x.stored_values(group0 + i % groups), d, some, units, prefetches);
    }
    i -= groups * passes;
    if (i >= x.coming.groups) return none();
    const long g = x.coming.group0 + i;
    return spread(x.cache.stored_keys(x.coming.table[g / x.cache.groups], x.coming.head, g % x.cache.groups), 0, 1, 1, prefetches);
  }
  static Ahead<1> spread(Stored at, long from, long some, long of, long prefetches) {
    return {at.p + at.bytes * from / of, at.bytes * some / of / prefetches};
  }
  Ahead<1> none() const { return {(const char*)x.q.rows, 0}; }
};
static void softmax(float* s, long n, float* m, float* l) {
  Vec mx = broadcast(-INFINITY), sum = zero();
  for (long j = 0; j < n; j += LANES) mx = max(mx, load(s + j));
  const float top = reduce_max(mx);
  const Vec vm = broadcast(top == -INFINITY ? 0.f : top);
  for (long j = 0; j < n; j += LANES) {
    Vec x = load(s + j);
    x = or_zero(differs(x, broadcast(-INFINITY)), exp_neg(sub(x, vm)));
    sum = add(sum, x);
    store(s + j, x);
  }
  *m = top, *l = reduce_add(sum);
}
// Scores of UNIT tokens from t on: scaled, capped, and -inf where a row does not see them
template <class C, int MR>
static INLINE void store_scores(const Tile<C>& x, int r0, long t, Vec (&acc)[MR][2], float (*s)[CHUNK], long at) {
  const bool all_seen = x.see.end[r0] >= t + UNIT && x.see.low[r0 + MR - 1] <= t;
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < 2; j++) {
      Vec v = mul(acc[i][j], broadcast(x.scale));
      if (x.cap > 0) v = soft_cap(v, broadcast(x.cap));
      if (!all_seen) {
        const long from = t + j * LANES;
        v = choose(between(x.see.low[r0 + i] - from, x.see.end[r0 + i] - from), v, broadcast(-INFINITY));
      }
      store(&s[i][at + j * LANES], v);
    }
}
// Scores over units u .. u + W - 1 of the chunk. The `first` rows of a tile prefetch for all.
template <class C, int MR, int W>
static INLINE void score(const Tile<C>& x, const Pieces<C>& pieces, bool first, int r0, long u, float (*s)[CHUNK]) {
  using T = typename C::Value;
  const C& c = x.cache;
  Vec acc[W][MR][2] = {};
  Tiles<T, W, 1> keys;
  for (int w = 0; w < W; w++) {
    const long g = (u + w) / PANELS, panel = (u + w) % PANELS, prefetches = c.head_size * UNIT * sizeof(T) / 64;
    keys.p[w] = x.keys(pieces.group0 + g) + panel * UNIT * C::P;
    keys.ahead[w] = (first ? pieces.ahead(g, PANELS * prefetches) : pieces.none()).after(panel * prefetches);
  }
  multiply<MR>(x.q.rows + r0 * c.head_size, c.head_size, keys, c.head_size, acc);
  for (int w = 0; w < W; w++)
    store_scores<C, MR>(x, r0, pieces.group0 * GROUP + (u + w) * UNIT, acc[w], s, (u + w) * UNIT);
}
// o[rows][UNIT W columns] = p * values, for units d .. d + W - 1
template <class C, int MR, int W>
static INLINE void weigh(const Tile<C>& x, const Pieces<C>& pieces, bool first, const typename C::Value (*p)[CHUNK], long d, float* o) {
  using T = typename C::Value;
  const long tile = GROUP * 32, prefetches = GROUP * UNIT * sizeof(T) / 64;
  Vec acc[W][MR][2] = {};
  for (long g = 0; g < pieces.groups; g++) {
    const Ahead<1> ahead =
        first ? pieces.ahead(pieces.groups * (1 + d / pieces.wide) + g, W * prefetches) : pieces.none();
    Tiles<T, W, 1> values;
    for (int w = 0; w < W; w++) {
      values.p[w] = x.values(pieces.group0 + g) + (d + w) / PANELS * tile + (d + w) % PANELS * UNIT * C::P;
      values.ahead[w] = ahead.after(w * prefetches);
    }
    multiply<MR>(&p[0][g * GROUP], CHUNK, values, GROUP, acc);
  }
  for (int w = 0; w < W; w++)
    for (int i = 0; i < MR; i++)
      for (int j = 0; j < 2; j++) store(o + i * x.cache.padded_head + (d + w) * UNIT + j * LANES, acc[w][i][j]);
}
// rows r0 .. r0 + MR - 1 of the tile over groups g0 .. g1 - 1 of the chunk from token t0 on
template <int MR, class C>
static void chunk_rows(const Tile<C>& x, int r0, long t0, long g0, long g1, float* m, float* l, float* o) {
  using T = typename C::Value;
  constexpr int W = MR <= C::ROWS / 2 ? 2 : 1;
  alignas(64) float s[MR][CHUNK];
  alignas(64) T p[MR][CHUNK];
  const long n = (g1 - g0) * GROUP, token_units = n / UNIT, units = x.cache.padded_head / UNIT;
  const bool first = r0 == 0;
  const Pieces<C> pieces{x, t0 / GROUP + g0, g1 - g0, W};
  long u = 0, d = 0;
  for (; u + W <= token_units; u += W) score<C, MR, W>(x, pieces, first, r0, u, s);
  if (u < token_units) score<C, MR, 1>(x, pieces, first, r0, u, s);
  for (int i = 0; i < MR; i++) softmax(s[i], n, m + i, l + i);
  for (int i = 0; i < MR; i++)
    for (long j = 0; j < n; j += LANES) store(&p[i][j], load(&s[i][j]));
  for (; d + W <= units; d += W) weigh<C, MR, W>(x, pieces, first, p, d, o);
  if (d < units) weigh<C, MR, 1>(x, pieces, first, p, d, o);
}
template <class C>
static void chunk(const Tile<C>& x, int rows, long index, Part& out) {
  const long t0 = index * CHUNK, end = std::min<long>(CHUNK, x.see.end[rows - 1] - t0);
  const long g0 = std::max<long>(0, x.see.low[0] - t0) / GROUP, g1 = (end + GROUP - 1) / GROUP;
  over_rows<C::ROWS>(rows, [&](auto n, long r, long, long) {
    chunk_rows<decltype(n)::value>(x, (int)r, t0, g0, g1, out.m + r, out.l + r, out.o + r * x.cache.padded_head);
  });
}
// a = a folded with the next chunk b
static void fold(Part& a, const Part& b, int rows, long width) {
  for (int r = 0; r < rows; r++) {
    if (b.l[r] == 0.f) continue;
    const float m = std::max(a.m[r], b.m[r]);
    const float fa = a.l[r] == 0.f ? 0.f : std::exp(a.m[r] - m), fb = std::exp(b.m[r] - m);
    a.m[r] = m, a.l[r] = a.l[r] * fa + b.l[r] * fb;
    const Vec va = broadcast(fa), vb = broadcast(fb);
    float *oa = a.o + r * width, *ob = b.o + r * width;
    for (long i = 0; i < width; i += LANES) store(oa + i, fma(load(ob + i), vb, mul(load(oa + i), va)));
  }
}
static void clear(Part& p, int rows, long width) {
  for (int r = 0; r < rows; r++) p.m[r] = -INFINITY, p.l[r] = 0.f;
  memset(p.o, 0, sizeof(float) * rows * width);
}

}  // namespace headrace
