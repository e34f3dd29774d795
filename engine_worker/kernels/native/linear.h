// Linear layers over packed weights: the form activations take, the epilogues, and the sharing out of the work.
#pragma once
#include "microkernels.h"
#include "team.h"

namespace headrace {

enum Kind : int64_t { F32 = 0, BF16 = 1, Q8 = 2, Q4 = 3, Q4_SYM = 4 };

// One packed layer, filled in by packing.py (same fields, same order).
//   F32 [N/32][K][32]   BF16 [N/32][K/2][32][2]   Q8, Q4, Q4_SYM [N/32][K/32][group] as in microkernels.h
struct Linear {
  int64_t kind;
  int64_t n, k;              // as in the model
  int64_t padded_n, padded_k;  // multiples of 32
  const void* values;
  const float* bias;  // [padded_n] or null
};

enum Epilogue : int64_t {
  STORE = 0,       // out = y, in the activations' type
  STORE_F32 = 1,   // out = y in fp32
  ADD = 2,         // out (fp32) += y
  SILU_MUL = 3,    // columns come as 16 gate | 16 up: out = silu(gate) * up
  GELU_MUL = 4,    // gelu_tanh(gate) * up
};

template <class T>
struct Target {
  void* out;
  long ld, columns;  // stride of a row and valid columns
  long epilogue;
  const float* bias;
};
// A loop and not inlined: a gate takes its time, and unrolled it would crowd the products out of the instruction cache.
template <class T, int MR, class Gate>
static __attribute__((noinline)) void finish_gated(const Target<T>& t, long m, long tile, const Vec (&acc)[PANELS][MR][2],
                                                   Gate gate) {
  constexpr int PIECES = 16 / LANES;
  const long left = t.columns - tile * 16;
  for (int i = 0; i < MR; i++) {
    T* to = (T*)t.out + (m + i) * t.ld + tile * 16;
    for (int c = 0; c < PIECES; c++) {
      const int u = c + PIECES;
      const Vec v = mul(gate(acc[c / 2][i][c % 2]), acc[u / 2][i][u % 2]);
      if (left > c * LANES) store(to + c * LANES, v, first(left - c * LANES));
    }
  }
}
// Writes MR rows of a tile, from row m on. T: type of activations
template <class T, int MR>
static INLINE void finish(const Target<T>& t, long m, long tile, Vec (&acc)[PANELS][MR][2]) {
  constexpr int PIECES = 32 / LANES;
  auto piece = [&](int i, int c) -> Vec& { return acc[c / 2][i][c % 2]; };
  if (t.bias) {
#pragma GCC unroll 4
    for (int c = 0; c < PIECES; c++) {
      const Vec b = load(t.bias + tile * 32 + c * LANES);
#pragma GCC unroll 16
      for (int i = 0; i < MR; i++) piece(i, c) = add(piece(i, c), b);
    }
  }
  // write(where in the result, sums, and a mask where the tile is not whole)
  auto each = [&](auto write) {
    const long left = t.columns - tile * 32;
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      const long at = (m + i) * t.ld + tile * 32;
#pragma GCC unroll 4
      for (int c = 0; c < PIECES; c++) {
        if (left >= 32) write(at + c * LANES, piece(i, c));
        else if (left > c * LANES) write(at + c * LANES, piece(i, c), first(left - c * LANES));
      }
    }
  };
  switch (t.epilogue) {
    case STORE: return each([&](long at, Vec v, auto... k) { store((T*)t.out + at, v, k...); });
    case STORE_F32: return each([&](long at, Vec v, auto... k) { store((float*)t.out + at, v, k...); });
    case ADD: return each([&](long at, Vec v, auto... k) {
      float* to = (float*)t.out + at;
      store(to, add(load(to, k...), v), k...);
    });
    case SILU_MUL: return finish_gated<T, MR>(t, m, tile, acc, [](Vec x) { return silu(x); });
    default: return finish_gated<T, MR>(t, m, tile, acc, [](Vec x) { return gelu_tanh(x); });
  }
}

