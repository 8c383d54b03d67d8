// bf16 by AVX2, for the products of a CPU: eight at a time to fp32 and back, rounded once.
#pragma once
#include <immintrin.h>

#include <cstdint>

#define AVX2 __attribute__((target("avx2,fma")))

namespace {

AVX2 inline __m256 widened8(const uint16_t* x) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

// To nearest, ties to even; NaN stays NaN.
AVX2 inline __m128i rounded8(__m256 v) {
  __m256i bits = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256 unordered = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  near = _mm256_blendv_epi8(near, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(unordered));
  near = _mm256_srli_epi32(near, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(near), _mm256_extracti128_si256(near, 1));
}

}  // namespace
