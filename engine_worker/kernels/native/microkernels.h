// The inner loops: acc[m][0..1] += A[m, :] * B[:, 32 columns] for MR rows at once. One sum per row and column, in the
// order of k, so that a row's result does not depend on how many rows run beside it.
//
// Beside it `ahead` is prefetched, one prefetch for each 64 bytes of B: a core that computes 8 rows or more would else
// leave memory idle.
#pragma once
#include "simd.h"

namespace headrace {

// Row pointers, one per three rows: p, p + s, p + 2 s need no register each.
template <class T, int MR>
struct Rows {
  const T* p[(MR + 2) / 3];
  const long s;
  INLINE Rows(const T* a, long lda) : s(lda) {
    for (int i = 0; i < (MR + 2) / 3; i++) p[i] = a + 3 * i * lda;
  }
  INLINE const T* operator[](int m) const { return p[m / 3] + (m % 3) * s; }
  INLINE void advance(long n) {
#pragma GCC unroll 4
    for (int i = 0; i < (MR + 2) / 3; i++) p[i] += n;
  }
};

// W tiles at once: with few rows, more sums that need not wait for each other. A prefetch stream goes with each tile.
template <class T, int W, int Level>
struct Tiles {
  const T* p[W];
  Ahead<Level> ahead[W];
};
// B is [K][32] fp32
template <int MR, int W, int L>
static INLINE void multiply(const float* A, long lda, Tiles<float, W, L> b, long K, __m512 (&acc)[W][MR][2]) {
  Rows<float, MR> a(A, lda);
  for (long k = 0; k < K; k++) {
    for (int w = 0; w < W; w++) {
      const __m512 b0 = _mm512_loadu_ps(b.p[w] + k * 32), b1 = _mm512_loadu_ps(b.p[w] + k * 32 + 16);
      b.ahead[w].template prefetch<2>();
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        const __m512 x = _mm512_set1_ps(*a[m]);
        acc[w][m][0] = _mm512_fmadd_ps(x, b0, acc[w][m][0]);
        acc[w][m][1] = _mm512_fmadd_ps(x, b1, acc[w][m][1]);
      }
    }
    a.advance(1);
  }
}
// B is [K/2][32][2] bf16
template <int MR, int W, int L>
static INLINE void multiply(const bf16* A, long lda, Tiles<bf16, W, L> b, long K, __m512 (&acc)[W][MR][2]) {
  Rows<bf16, MR> a(A, lda);
  for (long k = 0; k < K; k += 2) {
    for (int w = 0; w < W; w++) {
      const __m512bh b0 = (__m512bh)_mm512_loadu_si512(b.p[w] + k * 32), b1 = (__m512bh)_mm512_loadu_si512(b.p[w] + k * 32 + 32);
      b.ahead[w].template prefetch<2>();
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        int pair;
        memcpy(&pair, a[m], 4);
        const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
        acc[w][m][0] = _mm512_dpbf16_ps(acc[w][m][0], x, b0);
        acc[w][m][1] = _mm512_dpbf16_ps(acc[w][m][1], x, b1);
      }
    }
    a.advance(2);
  }
}

// Activations quantised in groups of 32 along K; per group what it adds beside its integer products:
union Beside {
  int32_t start;  // formats without a minimum: -offset * sum(q), which undoes the offset of the stored weights
  float sum;      // formats with one: scale * sum(q), to be multiplied by it
};
struct Quantized {
  const int8_t* q;       // [rows][K]
  const float* scale;    // [rows][K/32]
  const Beside* beside;  // [rows][K/32]
};
// Weights of a tile of 32 columns, in groups of 32 along K: one stream, since memory is read best so. A group is its
// values, then the scales fp16 [32] and, in INT4, the minima fp16 [32]. Stored values are unsigned.
//   INT8      [8][32][4]  value + 128           w = scale * value
//   INT4      [4][32][4]  k | k + 16 << 4       w = scale * value + min
//   INT4_SYM  likewise, value + 8               w = scale * value
enum Format { INT8, INT4, INT4_SYM };
static constexpr bool has_min(Format f) { return f == INT4; }
static constexpr long value_bytes(Format f) { return f == INT8 ? 1024 : 512; }
static constexpr long group_bytes(Format f) { return value_bytes(f) + (has_min(f) ? 128 : 64); }

