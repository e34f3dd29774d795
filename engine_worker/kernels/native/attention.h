// Rotary embedding with the write into the paged cache, and causal attention over it: prefill and decode alike.
#pragma once
#include <vector>

#include "microkernels.h"

namespace headrace {

// The cache's layout is made for the micro-kernels: both products of attention read it as they read weights. A block
// holds groups of 32 tokens for each KV head; P = 2 for bf16 (values of two k's or two tokens side by side), 1 for fp32.
//   K  [block][kv head][group][head_size / P][32 tokens][P]
//   V  [block][kv head][group][padded_head / 32][32 / P token tuples][32 columns][P]
static const int GROUP = 32;      // tokens of a group
static const int CHUNK = 256;     // tokens that share one softmax; chunks count from position 0 and are folded in order
static const int MAX_ROWS = 48;   // query rows (token x head of the group) of a tile
static const int MAX_HEAD = 256;

struct Shape {  // constant over a layer; same fields and order in cpu.py
  int64_t heads, kv_heads, head_size, block_size;
  int64_t window;  // 0 = none
  float scale, cap;  // cap 0 = none
};
struct Step {  // where the tokens stand; see AttentionMetadata
  int64_t sequences, tokens;
  const int32_t *query_start, *seq_lens, *rows, *tables;
  int64_t table_stride;
  const int32_t *slots, *positions;
};

template <class T>
struct Cache {
  static constexpr long P = std::is_same_v<T, float> ? 1 : 2;
  T *k, *v;
  long kv_heads, head_size, padded_head, groups;  // groups of a block
  Cache(void* k_, void* v_, const Shape& s)
      : k((T*)k_), v((T*)v_), kv_heads(s.kv_heads), head_size(s.head_size), padded_head((s.head_size + 31) / 32 * 32),
        groups(s.block_size / GROUP) {}
  long piece(long block, long head, long group) const { return (block * kv_heads + head) * groups + group; }
  T* keys(long block, long head, long group) const { return k + piece(block, head, group) * head_size * GROUP; }
  T* values(long block, long head, long group) const { return v + piece(block, head, group) * padded_head * GROUP; }
};

// ---------------------------------------------------------------- rotary + write
struct Rope {
  const float* cos_sin;  // [positions][dim]: cos | sin, dim / 2 each
  int64_t dim;
  const float *q_norm, *k_norm;  // [head_size] or null
  float eps;
};
template <class T>
static void rotate_head(T* p, const float* cs, const Rope& r, const float* norm, long head_size) {
  float scale = 1.f;
  if (norm) {
    Vec ss = zero();
    for (long i = 0; i < head_size; i += LANES) {
      const Vec v = load(p + i, first(head_size - i));
      ss = fma(v, v, ss);
    }
    scale = 1.f / std::sqrt(reduce_add(ss) / (float)head_size + r.eps);
  }
  const Vec vs = broadcast(scale);
  auto at = [&](long i, Lanes k) {
    const Vec v = load(p + i, k);
    return norm ? mul(mul(v, vs), load(norm + i, k)) : v;
  };
  const long half = r.dim / 2;
  for (long i = 0; i < half; i += LANES) {
    const Lanes k = first(half - i);
    const Vec a = at(i, k), b = at(half + i, k), c = load(cs + i, k), s = load(cs + half + i, k);
    store(p + i, fms(a, c, mul(b, s)), k);
    store(p + half + i, fma(b, c, mul(a, s)), k);
  }
  if (norm)
    for (long i = r.dim; i < head_size; i += LANES) {
      const Lanes k = first(head_size - i);
      store(p + i, at(i, k), k);
    }
}
static INLINE float finite(float v) {  // also of NaN
  return v > -3e38f ? (v < 3e38f ? v : 3e38f) : -3e38f;
}
static INLINE bf16 finite(bf16 v) { return (v & 0x7f80) == 0x7f80 ? (bf16)((v & 0x8000) | 0x7f7f) : v; }

template <class T>
static void write_token(const T* keys, const T* values, const Cache<T>& c, long slot) {
  constexpr long P = Cache<T>::P;
  const long size = c.groups * GROUP, block = slot / size, group = slot % size / GROUP, t = slot % GROUP;
  for (long h = 0; h < c.kv_heads; h++) {
    T* to = c.keys(block, h, group) + t * P;
    for (long i = 0; i < c.head_size; i += P) memcpy(to + i * GROUP, keys + h * c.head_size + i, sizeof(T) * P);
    // Values are kept finite: a masked token counts as 0 * value, which would be NaN for whoever owns the block next.
    to = c.values(block, h, group) + t / P * 32 * P + t % P;
    for (long i = 0; i < c.head_size; i++)
      to[i / 32 * 32 * GROUP + i % 32 * P] = finite(values[h * c.head_size + i]);
  }
}
template <class T>
static void rope_write(Team& team, T* qkv, const Shape& s, const Rope& r, const Step& step, const Cache<T>& c) {
  const long ld = (s.heads + 2 * s.kv_heads) * s.head_size;
  team.each(step.tokens, 4, [&](long m) {
    T* row = qkv + m * ld;
    const float* cs = r.cos_sin + step.positions[m] * r.dim;
    for (long h = 0; h < s.heads + s.kv_heads; h++)
      rotate_head(row + h * s.head_size, cs, r, h < s.heads ? r.q_norm : r.k_norm, s.head_size);
    const T* keys = row + s.heads * s.head_size;
    write_token(keys, keys + s.kv_heads * s.head_size, c, step.slots[m]);
  });
}

// ---------------------------------------------------------------- the schedule of one step
// A tile is up to MAX_ROWS rows of one sequence and KV head; row r is query token r / G, head r % G of the group. Its
// chunks are folded by one thread (an item), or shared out over several items where there are too few tiles; then each
// chunk's partial result is kept and a second phase folds them, in the same order.
struct Item {
  int sequence, head, row0, rows, chunk0, chunk1;
  long part;  // index of the first partial result, or none
  static const long NONE = -1;
};
struct Split {
  int first_item;
  int chunks;
};
struct Schedule {
  std::vector<Item> items;
  std::vector<Split> splits;
  long parts = 0;
};
static void make_schedule(Schedule& out, const Shape& s, const Step& step, int threads) {
  const long G = s.heads / s.kv_heads;
  out.items.clear(), out.splits.clear(), out.parts = 0;
  auto tiles = [&](auto f) {
    for (long i = 0; i < step.sequences; i++) {
      const long queries = step.query_start[i + 1] - step.query_start[i], before = step.seq_lens[i] - queries;
      for (long r = 0; r < queries * G; r += MAX_ROWS) {
        const long rows = std::min<long>(MAX_ROWS, queries * G - r);
        const long seen = before + (r + rows - 1) / G + 1, low = s.window ? std::max<long>(0, before + r / G + 1 - s.window) : 0;
        f(i, r, rows, low / CHUNK, (seen + CHUNK - 1) / CHUNK);
      }
    }
  };
  long chunks = 0;
  tiles([&](long, long, long, long c0, long c1) { chunks += (c1 - c0) * s.kv_heads; });
  const long most = std::max<long>(1, chunks / (threads * 4L));
  tiles([&](long i, long r, long rows, long c0, long c1) {
    const bool split = threads > 1 && c1 - c0 > most;
    for (long h = 0; h < s.kv_heads; h++) {
      if (!split) {
        out.items.push_back({(int)i, (int)h, (int)r, (int)rows, (int)c0, (int)c1, Item::NONE});
        continue;
      }
      out.splits.push_back({(int)out.items.size(), (int)(c1 - c0)});
      for (long c = c0; c < c1; c += most) {
        const long e = std::min(c1, c + most);
        out.items.push_back({(int)i, (int)h, (int)r, (int)rows, (int)c, (int)e, out.parts});
        out.parts += e - c;
      }
    }
  });
}

// ---------------------------------------------------------------- one chunk of one tile
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
template <class T>
struct Tile {
  const T* q;  // [rows][head_size]
  Cache<T> cache;
  const int32_t* table;
  long head;
  float scale, cap;
  Visible see;
  Coming coming;