// ---------------------------------------------------------------- input
struct Input {
  const void* x;           // [M][k]: fp32 where norm is given (the residual stream), else activations
  const float* norm;       // weight [k] of the RMSNorm in front, or null
  float eps;
};
struct Scratch {  // of the calling thread, shared by its team
  Buffer<float> dense;
  Buffer<Group> groups;
  long copy = 0;  // values of a thread's own copy, the same in all jobs: a late thread shall write into its own
};
template <class T>
struct Prepared {  // what the micro-kernels read
  const T* dense = nullptr;
  long ld = 0;
  Group* groups = nullptr;
};
template <class T>
static bool is_ready(const Input& in, const Linear& w) {
  return w.kind == (std::is_same_v<T, float> ? F32 : BF16) && !in.norm && w.k == w.padded_k;
}
// Where the prepared rows will be; `copies` of them, `s.copy` values apart, when each thread makes its own
template <class T>
static Prepared<T> place(Scratch& s, const Input& in, const Linear& w, long M, int copies) {
  if (copies > 1 && M * w.padded_k > s.copy) s.copy = M * w.padded_k;
  const long n = copies > 1 ? s.copy * copies : M * w.padded_k;
  Prepared<T> p;
  p.ld = w.padded_k;
  if (is_ready<T>(in, w)) p.dense = (const T*)in.x;
  else if (w.kind == F32 || w.kind == BF16) p.dense = (const T*)s.dense.at_least(n * sizeof(T) / sizeof(float) + 16);
  else p.groups = s.groups.at_least(n / 32);
  return p;
}
template <class T>
static INLINE Prepared<T> from_value(const Prepared<T>& p, long value) {
  Prepared<T> r = p;
  if (p.dense) r.dense += value;
  else r.groups += value / 32;
  return r;
}
// Up to four groups at once: what is one number for a group costs no more for four. at(i) reads the values from i on.
template <class At>
static INLINE void quantize(At at, int64_t kind, Group* to, long groups) {
  constexpr int PIECES = 32 / LANES;
  Vec v[4][PIECES], largest[4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
#pragma GCC unroll 4
    for (int i = 0; i < PIECES; i++) {
      v[g][i] = at(g * 32 + i * LANES);
      largest[g] = i ? max(largest[g], abs(v[g][i])) : abs(v[g][i]);
    }
  }
  const __m128 top = max_of_each(largest), steps = _mm_set1_ps(127.f), scales = _mm_div_ps(top, steps);
  alignas(16) float scale[4], inverse[4], sum[4];
  _mm_store_ps(scale, scales);
  _mm_store_ps(inverse, _mm_and_ps(_mm_div_ps(steps, top), _mm_cmpgt_ps(top, _mm_setzero_ps())));
  IntVec x[4];  // sums of the quantised values
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
    const Vec r = broadcast(inverse[g]);
    x[g] = broadcast_int(0);
#pragma GCC unroll 4
    for (int i = 0; i < PIECES; i++) {
      const IntVec q = rounded(mul(v[g][i], r));
      if (g < groups) store_bytes(to[g].q + i * LANES, q);
      x[g] = add(x[g], q);
    }
  }
  const __m128i sums = sum_of_each(x);
  alignas(16) int start[4];
  _mm_store_ps(sum, _mm_mul_ps(scales, _mm_cvtepi32_ps(sums)));
  _mm_store_si128((__m128i*)start, _mm_mullo_epi32(sums, _mm_set1_epi32(kind == Q8 ? -OFFSET_8 : -8)));
