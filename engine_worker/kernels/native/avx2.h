// The vector operations of avx512.h for processors that have only AVX2, FMA and F16C: 8 lanes of fp32. Integer sums are
// the same numbers; a product of bf16 pairs is two fused steps, where AVX-512 BF16 rounds in its own way.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define INLINE __attribute__((always_inline)) inline

namespace headrace {

using bf16 = uint16_t;  // bits of a bfloat16
using Vec = __m256;
using IntVec = __m256i;
struct Lanes {  // the lanes that a load or store touches: the first n
  long n;
};
using Choice = __m256;  // of lanes, for choose
static constexpr int LANES = 8;
// Rows of one run of a micro-kernel: as many sums of 2 LANES columns as leave registers for what is multiplied.
template <class T>
static constexpr int DENSE_ROWS = sizeof(T) == 4 ? 6 : 4;
static constexpr int QUANTIZED_ROWS = 4;

static INLINE __m256i lanes_from_0() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
static INLINE __m256i below(long n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lanes_from_0()); }

// ---------------------------------------------------------------- loads and stores of activations
static INLINE Lanes first(long n) { return {n >= 8 ? 8 : n <= 0 ? 0 : n}; }
static INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
static INLINE Vec load(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static INLINE Vec load(const float* p, Lanes k) { return k.n == 8 ? load(p) : _mm256_maskload_ps(p, below(k.n)); }
static INLINE Vec load(const bf16* p, Lanes k) {
  if (k.n == 8) return load(p);
  bf16 some[8] = {};
  memcpy(some, p, k.n * sizeof(bf16));
  return load(some);
}
static INLINE __m128i to_bf16(Vec v) {  // to the nearest, ties to even; a NaN stays one
  const __m256i bits = _mm256_castps_si256(v), top = _mm256_srli_epi32(bits, 16);
  const __m256i up = _mm256_add_epi32(_mm256_and_si256(top, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
  const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i r = _mm256_blendv_epi8(near, _mm256_or_si256(top, _mm256_set1_epi32(0x40)), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
static INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
static INLINE void store(bf16* p, Vec v) { _mm_storeu_si128((__m128i*)p, to_bf16(v)); }
static INLINE void store(float* p, Vec v, Lanes k) {
  if (k.n == 8) store(p, v);
  else _mm256_maskstore_ps(p, below(k.n), v);
}
static INLINE void store(bf16* p, Vec v, Lanes k) {
  if (k.n == 8) return store(p, v);
  bf16 some[8];
  store(some, v);
  memcpy(p, some, k.n * sizeof(bf16));
}

// ---------------------------------------------------------------- arithmetic
static INLINE Vec zero() { return _mm256_setzero_ps(); }
static INLINE Vec broadcast(float x) { return _mm256_set1_ps(x); }
static INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
static INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
static INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
static INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
static INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
static INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
static INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }  // a b + c
static INLINE Vec fms(Vec a, Vec b, Vec c) { return _mm256_fmsub_ps(a, b, c); }  // a b - c
static INLINE Vec sign_bits() { return _mm256_set1_ps(-0.f); }
static INLINE Vec abs(Vec x) { return _mm256_andnot_ps(sign_bits(), x); }
static INLINE Vec nearest(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static INLINE Vec times_power(Vec x, Vec n) {  // x 2^n, n whole, -126 <= n <= 0
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
// x = whole + fraction, |fraction| <= 0.5; a fraction of 0 for -inf
static INLINE Vec fraction(Vec x) {
  const Vec is_finite = _mm256_cmp_ps(x, _mm256_set1_ps(-INFINITY), _CMP_NEQ_UQ);
  return _mm256_and_ps(is_finite, sub(x, nearest(x)));
}
static INLINE Vec times_power_or_zero(Vec x, Vec n) {  // x 2^n, n whole; 0 for n < -126
  return _mm256_and_ps(_mm256_cmp_ps(n, _mm256_set1_ps(-126.f), _CMP_NLT_UQ), times_power(x, n));
}
static INLINE Vec with_sign_of(Vec x, Vec y) { return _mm256_or_ps(x, _mm256_and_ps(y, sign_bits())); }  // x >= 0
static INLINE float reduce_add(Vec x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static INLINE float reduce_max(Vec x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
static INLINE __m128 max_of_each(const Vec (&x)[4]) {  // lane i: the largest of x[i]
  return _mm_setr_ps(reduce_max(x[0]), reduce_max(x[1]), reduce_max(x[2]), reduce_max(x[3]));
}
static INLINE Choice is_negative(Vec x) { return _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ); }
static INLINE Choice differs(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_NEQ_UQ); }
static INLINE Choice between(long low, long end) {  // low <= lane < end
  return _mm256_castsi256_ps(_mm256_andnot_si256(below(first(low).n), below(first(end).n)));
}
static INLINE Vec choose(Choice k, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, k); }
static INLINE Vec or_zero(Choice k, Vec yes) { return _mm256_and_ps(k, yes); }

static INLINE IntVec rounded(Vec x) { return _mm256_cvtps_epi32(x); }
static INLINE Vec to_float(IntVec x) { return _mm256_cvtepi32_ps(x); }
static INLINE IntVec add(IntVec a, IntVec b) { return _mm256_add_epi32(a, b); }
static INLINE IntVec by_128(IntVec x) { return _mm256_srai_epi32(x, 7); }  // rounded down
static INLINE IntVec low_7(IntVec x) { return _mm256_and_si256(x, _mm256_set1_epi32(127)); }  // x - 128 by_128(x)
static INLINE int reduce_add(IntVec x) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
static INLINE __m128i sum_of_each(const IntVec (&x)[4]) {  // lane i: the sum of x[i]
  const __m256i sums = _mm256_hadd_epi32(_mm256_hadd_epi32(x[0], x[1]), _mm256_hadd_epi32(x[2], x[3]));
  return _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
}
static INLINE void store_bytes(int8_t* p, IntVec x) {  // the lowest byte of each lane
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128(x), order);
  const __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256(x, 1), order);
  _mm_storel_epi64((__m128i*)p, _mm_unpacklo_epi32(low, high));
}
static INLINE Vec load_half(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

// ---------------------------------------------------------------- products of bf16: pairs of neighbours along K
struct Pairs {
  Vec first, second;
};
static INLINE Pairs widened(__m256i x) {
  const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_and_si256(x, upper))};
}
static INLINE Pairs load_pairs(const bf16* p) { return widened(_mm256_loadu_si256((const __m256i*)p)); }
static INLINE Pairs broadcast_pair(const bf16* p) {
  int pair;
  memcpy(&pair, p, 4);
  return widened(_mm256_set1_epi32(pair));
}
static INLINE Vec dot(Vec sum, Pairs a, Pairs b) { return fma(a.second, b.second, fma(a.first, b.first, sum)); }

// ---------------------------------------------------------------- products of bytes: quads of neighbours along K, exact
// vpmaddubsw adds two products in 16 bits and saturates; here no sum can get so far, since activations are -127 .. 127.
static INLINE IntVec load_ints(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static INLINE IntVec broadcast_int(int x) { return _mm256_set1_epi32(x); }
static INLINE IntVec broadcast_quad(const int8_t* p) {
  int v;
  memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}
// Weights of 8 bits are stored as value + 128. This much of it is left in the sums of dot8, to be undone by their start.
static constexpr int OFFSET_8 = 0;
static INLINE IntVec weights_8(const uint8_t* p) { return _mm256_xor_si256(load_ints(p), _mm256_set1_epi8((char)0x80)); }
static INLINE IntVec dot8(IntVec sum, IntVec weights, IntVec x) {  // |w| * (x with the sign of w): at most 2 * 128 * 127
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// Weights of 4 bits: begin, up to 8 dot4, end. `start` is added to the sum. 16 bits hold it: 8 * 2 * 15 * 127 = 30480.
static INLINE IntVec low_nibbles(IntVec x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
static INLINE IntVec high_nibbles(IntVec x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
static INLINE IntVec begin4(int) { return _mm256_setzero_si256(); }
static INLINE IntVec dot4(IntVec sum, IntVec weights, IntVec x) {
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, x));
}
static INLINE IntVec end4(IntVec sum, int start) {
  return _mm256_add_epi32(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)), _mm256_set1_epi32(start));
}

}  // namespace headrace
