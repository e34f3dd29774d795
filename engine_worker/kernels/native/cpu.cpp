// The operators of engine_worker/kernels/ops.py in native code, behind a plain C interface: pointers, sizes, strides.
//
// Promise: a token's result depends on its own inputs only, bit for bit: not on the other tokens of the step, nor on
// how a prompt was cut into chunks, nor on the number of threads. Therefore: one sum per output in the order of k
// (microkernels.h), softmax over fixed chunks folded in order (attention.h), and no fast-math.
//
// `is_bf16` is the activations' type: bf16, or else fp32; keys and values are the same or bytes. All pointers are to contiguous memory of the caller.
#include <chrono>

#include "layers.h"

using namespace headrace;

namespace {

// Scratch of the calling thread (the engine has one), reused from step to step.
thread_local Scratch linear_scratch;
thread_local AttentionScratch attention_scratch;
thread_local LayerScratch layer_scratch;

template <class T>
void linear_call(const Input& in, long M, const Linear& w, void* out, long epilogue, int threads) {
  const Job<T> job = make_job<T>(linear_scratch, threads, in, M, w, out, epilogue);
  run_team(threads, [&](Team& team) { run(team, job); });
}
template <class Activation, class Kv>
struct Types {
  using T = Activation;
  using C = Kv;
};
template <class F>
auto with_types(int64_t is_bf16, const Shape& s, F f) {
  if (s.is_int8) return is_bf16 ? f(Types<bf16, ByteCache>{}) : f(Types<float, ByteCache>{});
  return is_bf16 ? f(Types<bf16, Cache<bf16>>{}) : f(Types<float, Cache<float>>{});
}
template <class T, class C>
void attention_call(const Shape& s, const Step& step, const void* qkv, void* k, void* v, void* out, int threads) {
  AttentionScratch& scratch = attention_scratch;
  plan_attention(scratch, s, step, threads);
  const C cache(k, v, s);
  run_team(threads, [&](Team& team) { attention(team, scratch, (const T*)qkv, s, step, cache, (T*)out); });
}
template <class T, class C>
void rope_call(const Shape& s, const Step& step, const Rope& rope, void* qkv, void* k, void* v, int threads) {
  const C cache(k, v, s);
  run_team(step.tokens > 4 ? threads : 1, [&](Team& team) { rope_write(team, (T*)qkv, s, rope, step, cache); });
}

}  // namespace

extern "C" {

// out[M][..] = epilogue(linear(x)); x is fp32 [M][k] with an RMSNorm in front where norm is given, else activations.
void headrace_linear(const Linear* w, const void* x, const float* norm, float eps, int64_t M, void* out, int64_t epilogue,
                     int64_t is_bf16, int64_t threads) {
  const Input in{x, norm, eps};
  if (is_bf16) linear_call<bf16>(in, M, *w, out, epilogue, (int)threads);
  else linear_call<float>(in, M, *w, out, epilogue, (int)threads);
}

// out fp32 [M][D] = rms_norm(x) * weight
void headrace_norm(const float* x, const float* weight, float eps, int64_t M, int64_t D, float* out) {
  for (long m = 0; m < M; m++) {
    const float* row = x + m * D;
    const Vec r = broadcast(inverse_rms(row, D, eps));
    for (long i = 0; i < D; i += LANES) {
      const Lanes k = first(D - i);
      store(out + m * D + i, mul(mul(load(row + i, k), r), load(weight + i, k)), k);
    }
  }
}

void headrace_rope_write(const Shape* s, const Step* step, const Rope* rope, void* qkv, void* k, void* v, int64_t is_bf16,
                         int64_t threads) {
  with_types(is_bf16, *s, [&](auto of) {
    using Of = decltype(of);
    rope_call<typename Of::T, typename Of::C>(*s, *step, *rope, qkv, k, v, (int)threads);
  });
}

void headrace_attention(const Shape* s, const Step* step, const void* qkv, void* k, void* v, void* out, int64_t is_bf16,
                        int64_t threads) {
  with_types(is_bf16, *s, [&](auto of) {
    using Of = decltype(of);
    attention_call<typename Of::T, typename Of::C>(*s, *step, qkv, k, v, out, (int)threads);
  });
}

// All layers of a decoder; x fp32 [tokens][D] is changed in place. K of layer i begins at k + i * kv_stride bytes.
// Returns the seconds it took: the caller may have to wait for the GIL before it can look at a clock.
double headrace_layers(const Layer* layers, int64_t num_layers, const Step* step, float* x, void* k, void* v, int64_t kv_stride,
                     int64_t is_bf16, int64_t threads) {
  const auto start = std::chrono::steady_clock::now();
  with_types(is_bf16, layers[0].shape, [&](auto of) {
    using Of = decltype(of);
    run_layers<typename Of::T, typename Of::C>(layer_scratch, layers, num_layers, *step, x, (char*)k, (char*)v, kv_stride,
                                               (int)threads);
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // extern "C"
