// Linear layers over packed weights: the form activations take, the epilogues, and the sharing out of the work.
#pragma once
#include "microkernels.h"

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
template <class O>
static INLINE void put(O* out, long left, Vec v) {
  if (left >= LANES) store(out, v);
  else if (left > 0) store(out, v, first(left));
}
static INLINE void add(float* out, long left, Vec v) {
  const Lanes k = first(left);
  store(out, add(load(out, k), v), k);
}
// T: type of activations
template <class T, int MR>
static INLINE void finish(const Target<T>& t, long m, long tile, Vec (&acc)[PANELS][MR][2]) {
  constexpr int PIECES = 32 / LANES;
  auto piece = [&](int i, int c) -> Vec& { return acc[c / 2][i][c % 2]; };
  if (t.bias) {
#pragma GCC unroll 4
    for (int c = 0; c < PIECES; c++) {
      const Vec b = load(t.bias + tile * 32 + c * LANES);
      for (int i = 0; i < MR; i++) piece(i, c) = add(piece(i, c), b);
    }
  }
  const bool gated = t.epilogue == SILU_MUL || t.epilogue == GELU_MUL;
  const long c = tile * (gated ? 16 : 32), left = t.columns - c;
  for (int i = 0; i < MR; i++) {
    const long at = (m + i) * t.ld + c;
    if (gated) {
#pragma GCC unroll 2
      for (int c = 0; c < PIECES / 2; c++) {
        const Vec gate = t.epilogue == SILU_MUL ? silu(piece(i, c)) : gelu_tanh(piece(i, c));
        put((T*)t.out + at + c * LANES, left - c * LANES, mul(gate, piece(i, c + PIECES / 2)));
      }
      continue;
    }
#pragma GCC unroll 4
    for (int c = 0; c < PIECES; c++) {
      const long to = at + c * LANES, rest = left - c * LANES;
      if (t.epilogue == STORE) put((T*)t.out + to, rest, piece(i, c));
      else if (t.epilogue == STORE_F32) put((float*)t.out + to, rest, piece(i, c));
      else add((float*)t.out + to, rest, piece(i, c));
    }
  }
}