static INLINE __m512 half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static INLINE __m512i quad(const int8_t* p) {
  int v;
  memcpy(&v, p, 4);
  return _mm512_set1_epi32(v);
}

template <Format F, int MR>
static INLINE void multiply(const Quantized& A, const uint8_t* B, Ahead<2> ahead, long K, __m512 (&acc)[MR][2]) {
  const __m512i mask = _mm512_set1_epi8(15);
  const long G = K / 32;
  Rows<int8_t, MR> a(A.q, K);
  for (long g = 0; g < G; g++) {
    ahead.prefetch<group_bytes(F) / 64>();
    __m512i ia[MR][2];  // integer sums of the group: exact
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
      ia[m][0] = ia[m][1] = has_min(F) ? _mm512_setzero_si512() : _mm512_set1_epi32(A.beside[m * G + g].start);
    if constexpr (F != INT8) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const __m512i r0 = _mm512_loadu_si512(B + j * 128), r1 = _mm512_loadu_si512(B + j * 128 + 64);
        const __m512i l0 = _mm512_and_si512(r0, mask), l1 = _mm512_and_si512(r1, mask);
        const __m512i h0 = _mm512_and_si512(_mm512_srli_epi16(r0, 4), mask);
        const __m512i h1 = _mm512_and_si512(_mm512_srli_epi16(r1, 4), mask);
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
          const __m512i al = quad(a[m] + j * 4), ah = quad(a[m] + j * 4 + 16);
          ia[m][0] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(ia[m][0], l0, al), h0, ah);
          ia[m][1] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(ia[m][1], l1, al), h1, ah);
        }
      }
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        const __m512i b0 = _mm512_loadu_si512(B + j * 128), b1 = _mm512_loadu_si512(B + j * 128 + 64);
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
          const __m512i x = quad(a[m] + j * 4);
          ia[m][0] = _mm512_dpbusd_epi32(ia[m][0], b0, x);
          ia[m][1] = _mm512_dpbusd_epi32(ia[m][1], b1, x);
        }
      }
    }
    const __m512 d0 = half(B + value_bytes(F)), d1 = half(B + value_bytes(F) + 32);
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) {
      const __m512 s = _mm512_set1_ps(A.scale[m * G + g]);
      acc[m][0] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(ia[m][0]), s), d0, acc[m][0]);
      acc[m][1] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(ia[m][1]), s), d1, acc[m][1]);
    }
    if constexpr (has_min(F)) {
      const __m512 n0 = half(B + value_bytes(F) + 64), n1 = half(B + value_bytes(F) + 96);
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        const __m512 x = _mm512_set1_ps(A.beside[m * G + g].sum);
        acc[m][0] = _mm512_fmadd_ps(x, n0, acc[m][0]);
        acc[m][1] = _mm512_fmadd_ps(x, n1, acc[m][1]);
      }
    }
    a.advance(32);
    B += group_bytes(F);
  }
}
// Calls f<MR>(m, run, runs) over M rows in about equal runs of at most MAX rows.
template <int MAX, class F>
static INLINE void over_rows(long M, F f) {
  const long runs = (M + MAX - 1) / MAX;
  for (long i = 0; i < runs; i++) {
    const long m = M * i / runs, n = M * (i + 1) / runs - m;
    switch (n) {
#define HEADRACE_RUN(r) case r: if constexpr (r <= MAX) f(std::integral_constant<int, r>{}, m, i, runs); break;
      HEADRACE_RUN(1) HEADRACE_RUN(2) HEADRACE_RUN(3) HEADRACE_RUN(4) HEADRACE_RUN(5) HEADRACE_RUN(6)
      HEADRACE_RUN(7) HEADRACE_RUN(8) HEADRACE_RUN(9) HEADRACE_RUN(10) HEADRACE_RUN(11) HEADRACE_RUN(12)
#undef HEADRACE_RUN
    }
  }
}

}  // namespace headrace
