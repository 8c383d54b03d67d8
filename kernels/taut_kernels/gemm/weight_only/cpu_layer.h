// What both ways to multiply share: the layer's layout, and how a row of sums is stored.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../cpu_bf16.h"

namespace {

enum Isa { kAvx2, kAvx512, kAmx };

constexpr int64_t kBlock = 16;          // outputs of a block
constexpr int64_t kTile = 4;            // blocks of a tile, one thread's
constexpr int64_t kMost = 8;            // rows multiplied at once without AMX
constexpr int64_t kParallel = 1 << 16;  // multiplications below which threads cost more than they save

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-bf16")))

struct Rows {
  const uint16_t* x;  // [M, K] bf16
  int64_t M;
};

struct Layer {
  const int32_t* weight;   // [blocks, K / codes of a word, 16]
  const uint16_t* scale;   // [blocks, groups, 16] bf16
  const int8_t* zero;      // likewise, or null
  const uint16_t* bias;
  int64_t N, K, groups, words;
};

// Where a word has input k of its own: even ones in its low half, odd ones in its high half.
template <int BITS>
constexpr int place(int k) {
  return (k & 1) * 16 + (k >> 1) * BITS;
}

// Ask for a line in good time: a core does not see by itself where the next block begins. GCC drops a
// function that only prefetches, so this is no builtin of it; any address may be asked for.
inline void fetch(const int32_t* line) { asm volatile("prefetcht1 (%0)" ::"r"(line)); }

AVX512 inline __m512 widened16(const uint16_t* x) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// One row's outputs: the bias and one rounding.
AVX2 void store(const float* sums, const uint16_t* bias, int64_t count, uint16_t* y) {
  for (int64_t n = 0; n < count; n += 8) {
    uint16_t part[8] = {};
    int64_t here = std::min<int64_t>(8, count - n);
    __m256 v = _mm256_loadu_ps(sums + n);
    if (bias) {
      std::memcpy(part, bias + n, here * 2);
      v = _mm256_add_ps(v, widened8(part));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(part), rounded8(v));
    std::memcpy(y + n, part, here * 2);
  }
}

}  // namespace
