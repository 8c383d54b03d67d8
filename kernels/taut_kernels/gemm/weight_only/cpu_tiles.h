// Products by AMX: codes are widened to bf16 in a panel that stays in cache, then multiplied by tiles.
#pragma once
#include "cpu_layer.h"

namespace {

constexpr int64_t kPanel = 256;  // inputs widened at once, in whole groups: what a core's first cache holds of a tile

// bf16 pairs of two neighbouring inputs, from the codes of sixteen words; one vector each pair. It holds
// every difference of two codes of 8 bits, too: none is above 255.
template <int BITS, bool ZEROS>
AMX void widen_panel(const Layer& layer, int64_t block, int64_t group, int64_t groups, uint16_t* panel) {
  alignas(64) uint16_t values[32];  // of 4-bit codes in two's complement; with zero points of code + 16
  for (int i = 0; i < 32; ++i) {
    float value = static_cast<float>(ZEROS ? i - 16 : (i % 16 ^ 8) - 8);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    values[i] = static_cast<uint16_t>(bits >> 16);
  }
  const __m512i table = _mm512_load_si512(values), low = _mm512_set1_epi16(15), eight = _mm512_set1_epi16(8);
  int64_t words = layer.words / layer.groups;
  for (int64_t g = group; g < group + groups; ++g) {
    __m512i shift = eight, zero = _mm512_setzero_si512();
    if (ZEROS) {
      const int8_t* from = layer.zero + (block * layer.groups + g) * kBlock;
      zero = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      __m512i wide = _mm512_and_si512(zero, _mm512_set1_epi32(0xffff));
      shift = _mm512_sub_epi16(eight, _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16)));
    }
    const int32_t* w = layer.weight + (block * layer.words + g * words) * kBlock;
    for (int64_t i = 0; i < words; ++i, w += kBlock) {
      __m512i word = _mm512_loadu_si512(w);
#pragma GCC unroll 4
      for (int pair = 0; pair < 16 / BITS; ++pair, panel += 2 * kBlock) {
        __m512i two;
        if (BITS == 4) {
          two = _mm512_srli_epi16(word, 4 * pair);
          if (ZEROS)
            two = _mm512_add_epi16(_mm512_xor_si512(_mm512_and_si512(two, low), eight), shift);
          two = _mm512_permutexvar_epi16(two, table);
        } else {
          __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(word, 24 - 8 * pair), 24);
          __m512i odd = _mm512_srai_epi32(_mm512_slli_epi32(word, 8 - 8 * pair), 24);
          if (ZEROS) even = _mm512_sub_epi32(even, zero), odd = _mm512_sub_epi32(odd, zero);
          even = _mm512_castps_si512(_mm512_cvtepi32_ps(even));
          odd = _mm512_castps_si512(_mm512_cvtepi32_ps(odd));
          two = _mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
        }
        _mm512_storeu_si512(panel, two);
      }
    }
  }
}

// The compiler does not know that tiles read and write memory.
inline void settle_memory(const void* of) { asm volatile("" ::"r"(of) : "memory"); }

// Tiles 0 to 3 hold sums of up to 16 rows, 4 the rows, 5 and 6 weights.
AMX void configure(int rows) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t width[16] = {64, 64, 64, 64, 64, 64, 64};
    uint8_t height[16] = {16, 16, 16, 16, 16, 16, 16};
  } tiles;
  std::fill_n(tiles.height, 5, static_cast<uint8_t>(rows));
  settle_memory(&tiles);
  _tile_loadconfig(&tiles);
}

// Sums of up to 16 rows and of one group, of a tile's blocks: [4][16][16].
AMX void group_amx(const uint16_t* x, int64_t K, int64_t inputs, const uint16_t* panel, int64_t apart, int blocks,
                   float* sums) {
  settle_memory(panel);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < inputs; k += 32) {
    const uint16_t* from = panel + k * kBlock;
    _tile_loadd(4, x + k, 2 * K);
    _tile_loadd(5, from, 4 * kBlock);
    _tile_dpbf16ps(0, 4, 5);
    if (blocks < 2) continue;
    _tile_loadd(6, from + apart, 4 * kBlock);
    _tile_dpbf16ps(1, 4, 6);
    if (blocks < 3) continue;
    _tile_loadd(5, from + 2 * apart, 4 * kBlock);
    _tile_dpbf16ps(2, 4, 5);
    if (blocks < 4) continue;
    _tile_loadd(6, from + 3 * apart, 4 * kBlock);
    _tile_dpbf16ps(3, 4, 6);
  }
  constexpr int kSums = 16 * kBlock;
  _tile_stored(0, sums, 4 * kBlock);
  if (blocks > 1) _tile_stored(1, sums + kSums, 4 * kBlock);
  if (blocks > 2) _tile_stored(2, sums + 2 * kSums, 4 * kBlock);
  if (blocks > 3) _tile_stored(3, sums + 3 * kSums, 4 * kBlock);
  settle_memory(sums);
}

