// Vector helpers (AVX512) and the team of threads that runs one operator.
#pragma once
#include <immintrin.h>
#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

#define INLINE __attribute__((always_inline)) inline

namespace headrace {

using bf16 = uint16_t;  // bits of a bfloat16

// ---------------------------------------------------------------- loads and stores of activations
static INLINE __m512 load(const float* p) { return _mm512_loadu_ps(p); }
static INLINE __m512 load(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static INLINE __m512 load(const float* p, __mmask16 k) { return _mm512_maskz_loadu_ps(k, p); }
static INLINE __m512 load(const bf16* p, __mmask16 k) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(k, p)), 16));
}
static INLINE __m256i to_bf16(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }
static INLINE void store(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
static INLINE void store(bf16* p, __m512 v) { _mm256_storeu_si256((__m256i*)p, to_bf16(v)); }
static INLINE void store(float* p, __m512 v, __mmask16 k) { _mm512_mask_storeu_ps(p, k, v); }
static INLINE void store(bf16* p, __m512 v, __mmask16 k) { _mm256_mask_storeu_epi16(p, k, to_bf16(v)); }
static INLINE __mmask16 first(long n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }

// ---------------------------------------------------------------- functions
// exp(x) for x <= 0: relative error below 3e-7, exp of anything under -87 is exp(-87)
static INLINE __m512 exp_neg(__m512 x) {
  const __m512 log2e = _mm512_set1_ps(1.44269502f), low = _mm512_set1_ps(1.92596299e-8f);
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, log2e), 8);
  const __m512 f = _mm512_fmadd_ps(x, low, _mm512_fmsub_ps(x, log2e, n));  // x * log2(e) = n + f, |f| <= 0.5
  __m512 p = _mm512_set1_ps(1.54035304e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.33335581e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.61812911e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.55041087e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40226507e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147181e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, n);
}
static INLINE __m512 sigmoid(__m512 x) {
  const __m512 e = exp_neg(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  const __m512 top = _mm512_mask_mov_ps(_mm512_set1_ps(1.f), negative, e);
  return _mm512_div_ps(top, _mm512_add_ps(e, _mm512_set1_ps(1.f)));
}
static INLINE __m512 silu(__m512 x) { return _mm512_mul_ps(x, sigmoid(x)); }
static INLINE __m512 gelu_tanh(__m512 x) {  // 0.5 x (1 + tanh(u)) = x sigmoid(2 u)
  const __m512 x2 = _mm512_mul_ps(x, x);
  const __m512 u = _mm512_mul_ps(x, _mm512_fmadd_ps(x2, _mm512_set1_ps(0.0713548128f), _mm512_set1_ps(1.59576912f)));
  return _mm512_mul_ps(x, sigmoid(u));
}
static INLINE __m512 soft_cap(__m512 x, __m512 cap) {  // cap * tanh(x / cap)
  const __m512 y = _mm512_div_ps(x, cap), one = _mm512_set1_ps(1.f);
  const __m512 e = exp_neg(_mm512_mul_ps(_mm512_abs_ps(y), _mm512_set1_ps(-2.f)));
  const __m512 t = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  const __m512i sign = _mm512_and_si512(_mm512_castps_si512(y), _mm512_set1_epi32((int)0x80000000));
  return _mm512_mul_ps(cap, _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(t), sign)));
}

// What shall be brought into the L1 or L2 cache while something else is computed, at a pace of `line` bytes a prefetch.
template <int Level>
struct Ahead {
  const char* p;
  long line;  // 64: each line once; less: some more than once; 0: nothing new
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

// ---------------------------------------------------------------- threads
// All threads of a team run the same code: they share out the items of one phase after the other, and wait for each
// other in sync(). Which thread computes an item never changes a result. Each thread has a range of the items of its
// own, the same part of all in each phase: what it wrote in one phase is in its cache in the next. Who is through takes
// items from the others' ranges, since a busy neighbour on the machine makes threads unequal.
//
// A waiting thread spins for a moment only and then sleeps: if the one it waits for has lost its CPU to another process,
// it can have this one. (The OpenMP barrier spins for milliseconds, which made steps ten times slower beside a busy
// neighbour.)
static const int SPINS = 2000;  // about 20 us
static const int MAX_RANGES = 64;
struct Shared {
  struct alignas(64) Taken {  // items of a range
    std::atomic<long> count;
  };
  Taken taken[3][MAX_RANGES];
  alignas(64) std::atomic<int> arrived{0};
  std::atomic<int> round{0}, sleepers{0};
  int ranges;
  explicit Shared(int threads) : ranges(std::min(threads, MAX_RANGES)) {
    for (int phase = 0; phase < 3; phase++) forget(phase);
  }
  void forget(int phase) {
    for (int r = 0; r < ranges; r++) taken[phase][r].count.store(0, std::memory_order_relaxed);
  }
};
static void wait_for_round_after(Shared& s, int round) {
  for (int i = 0; i < SPINS; i++) {
    if (s.round.load(std::memory_order_acquire) != round) return;
    _mm_pause();
  }
  s.sleepers.fetch_add(1);
  while (s.round.load() == round) syscall(SYS_futex, &s.round, FUTEX_WAIT_PRIVATE, round, nullptr, nullptr, 0);
  s.sleepers.fetch_sub(1);
}
struct Team {
  Shared& shared;
  int id, size;
  long phase = 0;

  // f(i) for 0 <= i < n, taken in runs of `chunk`
  template <class F>
  void each(long n, long chunk, F f) {
    ranges(n, chunk, [&](long from, long to, long) {
      for (long i = from; i < to; i++) f(i);
    });
  }
  // f(i, next): the thread will work on `next` after i, if nobody else does; n if on none
  template <class F>
  void each_ahead(long n, F f) {
    ranges(n, 1, [&](long i, long to, long end) { f(i, to < end ? to : n); });
  }
  // f(from, to, end of the range)
  template <class F>
  void ranges(long n, long chunk, F f) {
    const int R = shared.ranges;
    for (int r = 0; r < R; r++) {
      const int range = (id + r) % R;
      const long begin = n * range / R, end = n * (range + 1) / R;
      std::atomic<long>& taken = shared.taken[phase % 3][range].count;
      for (long i; (i = begin + taken.fetch_add(chunk, std::memory_order_relaxed)) < end;) f(i, std::min(end, i + chunk), end);
    }
    if (size == 1) shared.forget(phase % 3);  // there is no sync that does
  }
  void sync() {
    if (size == 1) return;
    // nobody is left in the phase before this one, so its counts can serve the phase after the next
    if (id == 0) shared.forget((phase + 2) % 3);
    phase++;
    const int round = shared.round.load(std::memory_order_relaxed);
    if (shared.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < size) return wait_for_round_after(shared, round);
    shared.arrived.store(0, std::memory_order_relaxed);
    shared.round.store(round + 1);
    if (shared.sleepers.load()) syscall(SYS_futex, &shared.round, FUTEX_WAKE_PRIVATE, size, nullptr, nullptr, 0);
  }
};
template <class F>
static void run_team(int threads, F f) {
  Shared shared(std::max(threads, 1));
  if (threads <= 1) {
    Team team{shared, 0, 1};
    return f(team);
  }
#pragma omp parallel num_threads(threads)
  {
    // OpenMP may give fewer threads than asked for
    Team team{shared, omp_get_thread_num(), omp_get_num_threads()};
    f(team);
    team.sync();  // before the join, which spins
  }
}

}  // namespace headrace
