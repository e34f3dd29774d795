// Causal attention over the paged cache, prefill and decode alike: what is computed by whom in which order.
#pragma once
#include <vector>

#include "attention_bytes.h"

namespace headrace {

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
  long parts = 0, most_rows = 0;
};
static void make_schedule(Schedule& out, const Shape& s, const Step& step, int threads) {
  const long G = s.heads / s.kv_heads;
  out.items.clear(), out.splits.clear(), out.parts = out.most_rows = 0;
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
  tiles([&](long, long, long rows, long c0, long c1) {
    chunks += (c1 - c0) * s.kv_heads;
    out.most_rows = std::max(out.most_rows, rows);
  });
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
static void keep(const Part& from, int rows, long width, Part& to) {
  std::copy(from.m, from.m + rows, to.m);
  std::copy(from.l, from.l + rows, to.l);
  std::copy(from.o, from.o + rows * width, to.o);
}
template <class T>
static void finish_tile(const Part& p, const Item& it, const Shape& s, const Step& step, long width, T* out) {
  const long G = s.heads / s.kv_heads;
  for (int r = 0; r < it.rows; r++) {
    const long row = it.row0 + r, token = step.query_start[it.sequence] + row / G;
    T* to = out + (token * s.heads + it.head * G + row % G) * s.head_size;
    const Vec inverse = broadcast(1.f / p.l[r]);
    for (long i = 0; i < s.head_size; i += LANES)
      // plus zero: a chunk of which a row sees nothing can change the sign of a zero, which shall not be seen
      store(to + i, add(mul(load(p.o + r * width + i), inverse), zero()), first(s.head_size - i));
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
template <class T, class C>
static void attention(Team& team, AttentionScratch& a, const T* qkv, const Shape& s, const Step& step, const C& c, T* out) {
  const long G = s.heads / s.kv_heads, ld = (s.heads + 2 * s.kv_heads) * s.head_size, width = c.padded_head;
  alignas(64) float sum_o[MAX_ROWS * MAX_HEAD], tmp_o[MAX_ROWS * MAX_HEAD];
  Query<C> q;
  Part sum, tmp;
  sum.o = sum_o, tmp.o = tmp_o;
  const std::vector<Item>& items = a.schedule.items;
  const long n = (long)items.size();
  const Patience patience = Patience::of_products(4. * a.schedule.most_rows * CHUNK * width);
  team.each_ahead(n, patience, [&](long i, long then, Hold& hold) {
    const Item& it = items[i];
    Tile<C> x{q, c, table_of(step, it.sequence), it.head, s.scale, s.cap, (s.cap > 0 ? 1.f : s.scale) * LOG2_E, {}, {}};
    const long start = step.query_start[it.sequence], before = tokens_before(step, it.sequence);
    auto coming = [&](int chunk) {
      if (chunk + 1 < it.chunk1) return coming_chunk(it, chunk + 1, s, step);
      return then < n ? coming_chunk(items[then], items[then].chunk0, s, step) : Coming{};
    };
    for (int r = 0; r < it.rows; r++) {
      const long row = it.row0 + r, token = row / G;
      q.load(r, qkv + (start + token) * ld + (it.head * G + row % G) * s.head_size, s.head_size);
      x.see.end[r] = before + token + 1;
      x.see.low[r] = s.window ? std::max<long>(0, x.see.end[r] - s.window) : 0;
    }
    if (it.part != Item::NONE) {  // a run is a chunk
      for (int k = it.chunk0 + (int)hold.first_run; k < it.chunk1; k++) {
        x.coming = coming(k);
        chunk(x, it.rows, k, tmp);
        if (!hold.store()) return;
        keep(tmp, it.rows, width, a.parts[it.part + k - it.chunk0]);
        if (k + 1 < it.chunk1) hold.stored();
      }
      return;
    }
    for (int k = it.chunk0; k < it.chunk1; k++) {
      x.coming = coming(k);
      chunk(x, it.rows, k, k == it.chunk0 ? sum : tmp);
      if (k > it.chunk0) fold(sum, tmp, it.rows, width);
      hold.beat();
    }
    if (hold.store()) finish_tile(sum, it, s, step, width, out);
  });
  if (a.schedule.splits.empty()) return;
  team.sync();
  team.each((long)a.schedule.splits.size(), 1, [&](long i) {
    const Split& split = a.schedule.splits[i];
    const Item& it = items[split.first_item];
    Part& all = a.parts[it.part];
    for (int k = 1; k < split.chunks; k++) fold(all, a.parts[it.part + k], it.rows, width);
    finish_tile(all, it, s, step, width, out);
  });
}

}  // namespace headrace
