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
static INLINE void put(O* out, long left, __m512 v) {
  if (left >= 16) store(out, v);
  else if (left > 0) store(out, v, first(left));
}
static INLINE void add(float* out, long left, __m512 v) {
  const __mmask16 k = first(left);
  store(out, _mm512_add_ps(load(out, k), v), k);
}
// T: type of activations
template <class T, int MR>
static INLINE void finish(const Target<T>& t, long m, long tile, __m512 (&acc)[MR][2]) {
  if (t.bias) {
    const __m512 b0 = load(t.bias + tile * 32), b1 = load(t.bias + tile * 32 + 16);
    for (int i = 0; i < MR; i++) acc[i][0] = _mm512_add_ps(acc[i][0], b0), acc[i][1] = _mm512_add_ps(acc[i][1], b1);
  }
  const bool gated = t.epilogue == SILU_MUL || t.epilogue == GELU_MUL;
  const long c = tile * (gated ? 16 : 32), left = t.columns - c;
  for (int i = 0; i < MR; i++) {
    const long at = (m + i) * t.ld + c;
    if (t.epilogue == STORE) {
      put((T*)t.out + at, left, acc[i][0]), put((T*)t.out + at + 16, left - 16, acc[i][1]);
    } else if (t.epilogue == STORE_F32) {
      put((float*)t.out + at, left, acc[i][0]), put((float*)t.out + at + 16, left - 16, acc[i][1]);
    } else if (t.epilogue == ADD) {
      add((float*)t.out + at, left, acc[i][0]), add((float*)t.out + at + 16, left - 16, acc[i][1]);
    } else {
      const __m512 gate = t.epilogue == SILU_MUL ? silu(acc[i][0]) : gelu_tanh(acc[i][0]);
      put((T*)t.out + at, left, _mm512_mul_ps(gate, acc[i][1]));
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
static INLINE void quantize_group(__m512 v0, __m512 v1, int64_t kind, int8_t* q, float* scale, Beside* beside) {
  const float top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(v0), _mm512_abs_ps(v1)));
  const __m512 r = _mm512_set1_ps(top > 0 ? 127.f / top : 0.f);
  const __m512i i0 = _mm512_cvtps_epi32(_mm512_mul_ps(v0, r)), i1 = _mm512_cvtps_epi32(_mm512_mul_ps(v1, r));
  _mm_storeu_si128((__m128i*)q, _mm512_cvtepi32_epi8(i0));
  _mm_storeu_si128((__m128i*)(q + 16), _mm512_cvtepi32_epi8(i1));
  *scale = top / 127.f;
  const int sum = _mm512_reduce_add_epi32(_mm512_add_epi32(i0, i1));
  if (kind == Q4) beside->sum = *scale * (float)sum;
  else beside->start = (kind == Q8 ? -128 : -8) * sum;
}
template <class In>
static INLINE float inverse_rms(const In* x, long k, float eps) {
  __m512 ss = _mm512_setzero_ps();
  for (long i = 0; i < k; i += 16) {
    const __m512 v = load(x + i, first(k - i));
    ss = _mm512_fmadd_ps(v, v, ss);
  }
  return 1.f / std::sqrt(_mm512_reduce_add_ps(ss) / (float)k + eps);
}
// One row: norm, then rounded or quantised; zeros up to padded_k
template <class T, class In>
static void prepare_row(const In* x, const float* norm, float eps, const Linear& w, const Prepared<T>& p, long row) {
  const long k = w.k;
  const __m512 r = _mm512_set1_ps(norm ? inverse_rms(x, k, eps) : 1.f);
  auto at = [&](long i) {
    const __mmask16 mask = first(k - i);
    const __m512 v = load(x + i, mask);
    return norm ? _mm512_mul_ps(_mm512_mul_ps(v, r), load(norm + i, mask)) : v;
  };
  if (p.dense) {
    T* to = (T*)p.dense + row * w.padded_k;
    for (long i = 0; i < w.padded_k; i += 16) store(to + i, at(i));
    return;
  }
  const long G = w.padded_k / 32;
  for (long g = 0; g < G; g++)
    quantize_group(at(g * 32), at(g * 32 + 16), w.kind, p.q + row * w.padded_k + g * 32, p.scale + row * G + g, p.beside + row * G + g);
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
  over_rows<12>(at.M, [&](auto rows, long m, long run, long runs) {
    constexpr int MR = decltype(rows)::value;
    const T* A = x.dense + (at.m0 + m) * x.ld;
    __m512 acc[1][MR][2] = {};
    const Tiles<T, 1, 2> tile{{B}, {share_of(next, size * sizeof(T), at, A, run, runs)}};
    multiply<MR>(A, x.ld, tile, w.padded_k, acc);
    finish<T, MR>(t, at.m0 + m, at.tile, acc[0]);
  });
}
template <class T, Format F>
static void quantized_tile(const Prepared<T>& x, const Linear& w, const Place& at, const Target<T>& t) {
  const long K = w.padded_k, G = K / 32, size = G * group_bytes(F);
  const uint8_t *B = (const uint8_t*)w.values + at.tile * size, *next = (const uint8_t*)w.values + at.next * size;
  over_rows<6>(at.M, [&](auto rows, long m, long run, long runs) {
    constexpr int MR = decltype(rows)::value;
    const long r = at.m0 + m;
    const Quantized A{x.q + r * K, x.scale + r * G, x.beside + r * G};
    __m512 acc[MR][2] = {};
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
