// Products by vectors: codes are widened to fp32 in registers, once for up to 4 or 8 rows.
#pragma once
#include "cpu_layer.h"

namespace {

// Rows in fp32, each by a power of two.
AVX2 void widen(const uint16_t* x, int64_t count, float factor, float* to) {
  __m256 by = _mm256_set1_ps(factor);
  for (int64_t i = 0; i < count; i += 8) _mm256_storeu_ps(to + i, _mm256_mul_ps(widened8(x + i), by));
}

// Sums of MR rows and NB blocks. Codes stay in the top bits of their words, so x comes by 2^(BITS - 32).
template <int BITS, bool ZEROS, int MR, int NB>
AVX2 void rows_avx2(const float* x, const Layer& layer, int64_t block, float* sums) {
  constexpr int kCodes = 32 / BITS;
  const __m256i top = _mm256_set1_epi32(static_cast<int>(~0u << (32 - BITS)));
  const __m256 unit = _mm256_set1_ps(static_cast<float>(1u << (32 - BITS)));
  const int32_t* w = layer.weight + block * layer.words * kBlock;
  int64_t words = layer.words / layer.groups;
  for (int64_t g = 0; g < layer.groups; ++g) {
    __m256 sum[MR][2 * NB], zero[2 * NB];
    for (int m = 0; m < MR; ++m)
      for (int h = 0; h < 2 * NB; ++h) sum[m][h] = _mm256_setzero_ps();
    if (ZEROS)
      for (int h = 0; h < 2 * NB; ++h) {
        const int8_t* from = layer.zero + ((block + h / 2) * layer.groups + g) * kBlock + h % 2 * 8;
        __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
        zero[h] = _mm256_mul_ps(_mm256_cvtepi32_ps(wide), unit);
      }
    for (int64_t i = g * words; i < (g + 1) * words; ++i) {
      __m256i word[2 * NB];
      for (int h = 0; h < 2 * NB; ++h) {
        const int32_t* from = w + (i + h / 2 * layer.words) * kBlock + h % 2 * 8;
        word[h] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        if (h % 2 == 0) fetch(from + kTile * layer.words * kBlock);
      }
#pragma GCC unroll 8
      for (int k = 0; k < kCodes; ++k) {
        __m256 code[2 * NB];
        for (int h = 0; h < 2 * NB; ++h) {
          __m256i high = _mm256_and_si256(_mm256_slli_epi32(word[h], 32 - BITS - place<BITS>(k)), top);
          code[h] = _mm256_cvtepi32_ps(high);
          if (ZEROS) code[h] = _mm256_sub_ps(code[h], zero[h]);
        }
        for (int m = 0; m < MR; ++m) {
          __m256 row = _mm256_broadcast_ss(x + m * layer.K + i * kCodes + k);
          for (int h = 0; h < 2 * NB; ++h) sum[m][h] = _mm256_fmadd_ps(code[h], row, sum[m][h]);
        }
      }
    }
    for (int h = 0; h < 2 * NB; ++h) {
      __m256 scale = widened8(layer.scale + ((block + h / 2) * layer.groups + g) * kBlock + h % 2 * 8);
      for (int m = 0; m < MR; ++m) {
        float* to = sums + m * kTile * kBlock + h * 8;
        _mm256_storeu_ps(to, _mm256_fmadd_ps(scale, sum[m][h], _mm256_loadu_ps(to)));
      }
    }
  }
}

// The codes at one place of sixteen words, as numbers.
template <int BITS>
AVX512 inline __m512 codes_at(__m512i word, int at, __m512 table) {
  if (BITS == 4) return _mm512_permutexvar_ps(_mm512_srli_epi32(word, at), table);  // by 4 bits alone
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(word, 24 - at), 24));
}

// The same with AVX-512; x is as it was.
template <int BITS, bool ZEROS, int MR, int NB>
AVX512 void rows_avx512(const float* x, const Layer& layer, int64_t block, float* sums) {
  constexpr int kCodes = 32 / BITS;
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  const int32_t* w = layer.weight + block * layer.words * kBlock;
  int64_t words = layer.words / layer.groups;
  for (int64_t g = 0; g < layer.groups; ++g) {
    __m512 sum[MR][NB], zero[NB];
    for (int m = 0; m < MR; ++m)
      for (int b = 0; b < NB; ++b) sum[m][b] = _mm512_setzero_ps();
    if (ZEROS)
      for (int b = 0; b < NB; ++b) {
        const int8_t* from = layer.zero + ((block + b) * layer.groups + g) * kBlock;
        __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        zero[b] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(narrow));
      }
    for (int64_t i = g * words; i < (g + 1) * words; ++i) {
      __m512i word[NB];
      for (int b = 0; b < NB; ++b) {
        const int32_t* from = w + (i + b * layer.words) * kBlock;
        word[b] = _mm512_loadu_si512(from);
        fetch(from + kTile * layer.words * kBlock);
      }
#pragma GCC unroll 8
      for (int k = 0; k < kCodes; ++k) {
        __m512 code[NB];
        for (int b = 0; b < NB; ++b) {
          code[b] = codes_at<BITS>(word[b], place<BITS>(k), table);
          if (ZEROS) code[b] = _mm512_sub_ps(code[b], zero[b]);
        }
        for (int m = 0; m < MR; ++m) {
          __m512 row = _mm512_set1_ps(x[m * layer.K + i * kCodes + k]);
          for (int b = 0; b < NB; ++b) sum[m][b] = _mm512_fmadd_ps(code[b], row, sum[m][b]);
        }
      }
    }
    for (int b = 0; b < NB; ++b) {
      __m512 scale = widened16(layer.scale + ((block + b) * layer.groups + g) * kBlock);
      for (int m = 0; m < MR; ++m) {
        float* to = sums + (m * kTile + b) * kBlock;
        _mm512_storeu_ps(to, _mm512_fmadd_ps(scale, sum[m][b], _mm512_loadu_ps(to)));
      }
    }
  }
}