#pragma GCC unroll 4
  for (int g = 0; g < 4 && g < groups; g++) {
    to[g].scale = scale[g];
    if (kind == Q4) to[g].sum = sum[g];
    else to[g].start = start[g];
  }
}
template <class In>
static INLINE float inverse_rms(const In* x, long k, float eps) {
  Vec ss = zero();
  for (long i = 0; i < k; i += LANES) {
    const Vec v = load(x + i, first(k - i));
    ss = fma(v, v, ss);
  }
  return 1.f / std::sqrt(reduce_add(ss) / (float)k + eps);
}
// One row: norm, then rounded or quantised; zeros up to padded_k
template <bool Normed, class T, class In>
static void prepare_row(const In* x, const float* norm, float eps, const Linear& w, const Prepared<T>& p, long row) {
  const long k = w.k;
  const Vec r = broadcast(Normed ? inverse_rms(x, k, eps) : 1.f);
  auto read = [&](long i, auto... mask) {
    const Vec v = load(x + i, mask...);
    return Normed ? mul(mul(v, r), load(norm + i, mask...)) : v;
  };
  if (p.dense) {
    T* to = (T*)p.dense + row * w.padded_k;
    for (long i = 0; i < w.padded_k; i += LANES) store(to + i, read(i, first(k - i)));
    return;
  }
  const long G = w.padded_k / 32;
  Group* to = p.groups + row * G;
  for (long g = 0; g < G; g += 4) {
    const long from = g * 32;
    if (from + 128 <= k) quantize([&](long i) { return read(from + i); }, w.kind, to + g, 4);
    else quantize([&](long i) { return read(from + i, first(k - from - i)); }, w.kind, to + g, G - g);
  }
}
template <class T>
static void prepare_row(const Input& in, const Linear& w, const Prepared<T>& p, long from, long row) {
  if (in.norm) prepare_row<true, T>((const float*)in.x + from * w.k, in.norm, in.eps, w, p, row);
  else prepare_row<false, T>((const T*)in.x + from * w.k, nullptr, 0.f, w, p, row);
}

// ---------------------------------------------------------------- tiles of 32 columns
struct Place {  // rows m0 .. m0 + M - 1 of one tile; the tile that this thread works on next
  long m0, M, tile, next;
};
// Computes and stores the rows of a tile, run by run: multiply(acc, row, run, runs), for as long as the hold lasts
template <int MAX, class T, class F>
static INLINE void runs_of_tile(const Place& at, const Target<T>& t, Hold& hold, F multiply) {
  over_rows<MAX>(at.M, [&](auto rows, long m, long run, long runs) {
    constexpr int MR = decltype(rows)::value;
    if (run < hold.first_run || hold.is_lost) return;
    Vec acc[PANELS][MR][2];
    multiply(acc, rows, m, run, runs);
    if (!hold.store()) return;
    finish<T, MR>(t, at.m0 + m, at.tile, acc);
    if (run + 1 < runs) hold.stored();
  });
}
// The next tile's share of one of the runs over this one. One row alone needs none: it reads memory as fast as it comes.
static INLINE Ahead<2> share_of(const void* next, long bytes, const Place& at, const void* cached, long run, long runs) {
  const long shares = std::min(runs, 4L);
  if (at.M == 1 || run >= shares) return {(const char*)cached, 0};
  return {(const char*)next + bytes / shares * run, 64 / shares};
}
template <class T>
static void dense_tile(const Prepared<T>& x, const Linear& w, const Place& at, const Target<T>& t, Hold& hold) {
  const long size = 32 * w.padded_k;
  const T *B = (const T*)w.values + at.tile * size, *next = (const T*)w.values + at.next * size;
  runs_of_tile<DENSE_ROWS<T>>(at, t, hold, [&](auto& acc, auto rows, long m, long run, long runs) {
    const T* A = x.dense + (at.m0 + m) * x.ld;
    for (auto& panel : acc)
      for (auto& row : panel) row[0] = row[1] = zero();
    multiply_tile<decltype(rows)::value>(A, x.ld, B, share_of(next, size * sizeof(T), at, A, run, runs), w.padded_k, acc);
  });
}
template <class T, Format F>
static void quantized_tile(const Prepared<T>& x, const Linear& w, const Place& at, const Target<T>& t, Hold& hold) {
  const long G = w.padded_k / 32, size = G * group_bytes(F);
  const uint8_t *B = (const uint8_t*)w.values + at.tile * size, *next = (const uint8_t*)w.values + at.next * size;
  runs_of_tile<QUANTIZED_ROWS>(at, t, hold, [&](auto& acc, auto rows, long m, long run, long runs) {
    const Group* A = x.groups + (at.m0 + m) * G;
    multiply<F, decltype(rows)::value>(A, B, share_of(next, size, at, A, run, runs), G, acc);
  });
}
template <class T>
static void one_tile(const Prepared<T>& x, const Linear& w, const Place& at, const Target<T>& t, Hold& hold) {
  switch (w.kind) {
    case Q8: return quantized_tile<T, INT8>(x, w, at, t, hold);
    case Q4: return quantized_tile<T, INT4>(x, w, at, t, hold);
    case Q4_SYM: return quantized_tile<T, INT4_SYM>(x, w, at, t, hold);
    default: return dense_tile(x, w, at, t, hold);
  }
}

