// The vector operations that the kernels are written in, on AVX-512 with VNNI and BF16: 16 lanes of fp32.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define INLINE __attribute__((always_inline)) inline

namespace headrace {

using bf16 = uint16_t;  // bits of a bfloat16
using Vec = __m512;
using IntVec = __m512i;
using Lanes = __mmask16;   // the lanes that a load or store touches: the first so many
using Choice = __mmask16;  // of lanes, for choose
static constexpr int LANES = 16;
// Rows of one run of a micro-kernel: as many sums of 2 LANES columns as leave registers for what is multiplied.
template <class T>
static constexpr int DENSE_ROWS = 12;
static constexpr int QUANTIZED_ROWS = 6;

// ---------------------------------------------------------------- loads and stores of activations
static INLINE Lanes first(long n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (Lanes)((1u << n) - 1); }
static INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
static INLINE Vec load(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static INLINE Vec load(const float* p, Lanes k) { return _mm512_maskz_loadu_ps(k, p); }
static INLINE Vec load(const bf16* p, Lanes k) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(k, p)), 16));
}
static INLINE __m256i to_bf16(Vec v) { return (__m256i)_mm512_cvtneps_pbh(v); }
static INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
static INLINE void store(bf16* p, Vec v) { _mm256_storeu_si256((__m256i*)p, to_bf16(v)); }
static INLINE void store(float* p, Vec v, Lanes k) { _mm512_mask_storeu_ps(p, k, v); }
static INLINE void store(bf16* p, Vec v, Lanes k) { _mm256_mask_storeu_epi16(p, k, to_bf16(v)); }

// ---------------------------------------------------------------- arithmetic
static INLINE Vec zero() { return _mm512_setzero_ps(); }
static INLINE Vec broadcast(float x) { return _mm512_set1_ps(x); }
static INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
static INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
static INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
static INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
static INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
static INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }  // a b + c
static INLINE Vec fms(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }  // a b - c
static INLINE Vec abs(Vec x) { return _mm512_abs_ps(x); }
static INLINE Vec nearest(Vec x) { return _mm512_roundscale_ps(x, 8); }
static INLINE Vec times_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }  // x 2^n, n whole, -126 <= n <= 0
// x = whole + fraction, |fraction| <= 0.5; a fraction of 0 for -inf
static INLINE Vec fraction(Vec x) { return _mm512_reduce_ps(x, 8); }
static INLINE Vec times_power_or_zero(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }  // x 2^n, n whole; 0 for n = -inf
static INLINE Vec with_sign_of(Vec x, Vec y) {  // x >= 0
  const IntVec sign = _mm512_and_si512(_mm512_castps_si512(y), _mm512_set1_epi32((int)0x80000000));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(x), sign));
}
static INLINE float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }
static INLINE float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }
static INLINE __m128 max_of_each(const Vec (&x)[4]) {  // lane i: the largest of x[i]
  auto both = [](Vec a, Vec b) { return max(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
  const __m512d a = _mm512_castps_pd(both(x[0], x[1])), b = _mm512_castps_pd(both(x[2], x[3]));
  const Vec all = max(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
static INLINE Choice is_negative(Vec x) { return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ); }
static INLINE Choice differs(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
static INLINE Choice between(long low, long end) { return first(end) & ~first(low); }  // low <= lane < end
static INLINE Vec choose(Choice k, Vec yes, Vec no) { return _mm512_mask_mov_ps(no, k, yes); }
static INLINE Vec or_zero(Choice k, Vec yes) { return _mm512_maskz_mov_ps(k, yes); }

static INLINE IntVec rounded(Vec x) { return _mm512_cvtps_epi32(x); }
static INLINE Vec to_float(IntVec x) { return _mm512_cvtepi32_ps(x); }
static INLINE IntVec add(IntVec a, IntVec b) { return _mm512_add_epi32(a, b); }
static INLINE IntVec by_128(IntVec x) { return _mm512_srai_epi32(x, 7); }  // rounded down
static INLINE IntVec low_7(IntVec x) { return _mm512_and_si512(x, _mm512_set1_epi32(127)); }  // x - 128 by_128(x)
static INLINE int reduce_add(IntVec x) { return _mm512_reduce_add_epi32(x); }
static INLINE __m128i sum_of_each(const IntVec (&x)[4]) {  // lane i: the sum of x[i]
  auto both = [](IntVec a, IntVec b) { return add(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); };
  const IntVec a = both(x[0], x[1]), b = both(x[2], x[3]);
  const IntVec all = add(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti32x8_epi32(all, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
static INLINE void store_bytes(int8_t* p, IntVec x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }
static INLINE Vec load_half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

// ---------------------------------------------------------------- products of bf16: pairs of neighbours along K
using Pairs = __m512bh;
static INLINE Pairs load_pairs(const bf16* p) { return (Pairs)_mm512_loadu_si512(p); }
static INLINE Pairs broadcast_pair(const bf16* p) {
  int pair;
  memcpy(&pair, p, 4);
  return (Pairs)_mm512_set1_epi32(pair);
}
static INLINE Vec dot(Vec sum, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sum, a, b); }

// ---------------------------------------------------------------- products of bytes: quads of neighbours along K, exact
static INLINE IntVec load_ints(const uint8_t* p) { return _mm512_loadu_si512(p); }
static INLINE IntVec broadcast_int(int x) { return _mm512_set1_epi32(x); }
static INLINE IntVec broadcast_quad(const int8_t* p) {
  int v;
  memcpy(&v, p, 4);
  return _mm512_set1_epi32(v);
}
// Weights of 8 bits are stored as value + 128. This much of it is left in the sums of dot8, to be undone by their start.
static constexpr int OFFSET_8 = 128;
static INLINE IntVec weights_8(const uint8_t* p) { return load_ints(p); }
static INLINE IntVec dot8(IntVec sum, IntVec weights, IntVec x) { return _mm512_dpbusd_epi32(sum, weights, x); }
// Weights of 4 bits: begin, up to 8 dot4, end. `start` is added to the sum.
static INLINE IntVec low_nibbles(IntVec x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
static INLINE IntVec high_nibbles(IntVec x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
static INLINE IntVec begin4(int start) { return _mm512_set1_epi32(start); }
static INLINE IntVec dot4(IntVec sum, IntVec weights, IntVec x) { return _mm512_dpbusd_epi32(sum, weights, x); }
static INLINE IntVec end4(IntVec sum, int) { return sum; }

}  // namespace headrace
