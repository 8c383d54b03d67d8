// Weights of 4 or 8 bits by bf16 rows on a CPU. Contract and layout: cpu_linear.py.
//
// Codes are widened in registers (AVX2, AVX-512), or to bf16 in a panel that stays in cache (AMX), and
// multiplied as the integers they are; a group's sum is scaled once, in fp32.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <optional>

#include "cpu_tiles.h"
#include "cpu_vectors.h"

using torch::stable::Tensor;

namespace {

constexpr int64_t kFewest = 2;  // rows that AMX does not multiply

template <typename T>
const T* pointer(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const T*>(tensor->data_ptr()) : nullptr;
}

// Linux gives a process the tiles (component 18 of its state) when it asks.
bool has_tiles() {
  constexpr int kRequest = 0x1023, kTiles = 18;
  static const bool given = syscall(SYS_arch_prctl, kRequest, kTiles) == 0;
  return given;
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& scale, const std::optional<Tensor>& zero,
              const std::optional<Tensor>& bias, int64_t N, int64_t isa) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == ScalarType::BFloat16,
                  "x must be [M, K] bfloat16, contiguous");
  int64_t M = x.size(0), K = x.size(1), blocks = (N + kBlock - 1) / kBlock;
  STD_TORCH_CHECK(weight.dim() == 3 && weight.size(0) == blocks && (weight.size(1) * 8 == K || weight.size(1) * 4 == K),
                  "weight is not packed for ", N, " outputs of ", K, " inputs");
  bool is_wide = weight.size(1) * 4 == K;
  STD_TORCH_CHECK(scale.dim() == 3 && scale.size(0) == blocks && scale.size(1) > 0 && K % (32 * scale.size(1)) == 0,
                  "scale is not packed for groups of a multiple of 32 of ", K, " inputs");
  STD_TORCH_CHECK(!zero || zero->numel() == scale.numel(), "zero must be as scale");
  STD_TORCH_CHECK(!bias || bias->numel() == N, "bias must have ", N, " elements");
  STD_TORCH_CHECK(isa != kAmx || has_tiles(), "this system gives no AMX tiles");
  Tensor y = torch::stable::new_empty(x, {M, N});
  Layer layer{static_cast<const int32_t*>(weight.data_ptr()), static_cast<const uint16_t*>(scale.data_ptr()),
              pointer<int8_t>(zero), pointer<uint16_t>(bias), N, K, scale.size(1), weight.size(1)};
  Rows rows{static_cast<const uint16_t*>(x.data_ptr()), M};
  uint16_t* to = static_cast<uint16_t*>(y.data_ptr());
  // One or two rows leave the tiles idle, and widening to a panel costs more than widening in registers.
  if (isa == kAmx && M > kFewest)
    multiply_amx(rows, is_wide, layer, to);
  else
    multiply_vectors(rows, std::min<int>(static_cast<int>(isa), kAvx512), is_wide, layer, to);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(taut, CPU, m) { m.impl("weight_only_linear_cpu", TORCH_BOX(&linear)); }
