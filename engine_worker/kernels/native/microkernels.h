// The inner loops: acc[m][0..1] += A[m, :] * B[:, UNIT columns] for MR rows at once. One sum per row and column, in the
// order of k, so that a row's result does not depend on how many rows run beside it.
//
// Beside it `ahead` is prefetched, one prefetch for each 64 bytes of B: a core that computes 8 rows or more would else
// leave memory idle.
#pragma once
#include "simd.h"

namespace headrace {

// B comes in tiles of 32 columns. A micro-kernel computes two vectors of them at a time: a whole tile or a panel of it.
static constexpr int UNIT = 2 * LANES, PANELS = 32 / UNIT;

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

// W units at once: with few rows, more sums that need not wait for each other. A prefetch stream goes with each.
template <class T, int W, int Level>
struct Tiles {
  const T* p[W];
  Ahead<Level> ahead[W];
};
// B is [K][32] fp32
template <int MR, int W, int L>
static INLINE void multiply(const float* A, long lda, Tiles<float, W, L> b, long K, Vec (&acc)[W][MR][2]) {
  Rows<float, MR> a(A, lda);
  for (long k = 0; k < K; k++) {
    for (int w = 0; w < W; w++) {
      const Vec b0 = load(b.p[w] + k * 32), b1 = load(b.p[w] + k * 32 + LANES);
      b.ahead[w].template prefetch<UNIT / 16>();
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        const Vec x = broadcast(*a[m]);
        acc[w][m][0] = fma(x, b0, acc[w][m][0]);
        acc[w][m][1] = fma(x, b1, acc[w][m][1]);
      }
    }
    a.advance(1);
  }
}
// B is [K/2][32][2] bf16
template <int MR, int W, int L>
static INLINE void multiply(const bf16* A, long lda, Tiles<bf16, W, L> b, long K, Vec (&acc)[W][MR][2]) {
  Rows<bf16, MR> a(A, lda);
  for (long k = 0; k < K; k += 2) {
    for (int w = 0; w < W; w++) {
      const Pairs b0 = load_pairs(b.p[w] + k * 32), b1 = load_pairs(b.p[w] + k * 32 + UNIT);
      b.ahead[w].template prefetch<UNIT / 16>();
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        const Pairs x = broadcast_pair(a[m]);
        acc[w][m][0] = dot(acc[w][m][0], x, b0);
        acc[w][m][1] = dot(acc[w][m][1], x, b1);
      }
    }
    a.advance(2);
  }
}

// A whole tile: its panels one after the other or, with few rows, at once
template <int MR, class T, int L>
static INLINE void multiply_tile(const T* A, long lda, const T* B, Ahead<L> ahead, long K, Vec (&acc)[PANELS][MR][2]) {
  constexpr int W = MR <= DENSE_ROWS<T> / 2 ? PANELS : 1, P = 4 / sizeof(T);
  const long prefetches = K * UNIT * sizeof(T) / 64;
  auto panels_from = [&](int panel, Vec(&sums)[W][MR][2]) {
    Tiles<T, W, L> units;
    for (int w = 0; w < W; w++) {
      units.p[w] = B + (panel + w) * UNIT * P;
      units.ahead[w] = ahead.after((panel + w) * prefetches);
    }
    multiply<MR>(A, lda, units, K, sums);
  };
  if constexpr (W == PANELS) {
    panels_from(0, acc);
  } else {
    for (int panel = 0; panel < PANELS; panel++) {
      Vec sums[1][MR][2] = {};  // of its own, or the compiler would store each sum in each round
      panels_from(panel, sums);
      for (int m = 0; m < MR; m++)
        for (int j = 0; j < 2; j++) acc[panel][m][j] = sums[0][m][j];
    }
  }
}

// Activations are quantised in groups of 32 along K; beside its values a group has what each of its sums needs.
struct Group {
  int8_t q[32];
  float scale;
  union {
    int32_t start;  // formats without a minimum: -offset * sum(q), which undoes the offset of the stored weights
    float sum;      // formats with one: scale * sum(q), to be multiplied by it
  };
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

// A is [MR][groups]; acc begins at 0
template <Format F, int MR>
static INLINE void multiply(const Group* A, const uint8_t* B, Ahead<2> ahead, long groups, Vec (&acc)[PANELS][MR][2]) {
  Rows<int8_t, MR> rows((const int8_t*)A, groups * sizeof(Group));
  auto group = [&](int m) -> const Group& { return *(const Group*)rows[m]; };
  auto scales = [&](long i) { return load_half(B + value_bytes(F) + i * 2); };
  // not "= {}" by the caller: a zeroed array begins in memory
#pragma GCC unroll 16
  for (int i = 0; i < PANELS * MR * 2; i++) acc[i / 2 / MR][i / 2 % MR][i % 2] = zero();
  for (long g = 0; g < groups; g++) {
    ahead.prefetch<group_bytes(F) / 64>();
#pragma GCC unroll 2
    for (int panel = 0; panel < PANELS; panel++) {
      const uint8_t* values = B + panel * UNIT * 4;
      IntVec ia[MR][2];  // integer sums of the group: exact
      auto start = [&](int m) { return has_min(F) ? 0 : group(m).start; };
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) ia[m][0] = ia[m][1] = F == INT8 ? broadcast_int(start(m)) : begin4(start(m));
      if constexpr (F != INT8) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          const IntVec r0 = load_ints(values + j * 128), r1 = load_ints(values + j * 128 + LANES * 4);
          const IntVec l0 = low_nibbles(r0), l1 = low_nibbles(r1);
          const IntVec h0 = high_nibbles(r0), h1 = high_nibbles(r1);
#pragma GCC unroll 16
          for (int m = 0; m < MR; m++) {
            const IntVec al = broadcast_quad(group(m).q + j * 4), ah = broadcast_quad(group(m).q + j * 4 + 16);
            ia[m][0] = dot4(dot4(ia[m][0], l0, al), h0, ah);
            ia[m][1] = dot4(dot4(ia[m][1], l1, al), h1, ah);
          }
        }
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) ia[m][0] = end4(ia[m][0], start(m)), ia[m][1] = end4(ia[m][1], start(m));
      } else {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
          const IntVec b0 = weights_8(values + j * 128), b1 = weights_8(values + j * 128 + LANES * 4);
#pragma GCC unroll 16
          for (int m = 0; m < MR; m++) {
            const IntVec x = broadcast_quad(group(m).q + j * 4);
            ia[m][0] = dot8(ia[m][0], b0, x);
            ia[m][1] = dot8(ia[m][1], b1, x);
          }
        }
      }
      const Vec d0 = scales(panel * UNIT), d1 = scales(panel * UNIT + LANES);
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        const Vec s = broadcast(group(m).scale);
        acc[panel][m][0] = fma(mul(to_float(ia[m][0]), s), d0, acc[panel][m][0]);
        acc[panel][m][1] = fma(mul(to_float(ia[m][1]), s), d1, acc[panel][m][1]);
      }
      if constexpr (has_min(F)) {
        const Vec n0 = scales(32 + panel * UNIT), n1 = scales(32 + panel * UNIT + LANES);
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
          const Vec x = broadcast(group(m).sum);
          acc[panel][m][0] = fma(x, n0, acc[panel][m][0]);
          acc[panel][m][1] = fma(x, n1, acc[panel][m][1]);
        }
      }
    }
    rows.advance(sizeof(Group));
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
