// Causal attention of a tile: up to MAX_ROWS query rows of one sequence and KV head over one chunk of its tokens.
#pragma once
#include "kv_cache.h"

namespace headrace {

static const int CHUNK = 256;     // tokens that share one softmax; chunks count from position 0 and are folded in order
static const int MAX_ROWS = 48;   // query rows (token x head of the group) of a tile
static const float LOG2_E = 1.44269504f;

// Of MAX_ROWS rows: maximum of the scores in units of log2(e), so that exponentials are powers of 2; sum of exponentials;
// weighted values (not yet divided by the sum)
struct Part {
  alignas(64) float m[MAX_ROWS], l[MAX_ROWS];
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
  float scale, cap, log2_scale;  // the last makes powers of 2 of what is stored as scores
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
// The scores of some rows, written over by their weights. Rows lie an odd number of cache lines apart: several are read at
// a time, which shall lie in different sets of the cache.
static constexpr int SCORE_ROW = CHUNK + 16;
template <class T, int MR>
struct Scores {
  static constexpr long WEIGHT_ROW = SCORE_ROW * sizeof(float) / sizeof(T);
  alignas(64) float s[MR][SCORE_ROW];
  Vec top[MR];  // maximum of each row, by lane
  T* weights(int row) { return (T*)s[row]; }
  Scores() {
    for (Vec& t : top) t = broadcast(-INFINITY);
  }
};
// Scores of UNIT tokens from t on, at place `at` of the chunk: -inf where a row does not see them. Those with a cap are
// scaled, too.
template <class T, int MR>
static INLINE void store_scores(const Visible& see, float scale, float cap, int r0, long t, const Vec (&acc)[MR][2], long at,
                                Scores<T, MR>& out) {
  const bool all_seen = see.end[r0] >= t + UNIT && see.low[r0 + MR - 1] <= t;
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++) {
    Vec v[2] = {acc[i][0], acc[i][1]};
    for (int j = 0; j < 2; j++) {
      if (cap > 0) v[j] = soft_cap(mul(v[j], broadcast(scale)), broadcast(cap));
      if (!all_seen) {
        const long from = t + j * LANES;
        v[j] = choose(between(see.low[r0 + i] - from, see.end[r0 + i] - from), v[j], broadcast(-INFINITY));
      }
      store(&out.s[i][at + j * LANES], v[j]);
    }
    out.top[i] = max(out.top[i], max(v[0], v[1]));
  }
}
// Weights of rows i .. i + R - 1, exp(scale * (score - maximum)): of several at once, since each sum waits for the one
// before. The maximum is a rounded one: weights of a row may all be larger or smaller by as much.
template <int R, class T, int MR>
static INLINE void weights_of(Scores<T, MR>& x, int i, long n, float log2_scale, float* m, float* l) {
  const Vec scale = broadcast(log2_scale);
  Vec top[R], sum[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    m[i + r] = reduce_max(x.top[i + r]) * log2_scale;
    top[r] = broadcast(m[i + r] == -INFINITY ? 0.f : m[i + r]);
    sum[r] = zero();
  }
  for (long j = 0; j < n; j += LANES) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const Vec e = exp2_neg<T>(fms(load(&x.s[i + r][j]), scale, top[r]));
      sum[r] = add(sum[r], e);
      store(x.weights(i + r) + j, e);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) l[i + r] = reduce_add(sum[r]);
}
template <class T, int MR>
static INLINE void softmax(Scores<T, MR>& x, long n, float log2_scale, float* m, float* l) {
  for (int i = 0; i + 4 <= MR; i += 4) weights_of<4>(x, i, n, log2_scale, m, l);
  if constexpr (MR % 4 != 0) weights_of<MR % 4>(x, MR / 4 * 4, n, log2_scale, m, l);
}
template <int W, int MR>
static INLINE void clear(Vec (&acc)[W][MR][2]) {
#pragma GCC unroll 2
  for (int w = 0; w < W; w++)
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) acc[w][i][0] = acc[w][i][1] = zero();
}
// Scores over units u .. u + W - 1 of the chunk. The `first` rows of a tile prefetch for all.
template <class C, int MR, int W, class T>
static INLINE void score(const Tile<C>& x, const Pieces<C>& pieces, bool first, int r0, long u, Scores<T, MR>& s) {
  const C& c = x.cache;
  Vec acc[W][MR][2];
  clear(acc);
  Tiles<T, W, 1> keys;
  for (int w = 0; w < W; w++) {
    const long g = (u + w) / PANELS, panel = (u + w) % PANELS, prefetches = c.head_size * UNIT * sizeof(T) / 64;
    keys.p[w] = x.keys(pieces.group0 + g) + panel * UNIT * C::P;
    keys.ahead[w] = (first ? pieces.ahead(g, PANELS * prefetches) : pieces.none()).after(panel * prefetches);
  }
  multiply<MR>(x.q.rows + r0 * c.head_size, c.head_size, keys, c.head_size, acc);
  for (int w = 0; w < W; w++)
    store_scores(x.see, x.scale, x.cap, r0, pieces.group0 * GROUP + (u + w) * UNIT, acc[w], (u + w) * UNIT, s);
}
// o[rows][UNIT W columns] = p * values, for units d .. d + W - 1
template <class C, int MR, int W, class T>
static INLINE void weigh(const Tile<C>& x, const Pieces<C>& pieces, bool first, Scores<T, MR>& s, long d, float* o) {
  const long tile = GROUP * 32, prefetches = GROUP * UNIT * sizeof(T) / 64;
  Vec acc[W][MR][2];
  clear(acc);
  for (long g = 0; g < pieces.groups; g++) {
    const Ahead<1> ahead =
        first ? pieces.ahead(pieces.groups * (1 + d / pieces.wide) + g, W * prefetches) : pieces.none();
    Tiles<T, W, 1> values;
    for (int w = 0; w < W; w++) {
      values.p[w] = x.values(pieces.group0 + g) + (d + w) / PANELS * tile + (d + w) % PANELS * UNIT * C::P;
      values.ahead[w] = ahead.after(w * prefetches);
    }
    multiply<MR>(s.weights(0) + g * GROUP, s.WEIGHT_ROW, values, GROUP, acc);
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
  Scores<T, MR> s;
  const long n = (g1 - g0) * GROUP, token_units = n / UNIT, units = x.cache.padded_head / UNIT;
  const bool first = r0 == 0;
  const Pieces<C> pieces{x, t0 / GROUP + g0, g1 - g0, W};
  long u = 0, d = 0;
  for (; u + W <= token_units; u += W) score<C, MR, W>(x, pieces, first, r0, u, s);
  if (u < token_units) score<C, MR, 1>(x, pieces, first, r0, u, s);
  softmax(s, n, x.log2_scale, m, l);
  for (; d + W <= units; d += W) weigh<C, MR, W>(x, pieces, first, s, d, o);
  if (d < units) weigh<C, MR, 1>(x, pieces, first, s, d, o);
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
  alignas(64) float fa[MAX_ROWS], fb[MAX_ROWS];
  for (int r = 0; r < rows; r += LANES) {
    const Vec ma = load(a.m + r), mb = load(b.m + r), m = max(ma, mb);
    const Vec from = choose(differs(m, broadcast(-INFINITY)), m, zero());
    const Vec va = exp2_neg<float>(sub(ma, from)), vb = exp2_neg<float>(sub(mb, from));
    store(a.m + r, m), store(fa + r, va), store(fb + r, vb);
    store(a.l + r, fma(load(b.l + r), vb, mul(load(a.l + r), va)));
  }
  for (int r = 0; r < rows; r++) {
    const Vec va = broadcast(fa[r]), vb = broadcast(fb[r]);
    float *oa = a.o + r * width, *ob = b.o + r * width;
    for (long i = 0; i < width; i += LANES) store(oa + i, fma(load(ob + i), vb, mul(load(oa + i), va)));
  }
}

}  // namespace headrace
