// Keys and values as bytes, and numbers in fixed point to multiply them with: exact sums of integers, in any order.
#pragma once
#include "microkernels.h"

namespace headrace {

// ---------------------------------------------------------------- a head of one token
// x ~ scale * v with v = -127 .. 127, as kv_quantization.py; stored is v + 128, as weights_8 reads it. Returns the scale.
static INLINE bf16 up_to_bf16(float positive) {
  uint32_t bits;
  memcpy(&bits, &positive, 4);
  return (bf16)((bits + 0xffff) >> 16);
}
static INLINE float as_float(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
template <class T>
static bf16 to_bytes(const T* x, long n, uint8_t* bytes) {  // room for n + LANES bytes
  // Finite, also of NaN: a masked token counts as 0 * value, which must be 0 for whoever owns the block next.
  const Vec most = broadcast(3e38f), least = broadcast(-3e38f);
  auto at = [&](long i) { return min(max(load(x + i, first(n - i)), least), most); };
  Vec largest = broadcast(1e-30f);
  for (long i = 0; i < n; i += LANES) largest = max(largest, abs(at(i)));
  const bf16 scale = up_to_bf16(reduce_max(largest) / 127.f);
  const Vec inverse = broadcast(1.f / as_float(scale));
  for (long i = 0; i < n; i += LANES)
    store_bytes((int8_t*)bytes + i, add(rounded(mul(at(i), inverse)), broadcast_int(128)));
  return scale;
}

// ---------------------------------------------------------------- fixed point: x ~ scale * (128 high + low)
// 15 bits with the sign, low is 0 .. 127. A row becomes two rows of A, high before low. `start` undoes the offset of the
// stored bytes.
static const float MOST_FIXED = 127 * 128;
struct Fixed {
  float scale;
  int32_t start;
};
template <class F>
static INLINE Fixed to_fixed(float largest, long n, F at, int8_t* high, int8_t* low) {  // at(i): LANES numbers from i on
  const Vec factor = broadcast(largest > 0.f ? MOST_FIXED / largest : 0.f);
  IntVec sum = broadcast_int(0);
  for (long i = 0; i < n; i += LANES) {
    const IntVec v = rounded(mul(at(i), factor));
    sum = add(sum, v);
    store_bytes(high + i, by_128(v));
    store_bytes(low + i, low_7(v));
  }
  return {largest / MOST_FIXED, -OFFSET_8 * reduce_add(sum)};
}
// Sums have a type of their own: with IntVec the compiler keeps them twice, as 32 and as 64 bits wide, and runs out of
// registers.
using Sums = int32_t __attribute__((vector_size(4 * LANES)));
// A row's product from the sums of its parts, but for the other side's scale
static INLINE Vec joined(Sums high, Sums low, Fixed row) {
  return mul(to_float((IntVec)((high << 7) + row.start + low)), broadcast(row.scale));
}

// B is [K/4][32][4] bytes; MR rows of parts
template <int MR, int W, int L>
static INLINE void multiply(const int8_t* A, long lda, Tiles<uint8_t, W, L> b, long K, Sums (&acc)[W][MR][2]) {
  Rows<int8_t, MR> a(A, lda);
  for (long k = 0; k < K; k += 4) {
    for (int w = 0; w < W; w++) {
      const IntVec b0 = weights_8(b.p[w] + k * 32), b1 = weights_8(b.p[w] + k * 32 + LANES * 4);
      b.ahead[w].template prefetch<UNIT / 16>();
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        const IntVec x = broadcast_quad(a[m]);
        acc[w][m][0] = (Sums)dot8((IntVec)acc[w][m][0], b0, x);
        acc[w][m][1] = (Sums)dot8((IntVec)acc[w][m][1], b1, x);
      }
    }
    a.advance(4);
  }
}

}  // namespace headrace