// ---------------------------------------------------------------- the whole layer
// Up to this many rows each thread prepares all of them for itself: that is quicker than waiting for the others.
static const long OWN_COPY_TO = 2;
// Rows whose prepared form takes about this much are worked on together, so that they stay in the L2 cache.
static const long SLAB_BYTES = 384 * 1024;
// Each thread has a slab of its own, if there are this many rows for it: it reads and writes rows that no other does.
// With fewer, threads share out the tiles of all rows, since each of them would have to read all weights.
static const long OWN_SLAB_FROM = 128;

template <class T>
struct Job {
  Input in;
  long M;
  const Linear* w;
  Target<T> target;
  Prepared<T> rows;
  long copy;  // values from one thread's copy of the rows to the next one's
  bool ready, own_copies;
};
template <class T>
static Job<T> make_job(Scratch& s, int threads, const Input& in, long M, const Linear& w, void* out, long epilogue) {
  const bool gated = epilogue == SILU_MUL || epilogue == GELU_MUL;
  const long columns = gated ? w.n / 2 : w.n;
  Job<T> j{in, M, &w, {out, columns, columns, epilogue, w.bias}, {}, 0, is_ready<T>(in, w), M <= OWN_COPY_TO};
  j.rows = place<T>(s, in, w, M, j.own_copies ? threads : 1);
  j.copy = s.copy;
  return j;
}
// To be followed by a sync, if anything reads the result or reuses the scratch.
template <class T>
static void run(Team& team, const Job<T>& j) {
  const Linear& w = *j.w;
  Prepared<T> rows = j.rows;
  if (j.own_copies && !j.ready) {
    if (team.is_late()) return;
    rows = from_value(rows, team.id * j.copy);
    for (long m = 0; m < j.M; m++) prepare_row(j.in, w, rows, m, m);
  } else if (!j.ready) {
    team.each(j.M, 4, [&](long m) { prepare_row(j.in, w, rows, m, m); });
    team.sync();
  }
  const long row_bytes = w.padded_k * (rows.dense ? (long)sizeof(T) : 1);
  const long most = std::max<long>(48, SLAB_BYTES / row_bytes), own = std::min<long>(team.size, j.M / OWN_SLAB_FROM);
  const long slabs = std::max(own, (j.M + most - 1) / most);
  const long tiles = w.padded_n / 32;
  const long items = slabs * tiles;
  const long rows_of_run = std::min<long>(j.M, DENSE_ROWS<T>);
  team.each_ahead(items, Patience::of_products(2. * rows_of_run * 32 * w.padded_k), [&](long i, long then, Hold& hold) {
    const long slab = i / tiles, m0 = j.M * slab / slabs, m1 = j.M * (slab + 1) / slabs;
    const long tile = i % tiles, next = then < items ? then % tiles : tile;
    one_tile(rows, w, Place{m0, m1 - m0, tile, next}, j.target, hold);
  });
}

}  // namespace headrace
