// W8A8 on a CPU, one pass: quantise rows, multiply codes exactly, scale. Contract: cpu_linear.py.
//
// Weights lie as [N/16][K/4][16][4] int8, so that 64 bytes hold four neighbouring inputs of sixteen
// outputs: both instruction sets stream them once and need no sum across a vector per output.
#include <immintrin.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "../cpu_bf16.h"

using torch::stable::Tensor;

namespace {

constexpr int64_t kBlock = 16;      // outputs of a block
constexpr int64_t kTile = 4;        // blocks of a tile
constexpr int64_t kParallel = 1 << 16;  // multiplications below which threads cost more than they save

#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))

struct Scaling {
  const float* scale;     // of all rows where it is static
  const int32_t* zero;    // likewise, with asymmetric codes
  bool symmetric;
};

inline float widened(uint16_t x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

struct Range {
  float low, high;
};

// Least and largest element; NaN in both where an element is NaN.
AVX2 Range range_of(const uint16_t* x, int64_t K) {
  __m256 low = _mm256_set1_ps(widened(x[0])), high = low, odd = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + 8 <= K; k += 8) {
    __m256 v = widened8(x + k);
    low = _mm256_min_ps(low, v);
    high = _mm256_max_ps(high, v);
    odd = _mm256_or_ps(odd, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  }
  float lows[8], highs[8];
  _mm256_storeu_ps(lows, low);
  _mm256_storeu_ps(highs, high);
  Range range{*std::min_element(lows, lows + 8), *std::max_element(highs, highs + 8)};
  bool is_odd = _mm256_movemask_ps(odd) != 0;
  for (; k < K; ++k) {
    float v = widened(x[k]);
    is_odd |= std::isnan(v);
    range = {std::min(range.low, v), std::max(range.high, v)};
  }
  float nan = std::numeric_limits<float>::quiet_NaN();
  return is_odd ? Range{nan, nan} : range;
}

// Scale and zero point of one row, as compressed-tensors has them.
void scaling_of(const uint16_t* x, int64_t K, const Scaling& given, float& scale, int32_t& zero) {
  zero = given.zero ? *given.zero : 0;
  if (given.scale) {
    scale = *given.scale;
    return;
  }
  Range range = range_of(x, K);
  if (given.symmetric) {
    scale = std::max(-range.low, range.high) / 127.0f;
    return;
  }
  scale = (range.high - range.low) / 255.0f;
  zero = scale > 0 ? static_cast<int32_t>(std::nearbyint(-128.0f - range.low / scale)) : 0;
}

// Codes of one row, in 16 bits; columns from K on are 0.
AVX2 void quantise(const uint16_t* x, int64_t K, int64_t padded, float scale, int32_t zero,
                   int16_t* codes) {
  bool is_flat = !(scale > 0);  // 0 or NaN: codes do not matter
  __m256 divisor = _mm256_set1_ps(is_flat ? 1.0f : scale);
  __m256i shift = _mm256_set1_epi32(zero);
  __m256 most = _mm256_set1_ps(1e6f), least = _mm256_set1_ps(-1e6f);  // within an int32
  __m256i low = _mm256_set1_epi32(-128), high = _mm256_set1_epi32(127);
  for (int64_t k = 0; k < padded; k += 8) {
    uint16_t part[8] = {};
    const uint16_t* from = x + k;
    if (k + 8 > K) {
      if (k < K) std::memcpy(part, from, (K - k) * 2);
      from = part;
    }
    __m256 v = _mm256_div_ps(widened8(from), divisor);
    v = _mm256_max_ps(_mm256_min_ps(v, most), least);
    __m256i code = _mm256_add_epi32(_mm256_cvtps_epi32(v), shift);
    code = _mm256_min_epi32(_mm256_max_epi32(code, low), high);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + k), words);
  }
}

// Sums of MR rows and one block, exact in 32 bits: products of 16 bits, added in pairs.
template <int MR>
AVX2 void block_avx2(const int16_t* x, int64_t stride, const int8_t* w, int64_t quads, int32_t* sums) {
  __m256i total[MR][4];
  for (int m = 0; m < MR; ++m)
    for (int i = 0; i < 4; ++i) total[m][i] = _mm256_setzero_si256();
  for (int64_t q = 0; q < quads; ++q) {
    __m256i rows[MR];
    for (int m = 0; m < MR; ++m) {
      int64_t four;
      std::memcpy(&four, x + m * stride + 4 * q, 8);
      rows[m] = _mm256_set1_epi64x(four);
    }
    for (int i = 0; i < 4; ++i) {
      const __m128i* from = reinterpret_cast<const __m128i*>(w + 64 * q + 16 * i);
      __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(from));
      for (int m = 0; m < MR; ++m)
        total[m][i] = _mm256_add_epi32(total[m][i], _mm256_madd_epi16(wide, rows[m]));
    }
  }
  for (int m = 0; m < MR; ++m)
    for (int i = 0; i < 4; ++i) {
      int32_t pairs[8];
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs), total[m][i]);
      for (int j = 0; j < 4; ++j) sums[m * kBlock * kTile + 4 * i + j] = pairs[2 * j] + pairs[2 * j + 1];
    }
}