// Ask for a later group of the tile's blocks, or of the next tile's, while the tiles multiply.
void fetch_group(const Layer& layer, int64_t block, int blocks, int64_t group) {
  int64_t words = layer.words / layer.groups;
  if (group >= layer.groups) block += kTile, group -= layer.groups;
  for (int b = 0; b < blocks; ++b)
    for (int64_t i = 0; i < words; ++i) fetch(layer.weight + ((block + b) * layer.words + group * words + i) * kBlock);
}

template <int BITS, bool ZEROS>
AMX void tile_amx(const Rows& rows, const Layer& layer, int64_t block, int blocks, int& height, uint16_t* panel,
                  float* total) {
  int64_t inputs = layer.K / layer.groups, some = std::max<int64_t>(1, kPanel / inputs), apart = some * inputs * kBlock;
  std::fill_n(total, rows.M * kTile * kBlock, 0.0f);
  for (int64_t group = 0; group < layer.groups; group += some) {
    int64_t groups = std::min(some, layer.groups - group);
    for (int b = 0; b < blocks; ++b) widen_panel<BITS, ZEROS>(layer, block + b, group, groups, panel + b * apart);
    for (int64_t m = 0; m < rows.M; m += 16) {
      int count = static_cast<int>(std::min<int64_t>(16, rows.M - m));
      if (count != height) configure(height = count);
      for (int64_t g = 0; g < groups; ++g) {
        alignas(64) float sums[kTile * 16 * kBlock];
        int64_t k = (group + g) * inputs;
        if (m == 0) fetch_group(layer, block, blocks, group + some + g);
        group_amx(rows.x + m * layer.K + k, layer.K, inputs, panel + g * inputs * kBlock, apart, blocks, sums);
        for (int b = 0; b < blocks; ++b) {
          __m512 scale = widened16(layer.scale + ((block + b) * layer.groups + group + g) * kBlock);
          for (int i = 0; i < count; ++i) {
            float* to = total + ((m + i) * kTile + b) * kBlock;
            __m512 sum = _mm512_load_ps(sums + (b * 16 + i) * kBlock);
            _mm512_storeu_ps(to, _mm512_fmadd_ps(scale, sum, _mm512_loadu_ps(to)));
          }
        }
      }
    }
  }
}

// Of memory, whole: a tile whose rows lie across lines takes twice as long to load.
template <typename T>
struct alignas(64) Line {
  T values[64 / sizeof(T)];
};

AMX void multiply_amx(const Rows& rows, bool is_wide, const Layer& layer, uint16_t* y) {
  int64_t tiles = (layer.N + kTile * kBlock - 1) / (kTile * kBlock), inputs = layer.K / layer.groups;
#pragma omp parallel if (rows.M * layer.N * layer.K > kParallel)
  {
    std::vector<Line<uint16_t>> panel(kTile * std::max(kPanel, inputs) * kBlock / 32);
    std::vector<Line<float>> total(rows.M * kTile);
    int height = 0;
#pragma omp for
    for (int64_t tile = 0; tile < tiles; ++tile) {
      int64_t block = tile * kTile, first = block * kBlock;
      int blocks = static_cast<int>(std::min(kTile, (layer.N + kBlock - 1) / kBlock - block));
      int64_t count = std::min(blocks * kBlock, layer.N - first);
      auto multiply = is_wide ? (layer.zero ? tile_amx<8, true> : tile_amx<8, false>)
                              : (layer.zero ? tile_amx<4, true> : tile_amx<4, false>);
      multiply(rows, layer, block, blocks, height, panel[0].values, total[0].values);
      for (int64_t m = 0; m < rows.M; ++m)
        store(total[m * kTile].values, layer.bias ? layer.bias + first : nullptr, count,
              y + m * layer.N + first);
    }
    if (height) _tile_release();
  }
}

}  // namespace