// ---------------------------------------------------------------- input
struct Input {
  const void* x;           // [M][k]: fp32 where norm is given (the residual stream), else activations
  const float* norm;       // weight [k] of the RMSNorm in front, or null
  float eps;
};
struct Scratch {  // of the calling thread, shared by its team
  Buffer<float> dense, scale;
  Buffer<int8_t> q;
  Buffer<Beside> beside;
};
template <class T>
struct Prepared {  // what the micro-kernels read
  const T* dense = nullptr;
  long ld = 0;
  int8_t* q = nullptr;
  float* scale = nullptr;
  Beside* beside = nullptr;
};
template <class T>
static bool is_ready(const Input& in, const Linear& w) {
  return w.kind == (std::is_same_v<T, float> ? F32 : BF16) && !in.norm && w.k == w.padded_k;
}
// Where the prepared rows will be; `copies` of them when each thread makes its own
template <class T>
static Prepared<T> place(Scratch& s, const Input& in, const Linear& w, long M, int copies) {
  const long n = M * w.padded_k * copies;
  Prepared<T> p;
  p.ld = w.padded_k;
  if (is_ready<T>(in, w)) p.dense = (const T*)in.x;
  else if (w.kind == F32 || w.kind == BF16) p.dense = (const T*)s.dense.at_least(n * sizeof(T) / sizeof(float) + 16);
  else p.q = s.q.at_least(n), p.scale = s.scale.at_least(n / 32), p.beside = s.beside.at_least(n / 32);
  return p;
}
template <class T>
static INLINE Prepared<T> rows_from(const Prepared<T>& p, long row, long padded_k) {
  Prepared<T> r = p;
  if (p.dense) r.dense += row * padded_k;
  else r.q += row * padded_k, r.scale += row * padded_k / 32, r.beside += row * padded_k / 32;
  return r;
}
static INLINE void quantize_group(const Vec (&v)[32 / LANES], int64_t kind, int8_t* q, float* scale, Beside* beside) {
  Vec largest = abs(v[0]);
#pragma GCC unroll 4
  for (int i = 1; i < 32 / LANES; i++) largest = max(largest, abs(v[i]));
  const float top = reduce_max(largest);
  const Vec r = broadcast(top > 0 ? 127.f / top : 0.f);
  IntVec sums = broadcast_int(0);
#pragma GCC unroll 4
  for (int i = 0; i < 32 / LANES; i++) {
    const IntVec x = rounded(mul(v[i], r));
    store_bytes(q + i * LANES, x);
    sums = add(sums, x);
  }
  *scale = top / 127.f;
  const int sum = reduce_add(sums);
  if (kind == Q4) beside->sum = *scale * (float)sum;
  else beside->start = (kind == Q8 ? -OFFSET_8 : -8) * sum;
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
template <class T, class In>
static void prepare_row(const In* x, const float* norm, float eps, const Linear& w, const Prepared<T>& p, long row) {
  const long k = w.k;
  const Vec r = broadcast(norm ? inverse_rms(x, k, eps) : 1.f);
  auto at = [&](long i) {
    const Lanes mask = first(k - i);
    const Vec v = load(x + i, mask);
    return norm ? mul(mul(v, r), load(norm + i, mask)) : v;
  };
  if (p.dense) {
    T* to = (T*)p.dense + row * w.padded_k;
    for (long i = 0; i < w.padded_k; i += LANES) store(to + i, at(i));
    return;
  }
  const long G = w.padded_k / 32;
  for (long g = 0; g < G; g++) {
    Vec v[32 / LANES];
#pragma GCC unroll 4
    for (int i = 0; i < 32 / LANES; i++) v[i] = at(g * 32 + i * LANES);
    quantize_group(v, w.kind, p.q + row * w.padded_k + g * 32, p.scale + row * G + g, p.beside + row * G + g);
  }
}
template <class T>
static void prepare_row(const Input& in, const Linear& w, const Prepared<T>& p, long from, long row) {
  if (in.norm) prepare_row<T>((const float*)in.x + from * w.k, in.norm, in.eps, w, p, row);
  else prepare_row<T>((const T*)in.x + from * w.k, nullptr, 0.f, w, p, row);
}

// ---------------------------------------------------------------- tiles of 32 columns
struct Place {  // rows m0 .. m0 + M - 1 of one tile; the tile that this thread works on next
  long m0, M, tile, next;
};
// The next tile's share of one of the runs over this one. One row alone needs none: it reads memory as fast as it comes.
static INLINE Ahead<2> share_of(const void* next, long bytes, const Place& at, const void* cached, long run, long runs) {
  const long shares = std::min(runs, 4L);
  if (at.M == 1 || run >= shares) return {(const char*)cached, 0};
  return {(const char*)next + bytes / shares * run, 64 / shares};
}
template <class T>
static void dense_tile(const Prepared<T>& x, const Linear& w, const Place& at, const Target<T>& t) {
  const long size = 32 * w.padded_k;
  const T *B = (const T*)w.values + at.tile * size, *next = (const T*)w.values + at.next * size;
  over_rows<DENSE_ROWS<T>>(at.M, [&](auto rows, long m, long run, long runs) {
    constexpr int MR = decltype(rows)::value;
    const T* A = x.dense + (at.m0 + m) * x.ld;
    Vec acc[PANELS][MR][2] = {};
    multiply_tile<MR>(A, x.ld, B, share_of(next, size * sizeof(T), at, A, run, runs), w.padded_k, acc);
    finish<T, MR>(t, at.m0 + m, at.tile, acc);
  });
}
template <class T, Format F>
static void quantized_tile(const Prepared<T>& x, const Linear& w, const Place& at, const Target<T>& t) {
  const long K = w.padded_k, G = K / 32, size = G * group_bytes(F);
  const uint8_t *B = (const uint8_t*)w.values + at.tile * size, *next = (const uint8_t*)w.values + at.next * size;
  over_rows<QUANTIZED_ROWS>(at.M, [&](auto rows, long m, long run, long runs) {
    constexpr int MR = decltype(rows)::value;
    const long r = at.m0 + m;
    const Quantized A{x.q + r * K, x.scale + r * G, x.beside + r * G};
    Vec acc[PANELS][MR][2] = {};
    multiply<F, MR>(A, B, share_of(next, size, at, A.q, run, runs), K, acc);
    finish<T, MR>(t, r, at.tile, acc);
  });
}
template <class T>
static void one_tile(const Prepared<T>& x, const Linear& w, const Place& at, const Target<T>& t) {
  switch (w.kind) {
    case Q8: return quantized_tile<T, INT8>(x, w, at, t);
    case Q4: return quantized_tile<T, INT4>(x, w, at, t);
    case Q4_SYM: return quantized_tile<T, INT4_SYM>(x, w, at, t);
    default: return dense_tile(x, w, at, t);
  }
}

// ---------------------------------------------------------------- the whole layer
// Up to this many rows each thread prepares all of them for itself: that is quicker than waiting for the others.
static const long OWN_COPY_TO = 2;
// Rows whose prepared form takes about this much are worked on together, so that they stay in the L2 cache.
static const long SLAB_BYTES = 384 * 1024;
// Each thread has a slab of its own, if there are this many rows for it: it reads and writes rows that no other does.
static const long OWN_SLAB_FROM = 16;

template <class T>
struct Job {
  Input in;
  long M;
  const Linear* w;
  Target<T> target;
  Prepared<T> rows;
  bool ready, own_copies;
};
template <class T>
static Job<T> make_job(Scratch& s, int threads, const Input& in, long M, const Linear& w, void* out, long epilogue) {
  const bool gated = epilogue == SILU_MUL || epilogue == GELU_MUL;
  const long columns = gated ? w.n / 2 : w.n;
  Job<T> j{in, M, &w, {out, columns, columns, epilogue, w.bias}, {}, is_ready<T>(in, w), M <= OWN_COPY_TO};
  j.rows = place<T>(s, in, w, M, j.own_copies ? threads : 1);
  return j;
}
// To be followed by a sync, if anything reads the result or reuses the scratch.
template <class T>
static void run(Team& team, const Job<T>& j) {
  const Linear& w = *j.w;
  Prepared<T> rows = j.rows;
  if (j.own_copies && !j.ready) {
    rows = rows_from(rows, team.id * j.M, w.padded_k);
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
  team.each_ahead(items, [&](long i, long then) {
    const long slab = i / tiles, m0 = j.M * slab / slabs, m1 = j.M * (slab + 1) / slabs;
    const long tile = i % tiles, next = then < items ? then % tiles : tile;
    one_tile(rows, w, Place{m0, m1 - m0, tile, next}, j.target);
  });
}

}  // namespace headrace