template <int BITS, bool ZEROS>
void some_rows(int isa, int count, const float* x, const Layer& layer, int64_t block, int64_t blocks, float* sums) {
  int64_t b = 0;
  // As many sums as registers hold, and enough to hide how long an addition takes.
  if (isa == kAvx2) {
    for (; count <= 2 && b + 2 <= blocks; b += 2)
      count == 1 ? rows_avx2<BITS, ZEROS, 1, 2>(x, layer, block + b, sums + b * kBlock)
                 : rows_avx2<BITS, ZEROS, 2, 2>(x, layer, block + b, sums + b * kBlock);
    for (; b < blocks; ++b)
      count <= 2 ? rows_avx2<BITS, ZEROS, 2, 1>(x, layer, block + b, sums + b * kBlock)
                 : rows_avx2<BITS, ZEROS, 4, 1>(x, layer, block + b, sums + b * kBlock);
    return;
  }
  for (; count <= 4 && b + 4 <= blocks; b += 4)
    count == 1   ? rows_avx512<BITS, ZEROS, 1, 4>(x, layer, block + b, sums + b * kBlock)
    : count == 2 ? rows_avx512<BITS, ZEROS, 2, 4>(x, layer, block + b, sums + b * kBlock)
                 : rows_avx512<BITS, ZEROS, 4, 4>(x, layer, block + b, sums + b * kBlock);
  for (; b + 2 <= blocks; b += 2)
    count <= 4 ? rows_avx512<BITS, ZEROS, 4, 2>(x, layer, block + b, sums + b * kBlock)
               : rows_avx512<BITS, ZEROS, 8, 2>(x, layer, block + b, sums + b * kBlock);
  for (; b < blocks; ++b)
    count <= 4 ? rows_avx512<BITS, ZEROS, 4, 1>(x, layer, block + b, sums + b * kBlock)
               : rows_avx512<BITS, ZEROS, 8, 1>(x, layer, block + b, sums + b * kBlock);
}
void multiply_tile(const float* x, int64_t M, int isa, bool is_wide, const Layer& layer, int64_t tile, uint16_t* y) {
  int64_t first = tile * kTile, blocks = std::min(kTile, (layer.N + kBlock - 1) / kBlock - first);
  int64_t count = std::min(blocks * kBlock, layer.N - first * kBlock);
  int64_t most = isa == kAvx2 ? kMost / 2 : kMost;
  for (int64_t m = 0; m < M; m += most) {
    float sums[kMost * kTile * kBlock] = {};
    int rows = static_cast<int>(std::min(most, M - m));
    auto multiply = is_wide ? (layer.zero ? some_rows<8, true> : some_rows<8, false>)
                            : (layer.zero ? some_rows<4, true> : some_rows<4, false>);
    multiply(isa, rows, x + m * layer.K, layer, first, blocks, sums);
    for (int i = 0; i < rows; ++i)
      store(sums + i * kTile * kBlock, layer.bias ? layer.bias + first * kBlock : nullptr, count,
            y + (m + i) * layer.N + first * kBlock);
  }
}

void multiply_vectors(const Rows& rows, int isa, bool is_wide, const Layer& layer, uint16_t* y) {
  static thread_local std::vector<float> kept;  // a token's buffer is that of the token before
  std::vector<float>& x = kept;                 // named once: other threads would see their own
  int64_t padded = (rows.M + kMost - 1) / kMost * kMost;
  x.resize(padded * layer.K);
  float factor = isa == kAvx2 ? std::ldexp(1.0f, (is_wide ? 8 : 4) - 32) : 1.0f;
  widen(rows.x, rows.M * layer.K, factor, x.data());
  std::fill(x.begin() + rows.M * layer.K, x.end(), 0.0f);
  int64_t tiles = (layer.N + kTile * kBlock - 1) / (kTile * kBlock);
#pragma omp parallel for if (rows.M * layer.N * layer.K > kParallel)
  for (int64_t tile = 0; tile < tiles; ++tile) multiply_tile(x.data(), rows.M, isa, is_wide, layer, tile, y);
}

}  // namespace
