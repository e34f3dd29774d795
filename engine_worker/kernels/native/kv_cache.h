// The paged KV cache, and the rotary embedding with the write into it.
#pragma once
#include "bytes.h"
#include "team.h"

namespace headrace {

// The cache's layout is made for the micro-kernels: both products of attention read it as they read weights. A block
// holds groups of 32 tokens for each KV head; P = 2 for bf16 (values of two k's or two tokens side by side), 1 for fp32.
//   K  [block][kv head][group][head_size / P][32 tokens][P]
//   V  [block][kv head][group][padded_head / 32][32 / P token tuples][32 columns][P]
static const int GROUP = 32;  // tokens of a group
static const int MAX_HEAD = 256;

struct Shape {  // constant over a layer; same fields and order in cpu.py
  int64_t heads, kv_heads, head_size, block_size;
  int64_t window;  // 0 = none
  int64_t is_int8;  // keys and values
  float scale, cap;  // cap 0 = none
};
struct Step {  // where the tokens stand; see AttentionMetadata
  int64_t sequences, tokens;
  const int32_t *query_start, *seq_lens, *rows, *tables;
  int64_t table_stride;
  const int32_t *slots, *positions;
};

struct Stored {  // of a piece in memory: the keys or values of one group of tokens and one KV head
  const char* p;
  long bytes;
};
// Values are stored as they are computed with.
template <class T>
struct Cache {
  using Value = T;
  static constexpr int ROWS = DENSE_ROWS<T>;  // of a run
  static constexpr long P = std::is_same_v<T, float> ? 1 : 2;
  T *k, *v;
  long kv_heads, head_size, padded_head, groups;  // groups of a block
  Cache(void* k_, void* v_, const Shape& s)
      : k((T*)k_), v((T*)v_), kv_heads(s.kv_heads), head_size(s.head_size), padded_head((s.head_size + 31) / 32 * 32),
        groups(s.block_size / GROUP) {}
  long piece(long block, long head, long group) const { return (block * kv_heads + head) * groups + group; }
  T* keys(long block, long head, long group) const { return k + piece(block, head, group) * head_size * GROUP; }
  T* values(long block, long head, long group) const { return v + piece(block, head, group) * padded_head * GROUP; }

  Stored stored_keys(long block, long head, long group) const {
    return {(const char*)keys(block, head, group), head_size * GROUP * (long)sizeof(T)};
  }
  Stored stored_values(long block, long head, long group) const {
    return {(const char*)values(block, head, group), padded_head * GROUP * (long)sizeof(T)};
  }
};
// Values are bytes, four tokens or k's side by side, and behind the values of a piece stands the scale of each token:
//   K  [block][kv head][group]{[head_size / 4][32 tokens][4], bf16 [32]}
//   V  [block][kv head][group]{[padded_head / 32][32 / 4 token quads][32 columns][4], bf16 [32]}
struct ByteCache {
  using Value = uint8_t;
  static constexpr int ROWS = QUANTIZED_ROWS >= 6 ? 6 : 2;  // each is two for the micro-kernel
  static constexpr long P = 4;
  uint8_t *k, *v;
  long kv_heads, head_size, padded_head, groups;
  ByteCache(void* k_, void* v_, const Shape& s)
      : k((uint8_t*)k_), v((uint8_t*)v_), kv_heads(s.kv_heads), head_size(s.head_size),
        padded_head((s.head_size + 31) / 32 * 32), groups(s.block_size / GROUP) {}
  static constexpr long bytes(long columns) { return GROUP * (columns + (long)sizeof(bf16)); }  // of a piece
  long piece(long block, long head, long group) const { return (block * kv_heads + head) * groups + group; }
  uint8_t* keys(long block, long head, long group) const { return k + piece(block, head, group) * bytes(head_size); }
  uint8_t* values(long block, long head, long group) const { return v + piece(block, head, group) * bytes(padded_head); }
  bf16* key_scales(uint8_t* keys) const { return (bf16*)(keys + GROUP * head_size); }
  bf16* value_scales(uint8_t* values) const { return (bf16*)(values + GROUP * padded_head); }