  T* keys(long group) const { return cache.keys(table[group / cache.groups], head, group % cache.groups); }
  T* values(long group) const { return cache.values(table[group / cache.groups], head, group % cache.groups); }
};
// The cache lies in pieces of some KiB at random places, which hardware does not foresee. So what is read a few pieces
// later is prefetched. At 2 to 4 pieces decode attention took an eighth less CPU time than with the whole chunk to come.
static const long PIECES_AHEAD = 3;
// The pieces of a chunk in the order in which they are read: keys of each group, then values of each group, `wide` units
// of columns at a time, then the keys of the chunk to come.
template <class T>
struct Pieces {
  const Tile<T>& x;
  long group0, groups, wide;

  Ahead<1> ahead(long i, long prefetches) const {  // to be spread over so many prefetches
    const long key_bytes = x.cache.head_size * GROUP * sizeof(T), unit = GROUP * UNIT, units = x.cache.padded_head / UNIT;
    const long passes = (units + wide - 1) / wide;
    i += PIECES_AHEAD;
    if (i < groups) return {(const char*)x.keys(group0 + i), key_bytes / prefetches};
    i -= groups;
    if (i < groups * passes) {
      const long d = i / groups * wide, bytes = std::min(wide, units - d) * unit * sizeof(T);
      return {(const char*)(x.values(group0 + i % groups) + d * unit), bytes / prefetches};
    }
    i -= groups * passes;
    if (i >= x.coming.groups) return none();
    const long g = x.coming.group0 + i;
    return {(const char*)x.cache.keys(x.coming.table[g / x.cache.groups], x.coming.head, g % x.cache.groups), key_bytes / prefetches};
  }
  Ahead<1> none() const { return {(const char*)x.q, 0}; }
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
template <class T, int MR>
static INLINE void store_scores(const Tile<T>& x, int r0, long t, Vec (&acc)[MR][2], float (*s)[CHUNK], long at) {
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
// Scores over units u .. u + W - 1 of the chunk
template <class T, int MR, int W>
static INLINE void score(const Pieces<T>& pieces, bool fetches, int r0, long u, float (*s)[CHUNK]) {
  const Cache<T>& c = pieces.x.cache;
  Vec acc[W][MR][2] = {};
  Tiles<T, W, 1> keys;
  for (int w = 0; w < W; w++) {
    const long g = (u + w) / PANELS, panel = (u + w) % PANELS, prefetches = c.head_size * UNIT * sizeof(T) / 64;
    keys.p[w] = pieces.x.keys(pieces.group0 + g) + panel * UNIT * Cache<T>::P;
    keys.ahead[w] = (fetches ? pieces.ahead(g, PANELS * prefetches) : pieces.none()).after(panel * prefetches);
  }
  multiply<MR>(pieces.x.q + r0 * c.head_size, c.head_size, keys, c.head_size, acc);
  for (int w = 0; w < W; w++)
    store_scores<T, MR>(pieces.x, r0, pieces.group0 * GROUP + (u + w) * UNIT, acc[w], s, (u + w) * UNIT);
}
// o[rows][UNIT W columns] = p * values, for units d .. d + W - 1
template <class T, int MR, int W>
static INLINE void weigh(const Pieces<T>& pieces, bool fetches, const T (*p)[CHUNK], long d, float* o) {
  const long tile = GROUP * 32, prefetches = GROUP * UNIT * sizeof(T) / 64;
  Vec acc[W][MR][2] = {};
  for (long g = 0; g < pieces.groups; g++) {
    const Ahead<1> ahead =
        fetches ? pieces.ahead(pieces.groups * (1 + d / pieces.wide) + g, W * prefetches) : pieces.none();
    Tiles<T, W, 1> values;
    for (int w = 0; w < W; w++) {
      values.p[w] = pieces.x.values(pieces.group0 + g) + (d + w) / PANELS * tile + (d + w) % PANELS * UNIT * Cache<T>::P;
      values.ahead[w] = ahead.after(w * prefetches);
    }
    multiply<MR>(&p[0][g * GROUP], CHUNK, values, GROUP, acc);
  }
  for (int w = 0; w < W; w++)
    for (int i = 0; i < MR; i++)
      for (int j = 0; j < 2; j++) store(o + i * pieces.x.cache.padded_head + (d + w) * UNIT + j * LANES, acc[w][i][j]);
}
// rows r0 .. r0 + MR - 1 of the tile over groups g0 .. g1 - 1 of the chunk from token t0 on
template <class T, int MR>
static void chunk_rows(const Tile<T>& x, int r0, long t0, long g0, long g1, float* m, float* l, float* o) {
  constexpr int W = MR <= DENSE_ROWS<T> / 2 ? 2 : 1;
  alignas(64) float s[MR][CHUNK];
  alignas(64) T p[MR][CHUNK];
  const long n = (g1 - g0) * GROUP, token_units = n / UNIT, units = x.cache.padded_head / UNIT;
  const bool fetches = r0 == 0;  // the first rows do it for all
  const Pieces<T> pieces{x, t0 / GROUP + g0, g1 - g0, W};
  long u = 0, d = 0;
  for (; u + W <= token_units; u += W) score<T, MR, W>(pieces, fetches, r0, u, s);
  if (u < token_units) score<T, MR, 1>(pieces, fetches, r0, u, s);
  for (int i = 0; i < MR; i++) softmax(s[i], n, m + i, l + i);
  for (int i = 0; i < MR; i++)
    for (long j = 0; j < n; j += LANES) store(&p[i][j], load(&s[i][j]));
  for (; d + W <= units; d += W) weigh<T, MR, W>(pieces, fetches, p, d, o);
  if (d < units) weigh<T, MR, 1>(pieces, fetches, p, d, o);
}
template <class T>
static void chunk(const Tile<T>& x, int rows, long index, Part& out) {
  const long t0 = index * CHUNK, end = std::min<long>(CHUNK, x.see.end[rows - 1] - t0);
  const long g0 = std::max<long>(0, x.see.low[0] - t0) / GROUP, g1 = (end + GROUP - 1) / GROUP;
  over_rows<DENSE_ROWS<T>>(rows, [&](auto n, long r, long, long) {
    chunk_rows<T, decltype(n)::value>(x, (int)r, t0, g0, g1, out.m + r, out.l + r, out.o + r * x.cache.padded_head);
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

// ---------------------------------------------------------------- all of it
struct AttentionScratch {  // of the calling thread
  Schedule schedule;
  std::vector<Part> parts;
  Buffer<float> part_values;  // [parts][MAX_ROWS][padded_head]
};
static void plan_attention(AttentionScratch& s, const Shape& shape, const Step& step, int threads) {
  make_schedule(s.schedule, shape, step, threads);
  const long width = (shape.head_size + 31) / 32 * 32;
  if ((long)s.parts.size() < s.schedule.parts) s.parts.resize(s.schedule.parts);
  float* p = s.part_values.at_least(s.schedule.parts * MAX_ROWS * width + 1);
  for (long i = 0; i < s.schedule.parts; i++) s.parts[i].o = p + i * MAX_ROWS * width;
}
template <class T>
static void finish_tile(const Part& p, const Item& it, const Shape& s, const Step& step, long width, T* out) {
  const long G = s.heads / s.kv_heads;
  for (int r = 0; r < it.rows; r++) {
    const long row = it.row0 + r, token = step.query_start[it.sequence] + row / G;
    T* to = out + (token * s.heads + it.head * G + row % G) * s.head_size;
    const Vec inverse = broadcast(1.f / p.l[r]);
    for (long i = 0; i < s.head_size; i += LANES)
      store(to + i, mul(load(p.o + r * width + i), inverse), first(s.head_size - i));
  }
}
static INLINE long tokens_before(const Step& step, long sequence) {
  return step.seq_lens[sequence] - (step.query_start[sequence + 1] - step.query_start[sequence]);
}
static INLINE const int32_t* table_of(const Step& step, long sequence) {
  return step.tables + step.rows[sequence] * step.table_stride;
}
static Coming coming_chunk(const Item& it, long chunk, const Shape& s, const Step& step) {
  const long G = s.heads / s.kv_heads, before = tokens_before(step, it.sequence);
  const long end = (before + (it.row0 + it.rows - 1) / G + GROUP) / GROUP;  // groups that the last row sees
  const long low = s.window ? std::max<long>(0, before + it.row0 / G + 1 - s.window) / GROUP : 0;
  const long first_group = std::max<long>(low, chunk * (CHUNK / GROUP));
  return {table_of(step, it.sequence), it.head, first_group, std::min<long>(end, (chunk + 1) * (CHUNK / GROUP)) - first_group};
}
// To be followed by a sync, if anything reads the result.
template <class T>
static void attention(Team& team, AttentionScratch& a, const T* qkv, const Shape& s, const Step& step, const Cache<T>& c, T* out) {
  const long G = s.heads / s.kv_heads, ld = (s.heads + 2 * s.kv_heads) * s.head_size, width = c.padded_head;
  alignas(64) float sum_o[MAX_ROWS * MAX_HEAD], tmp_o[MAX_ROWS * MAX_HEAD];
  alignas(64) T q[MAX_ROWS * MAX_HEAD];
  Part sum, tmp;
  sum.o = sum_o, tmp.o = tmp_o;
  const std::vector<Item>& items = a.schedule.items;
  const long n = (long)items.size();
  team.each_ahead(n, [&](long i, long then) {
    const Item& it = items[i];
    Tile<T> x{q, c, table_of(step, it.sequence), it.head, s.scale, s.cap, {}, {}};
    const long start = step.query_start[it.sequence], before = tokens_before(step, it.sequence);
    auto coming = [&](int chunk) {
      if (chunk + 1 < it.chunk1) return coming_chunk(it, chunk + 1, s, step);
      return then < n ? coming_chunk(items[then], items[then].chunk0, s, step) : Coming{};
    };
    for (int r = 0; r < it.rows; r++) {
      const long row = it.row0 + r, token = row / G;
      memcpy(q + r * s.head_size, qkv + (start + token) * ld + (it.head * G + row % G) * s.head_size, s.head_size * sizeof(T));
      x.see.end[r] = before + token + 1;
      x.see.low[r] = s.window ? std::max<long>(0, x.see.end[r] - s.window) : 0;
    }
    if (it.part != Item::NONE) {
      for (int k = it.chunk0; k < it.chunk1; k++) {
        x.coming = coming(k);
        chunk(x, it.rows, k, a.parts[it.part + k - it.chunk0]);
      }
      return;
    }
    clear(sum, it.rows, width);
    for (int k = it.chunk0; k < it.chunk1; k++) {
      x.coming = coming(k);
      chunk(x, it.rows, k, tmp);
      fold(sum, tmp, it.rows, width);
    }
    finish_tile(sum, it, s, step, width, out);
  });
  if (a.schedule.splits.empty()) return;
  team.sync();
  team.each((long)a.schedule.splits.size(), 1, [&](long i) {
    const Split& split = a.schedule.splits[i];
    const Item& it = items[split.first_item];
    clear(sum, it.rows, width);
    for (int k = 0; k < split.chunks; k++) fold(sum, a.parts[it.part + k], it.rows, width);
    finish_tile(sum, it, s, step, width, out);
  });
}

}  // namespace headrace