// The same of NB blocks, of unsigned rows (codes + 128).
template <int MR, int NB>
VNNI void blocks_vnni(const uint8_t* x, int64_t stride, const int8_t* w, int64_t quads, int32_t* sums) {
  __m512i total[MR][NB];
  for (int m = 0; m < MR; ++m)
    for (int b = 0; b < NB; ++b) total[m][b] = _mm512_setzero_si512();
  for (int64_t q = 0; q < quads; ++q) {
    __m512i wide[NB];
    for (int b = 0; b < NB; ++b) wide[b] = _mm512_loadu_si512(w + 64 * (q + b * quads));
    for (int m = 0; m < MR; ++m) {
      int32_t four;
      std::memcpy(&four, x + m * stride + 4 * q, 4);
      __m512i row = _mm512_set1_epi32(four);
      for (int b = 0; b < NB; ++b) total[m][b] = _mm512_dpbusd_epi32(total[m][b], row, wide[b]);
    }
  }
  for (int m = 0; m < MR; ++m)
    for (int b = 0; b < NB; ++b) _mm512_storeu_si512(sums + (m * kTile + b) * kBlock, total[m][b]);
}

template <int MR>
void tile_avx2(const int16_t* x, int64_t stride, const int8_t* w, int64_t quads, int blocks, int32_t* sums) {
  for (int b = 0; b < blocks; ++b) block_avx2<MR>(x, stride, w + 64 * quads * b, quads, sums + kBlock * b);
}

template <int MR>
void tile_vnni(const uint8_t* x, int64_t stride, const int8_t* w, int64_t quads, int blocks, int32_t* sums) {
  switch (blocks) {
    case 4: return blocks_vnni<MR, 4>(x, stride, w, quads, sums);
    case 3: return blocks_vnni<MR, 3>(x, stride, w, quads, sums);
    case 2: return blocks_vnni<MR, 2>(x, stride, w, quads, sums);
    default: return blocks_vnni<MR, 1>(x, stride, w, quads, sums);
  }
}

AVX2 void unsigned_codes(const int16_t* words, int64_t count, uint8_t* bytes) {
  for (int64_t k = 0; k < count; k += 8) {
    __m128i code = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words + k));
    code = _mm_add_epi16(code, _mm_set1_epi16(128));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(bytes + k), _mm_packus_epi16(code, code));
  }
}

struct Rows {
  std::vector<int16_t> words;   // AVX2
  std::vector<uint8_t> bytes;   // VNNI
  std::vector<float> scale;
  std::vector<int32_t> zero;    // what one of every weight is too much
  int64_t stride;
};

void quantise_rows(const uint16_t* x, int64_t M, int64_t K, const Scaling& given, bool vnni, Rows& rows) {
  rows.stride = (K + 7) / 8 * 8;
  rows.words.resize((vnni ? 1 : M) * rows.stride);
  if (vnni) rows.bytes.resize(M * rows.stride);
  rows.scale.resize(M);
  rows.zero.resize(M);
  for (int64_t m = 0; m < M; ++m) {
    int16_t* words = rows.words.data() + (vnni ? 0 : m * rows.stride);
    scaling_of(x + m * K, K, given, rows.scale[m], rows.zero[m]);
    quantise(x + m * K, K, rows.stride, rows.scale[m], rows.zero[m], words);
    if (!vnni) continue;
    uint8_t* bytes = rows.bytes.data() + m * rows.stride;
    unsigned_codes(words, rows.stride, bytes);
    rows.zero[m] += 128;
  }
}

struct Layer {
  const int8_t* weight;
  const float* scale;
  const int32_t* sums;
  const uint16_t* bias;
  int64_t N, quads;
};