  Stored stored_keys(long block, long head, long group) const {
    return {(const char*)keys(block, head, group), bytes(head_size)};
  }
  Stored stored_values(long block, long head, long group) const {
    return {(const char*)values(block, head, group), bytes(padded_head)};
  }
};

// ---------------------------------------------------------------- rotary + write
struct Rope {
  const float* cos_sin;  // [positions][dim]: cos | sin, dim / 2 each
  int64_t dim;
  const float *q_norm, *k_norm;  // [head_size] or null
  float eps;
};
template <class T>
static void rotate_head(T* p, const float* cs, const Rope& r, const float* norm, long head_size) {
  float scale = 1.f;
  if (norm) {
    Vec ss = zero();
    for (long i = 0; i < head_size; i += LANES) {
      const Vec v = load(p + i, first(head_size - i));
      ss = fma(v, v, ss);
    }
    scale = 1.f / std::sqrt(reduce_add(ss) / (float)head_size + r.eps);
  }
  const Vec vs = broadcast(scale);
  auto at = [&](long i, Lanes k) {
    const Vec v = load(p + i, k);
    return norm ? mul(mul(v, vs), load(norm + i, k)) : v;
  };
  const long half = r.dim / 2;
  for (long i = 0; i < half; i += LANES) {
    const Lanes k = first(half - i);
    const Vec a = at(i, k), b = at(half + i, k), c = load(cs + i, k), s = load(cs + half + i, k);
    store(p + i, fms(a, c, mul(b, s)), k);
    store(p + half + i, fma(b, c, mul(a, s)), k);
  }
  if (norm)
    for (long i = r.dim; i < head_size; i += LANES) {
      const Lanes k = first(head_size - i);
      store(p + i, at(i, k), k);
    }
}
static INLINE float finite(float v) {  // also of NaN
  return v > -3e38f ? (v < 3e38f ? v : 3e38f) : -3e38f;
}
static INLINE bf16 finite(bf16 v) { return (v & 0x7f80) == 0x7f80 ? (bf16)((v & 0x8000) | 0x7f7f) : v; }

template <class T>
static void write_token(const T* keys, const T* values, const Cache<T>& c, long slot) {
  constexpr long P = Cache<T>::P;
  const long size = c.groups * GROUP, block = slot / size, group = slot % size / GROUP, t = slot % GROUP;
  for (long h = 0; h < c.kv_heads; h++) {
    T* to = c.keys(block, h, group) + t * P;
    for (long i = 0; i < c.head_size; i += P) memcpy(to + i * GROUP, keys + h * c.head_size + i, sizeof(T) * P);
    // Values are kept finite: a masked token counts as 0 * value, which would be NaN for whoever owns the block next.
    to = c.values(block, h, group) + t / P * 32 * P + t % P;
    for (long i = 0; i < c.head_size; i++)
      to[i / 32 * 32 * GROUP + i % 32 * P] = finite(values[h * c.head_size + i]);
  }
}
template <class T>
static void write_token(const T* keys, const T* values, const ByteCache& c, long slot) {
  const long size = c.groups * GROUP, block = slot / size, group = slot % size / GROUP, t = slot % GROUP;
  uint8_t bytes[MAX_HEAD + LANES];
  for (long h = 0; h < c.kv_heads; h++) {
    uint8_t* piece = c.keys(block, h, group);
    c.key_scales(piece)[t] = to_bytes(keys + h * c.head_size, c.head_size, bytes);
    for (long i = 0; i < c.head_size; i += 4) memcpy(piece + t * 4 + i * GROUP, bytes + i, 4);
    piece = c.values(block, h, group);
    c.value_scales(piece)[t] = to_bytes(values + h * c.head_size, c.head_size, bytes);
    uint8_t* to = piece + t / 4 * 32 * 4 + t % 4;
    for (long i = 0; i < c.head_size; i++) to[i / 32 * 32 * GROUP + i % 32 * 4] = bytes[i];
  }
}
template <class T, class C>
static void rope_write(Team& team, T* qkv, const Shape& s, const Rope& r, const Step& step, const C& c) {
  const long ld = (s.heads + 2 * s.kv_heads) * s.head_size;
  team.each(step.tokens, 4, [&](long m) {
    T* row = qkv + m * ld;
    const float* cs = r.cos_sin + step.positions[m] * r.dim;
    for (long h = 0; h < s.heads + s.kv_heads; h++)
      rotate_head(row + h * s.head_size, cs, r, h < s.heads ? r.q_norm : r.k_norm, s.head_size);
    const T* keys = row + s.heads * s.head_size;
    write_token(keys, keys + s.kv_heads * s.head_size, c, step.slots[m]);
  });
}

}  // namespace headrace
