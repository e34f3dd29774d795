// A run of decoder layers in one call: one team of threads, and no way back to Python between operators.
#pragma once
#include <deque>

#include "attention.h"
#include "linear.h"

namespace headrace {

struct Layer {  // same fields and order in native_types.py
  Shape shape;
  Rope rope;
  const Linear *qkv, *output, *gate_up, *down;
  const float *attention_norm, *mlp_norm;            // in front of the two halves
  const float *after_attention, *after_mlp;          // over their results (Gemma 2), or null
  float eps;
  int64_t activation;  // SILU_MUL or GELU_MUL
};
struct WindowSchedule {
  int64_t window;
  bool is_planned;  // in this step
  AttentionScratch attention;
};
struct LayerScratch {  // of the calling thread
  Scratch linear;
  std::deque<WindowSchedule> windows;  // one schedule for each sliding window
  std::vector<AttentionScratch*> schedules;  // of each layer
  Buffer<float> activations;  // qkv | attended | gated | half
};
template <class T>
struct LayerJobs {
  Job<T> qkv, output, gate_up, down;
};
// x (fp32) += rms_norm(y)
static void add_normed(Team& team, float* x, const float* y, const float* norm, float eps, long M, long D) {
  team.each(M, 4, [&](long m) {
    const float* row = y + m * D;
    const Vec r = broadcast(inverse_rms(row, D, eps));
    for (long i = 0; i < D; i += LANES) {
      const Lanes k = first(D - i);
      const Vec v = mul(mul(load(row + i, k), r), load(norm + i, k));
      store(x + m * D + i, add(load(x + m * D + i, k), v), k);
    }
  });
  team.sync();
}
static void plan_schedules(LayerScratch& s, const Layer* layers, long num_layers, const Step& step, int threads) {
  for (WindowSchedule& w : s.windows) w.is_planned = false;
  s.schedules.clear();
  for (long i = 0; i < num_layers; i++) {
    const Shape& shape = layers[i].shape;
    auto w = std::find_if(s.windows.begin(), s.windows.end(), [&](auto& known) { return known.window == shape.window; });
    if (w == s.windows.end()) {
      s.windows.emplace_back();
      w = std::prev(s.windows.end());
      w->window = shape.window, w->is_planned = false;
    }
    if (!w->is_planned) plan_attention(w->attention, shape, step, threads), w->is_planned = true;
    s.schedules.push_back(&w->attention);
  }
}
// x: fp32 [tokens][D], the residual stream, changed in place. K and V of layer i begin at k + i * kv_stride (bytes).
template <class T, class C>
static void run_layers(LayerScratch& s, const Layer* layers, long num_layers, const Step& step, float* x, char* k, char* v,
                       long kv_stride, int threads) {
  const long M = step.tokens, D = layers[0].qkv->k;
  const long widths[] = {layers[0].qkv->n, layers[0].output->k, layers[0].down->k};
  T* qkv = (T*)s.activations.at_least(M * (widths[0] + widths[1] + widths[2] + D) + 16);
  T *attended = qkv + M * widths[0], *gated = attended + M * widths[1];
  float* half = s.activations.p + M * (widths[0] + widths[1] + widths[2]);
  auto jobs_of = [&](const Layer& l) {
    auto add = [&](const float* after) { return after ? STORE_F32 : ADD; };
    auto job = [&](const void* in, const float* norm, const Linear& w, void* out, long epilogue) {
      return make_job<T>(s.linear, threads, {in, norm, l.eps}, M, w, out, epilogue);
    };
    return LayerJobs<T>{job(x, l.attention_norm, *l.qkv, qkv, STORE),
                        job(attended, nullptr, *l.output, l.after_attention ? half : x, add(l.after_attention)),
                        job(x, l.mlp_norm, *l.gate_up, gated, l.activation),
                        job(gated, nullptr, *l.down, l.after_mlp ? half : x, add(l.after_mlp))};
  };
  // Makes the scratch large enough for all of them, before threads share it. The first time tells how far apart copies lie.
  for (long i = 0; i < 2 * num_layers; i++) jobs_of(layers[i % num_layers]);
  plan_schedules(s, layers, num_layers, step, threads);
  run_team(threads, [&](Team& team) {
    for (long i = 0; i < num_layers; i++) {
      const Layer& l = layers[i];
      const LayerJobs<T> jobs = jobs_of(l);
      const C cache(k + i * kv_stride, v + i * kv_stride, l.shape);
      run(team, jobs.qkv), team.sync();
      rope_write(team, qkv, l.shape, l.rope, step, cache), team.sync();
      attention(team, *s.schedules[i], qkv, l.shape, step, cache, attended), team.sync();
      run(team, jobs.output), team.sync();
      if (l.after_attention) add_normed(team, x, half, l.after_attention, l.eps, M, D);
      run(team, jobs.gate_up), team.sync();
      run(team, jobs.down), team.sync();
      if (l.after_mlp) add_normed(team, x, half, l.after_mlp, l.eps, M, D);
    }
  });
}

}  // namespace headrace