// Scale sums[0 ...] to outputs first to last of one row: two products, a sum and one rounding.
AVX2 void store(const int32_t* sums, float scale, int32_t zero, const Layer& layer, int64_t first,
                int64_t last, uint16_t* y) {
  int64_t n = first;
  for (; n + 8 <= last; n += 8) {
    __m256i sum = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums + n - first));
    __m256i of_weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(layer.sums + n));
    sum = _mm256_sub_epi32(sum, _mm256_mullo_epi32(_mm256_set1_epi32(zero), of_weights));
    __m256 v = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(scale));
    v = _mm256_mul_ps(v, _mm256_loadu_ps(layer.scale + n));
    if (layer.bias) v = _mm256_add_ps(v, widened8(layer.bias + n));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + n), rounded8(v));
  }
  for (; n < last; ++n) {
    int32_t sum = sums[n - first] - zero * layer.sums[n];
    float v = static_cast<float>(sum) * scale * layer.scale[n];
    y[n] = rounded(layer.bias ? v + widened(layer.bias[n]) : v);
  }
}

void multiply_tile(const Rows& rows, int64_t m, int count, bool vnni, const Layer& layer, int64_t tile,
                   uint16_t* y) {
  int32_t sums[6 * kTile * kBlock];
  int64_t first = tile * kTile * kBlock;
  int blocks = static_cast<int>(std::min(kTile, (layer.N - first + kBlock - 1) / kBlock));
  const int8_t* w = layer.weight + first * 4 * layer.quads;
  if (vnni) {
    const uint8_t* x = rows.bytes.data() + m * rows.stride;
    switch (count) {
      case 6: tile_vnni<6>(x, rows.stride, w, layer.quads, blocks, sums); break;
      case 5: tile_vnni<5>(x, rows.stride, w, layer.quads, blocks, sums); break;
      case 4: tile_vnni<4>(x, rows.stride, w, layer.quads, blocks, sums); break;
      case 3: tile_vnni<3>(x, rows.stride, w, layer.quads, blocks, sums); break;
      case 2: tile_vnni<2>(x, rows.stride, w, layer.quads, blocks, sums); break;
      default: tile_vnni<1>(x, rows.stride, w, layer.quads, blocks, sums);
    }
  } else {
    const int16_t* x = rows.words.data() + m * rows.stride;
    if (count == 2)
      tile_avx2<2>(x, rows.stride, w, layer.quads, blocks, sums);
    else
      tile_avx2<1>(x, rows.stride, w, layer.quads, blocks, sums);
  }
  int64_t last = std::min(layer.N, first + blocks * kBlock);
  for (int i = 0; i < count; ++i)
    store(sums + i * kTile * kBlock, rows.scale[m + i], rows.zero[m + i], layer, first, last,
          y + (m + i) * layer.N);
}

template <typename T>
const T* pointer(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const T*>(tensor->data_ptr()) : nullptr;
}

Tensor int8_linear(const Tensor& x, const Tensor& weight, const Tensor& scale, const Tensor& sums,
                   const std::optional<Tensor>& bias, const std::optional<Tensor>& input_scale,
                   const std::optional<Tensor>& input_zero, bool symmetric, bool vnni) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == torch::headeronly::ScalarType::BFloat16,
                  "x must be [M, K] bfloat16, contiguous");
  int64_t M = x.size(0), K = x.size(1), N = scale.size(0);
  STD_TORCH_CHECK(weight.dim() == 4 && weight.size(0) == (N + 15) / 16 && weight.size(1) == (K + 3) / 4,
                  "weight is not packed for ", N, " outputs of ", K, " inputs");
  STD_TORCH_CHECK(sums.numel() == N && (!bias || bias->numel() == N), "sums and bias must have ", N, " elements");
  Tensor y = torch::stable::new_empty(x, {M, N});
  Scaling given{pointer<float>(input_scale), pointer<int32_t>(input_zero), symmetric};
  Layer layer{static_cast<const int8_t*>(weight.data_ptr()), static_cast<const float*>(scale.data_ptr()),
              static_cast<const int32_t*>(sums.data_ptr()), pointer<uint16_t>(bias), N, (K + 3) / 4};
  uint16_t* to = static_cast<uint16_t*>(y.data_ptr());
  static thread_local Rows kept;  // a token's buffers are those of the token before
  Rows& rows = kept;  // named once: other threads would see their own
  quantise_rows(static_cast<const uint16_t*>(x.data_ptr()), M, K, given, vnni, rows);
  int most = vnni ? 6 : 2;
  int64_t tiles = (N + kTile * kBlock - 1) / (kTile * kBlock);
#pragma omp parallel for if (M * N * K > kParallel)
  for (int64_t tile = 0; tile < tiles; ++tile)
    for (int64_t m = 0; m < M; m += most)
      multiply_tile(rows, m, static_cast<int>(std::min<int64_t>(most, M - m)), vnni, layer, tile, to);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(taut, CPU, m) { m.impl("int8_linear_cpu", TORCH_BOX(&int8_linear)); }
