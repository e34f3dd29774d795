// Vector functions on what the target can do (avx512.h, avx2.h), and memory that grows.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

#ifdef __AVX512F__
#include "avx512.h"
#else
#include "avx2.h"
#endif

namespace headrace {

// ---------------------------------------------------------------- functions
// exp(x) for x <= 0: relative error below 3e-7, exp of anything under -87 is exp(-87)
static INLINE Vec exp_neg(Vec x) {
  const Vec log2e = broadcast(1.44269502f), low = broadcast(1.92596299e-8f);
  x = max(x, broadcast(-87.f));
  const Vec n = nearest(mul(x, log2e));
  const Vec f = fma(x, low, fms(x, log2e, n));  // x * log2(e) = n + f, |f| <= 0.5
  Vec p = broadcast(1.54035304e-4f);
  p = fma(p, f, broadcast(1.33335581e-3f));
  p = fma(p, f, broadcast(9.61812911e-3f));
  p = fma(p, f, broadcast(5.55041087e-2f));
  p = fma(p, f, broadcast(2.40226507e-1f));
  p = fma(p, f, broadcast(6.93147181e-1f));
  p = fma(p, f, broadcast(1.f));
  return times_power(p, n);
}
// 2^x for x <= 0, and 0 for -inf: relative error below 1e-7 or, for what is rounded to bf16 (4e-3), below 3e-6. 2^0 is 1.
template <class T>
static INLINE Vec exp2_neg(Vec x) {
  const Vec f = fraction(x);
  Vec p;
  if constexpr (std::is_same_v<T, float>) {
    p = fma(broadcast(1.32647261e-3f), f, broadcast(9.67151299e-3f));
    p = fma(p, f, broadcast(5.55073359e-2f));
    p = fma(p, f, broadcast(2.40222424e-1f));
    p = fma(p, f, broadcast(6.93147004e-1f));
  } else {
    p = fma(broadcast(9.58285294e-3f), f, broadcast(5.59064262e-2f));
    p = fma(p, f, broadcast(2.40240991e-1f));
    p = fma(p, f, broadcast(6.93124175e-1f));
  }
  return times_power_or_zero(fma(p, f, broadcast(1.f)), sub(x, f));
}
static INLINE Vec sigmoid(Vec x) {
  const Vec e = exp_neg(sub(zero(), abs(x)));
  const Vec top = choose(is_negative(x), e, broadcast(1.f));
  return div(top, add(e, broadcast(1.f)));
}
static INLINE Vec silu(Vec x) { return mul(x, sigmoid(x)); }
static INLINE Vec gelu_tanh(Vec x) {  // 0.5 x (1 + tanh(u)) = x sigmoid(2 u)
  const Vec x2 = mul(x, x);
  const Vec u = mul(x, fma(x2, broadcast(0.0713548128f), broadcast(1.59576912f)));
  return mul(x, sigmoid(u));
}
static INLINE Vec soft_cap(Vec x, Vec cap) {  // cap * tanh(x / cap)
  const Vec y = div(x, cap), one = broadcast(1.f);
  const Vec e = exp_neg(mul(abs(y), broadcast(-2.f)));
  const Vec t = div(sub(one, e), add(one, e));
  return mul(cap, with_sign_of(t, y));
}

// What shall be brought into the L1 or L2 cache while something else is computed, at a pace of `line` bytes a prefetch.
template <int Level>
struct Ahead {
  const char* p;
  long line;  // 64: each line once; less: some more than once; 0: nothing new
  INLINE Ahead after(long prefetches) const { return {p + prefetches * line, line}; }
  template <int N>
  INLINE void prefetch() {
#pragma GCC unroll 20
    for (int i = 0; i < N; i++, p += line) _mm_prefetch(p, Level == 1 ? _MM_HINT_T0 : _MM_HINT_T1);
  }
};

// ---------------------------------------------------------------- memory that grows and is never given back
template <class T>
struct Buffer {
  T* p = nullptr;
  size_t room = 0;
  T* at_least(size_t n) {
    if (n > room) {
      std::free(p);
      room = (n * sizeof(T) + 4095) / 4096 * 4096 / sizeof(T);
      p = (T*)std::aligned_alloc(4096, (room * sizeof(T) + 4095) / 4096 * 4096);
      if (!p) room = 0, throw std::bad_alloc();
    }
    return p;
  }
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  ~Buffer() { std::free(p); }
};

}  // namespace headrace
