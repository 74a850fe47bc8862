#include "abi.h"

#include <cmath>

#include "../common/torch/cuda_call.h"
#include "../common/torch/tensors.h"

namespace llmctl {
namespace {

struct Operands {
  Tensor input;
  OptionalTensor bias, residual;
  Tensor positions, output;
  int64_t rows, inner, width;
  llmctl_dropout dropout;
};

struct Cpu {
  static void run(int dtype, const Operands &o) {
    for_rows(o.rows, o.inner, [&](int64_t first, int64_t stop) {
      llmctl_cpu_bias_dropout_add(dtype, data(o.input), data(o.bias), data(o.residual), mutable_data(o.output),
                                  static_cast<const int64_t *>(data(o.positions)), o.inner, o.width, &o.dropout, first,
                                  stop);
    });
  }
};

struct Cuda {
  static void run(int dtype, const Operands &o) {
    const CudaCall call(o.input, "bias_dropout_add");
    call.check(llmctl_cuda_bias_dropout_add(dtype, data(o.input), data(o.bias), data(o.residual), mutable_data(o.output),
                                            static_cast<const int64_t *>(data(o.positions)), o.rows, o.inner, o.width,
                                            &o.dropout, call.stream()));
  }
};

llmctl_dropout dropout_of(double probability, int64_t seed) {
  LLMCTL_CHECK(probability >= 0.0 && probability < 1.0, "llmctl::bias_dropout_add: the probability is ", probability,
               ", not in [0, 1)");
  const double threshold = std::nearbyint(probability * 4294967296.0);
  return {static_cast<uint64_t>(seed), static_cast<uint32_t>(std::min(threshold, 4294967295.0)),
          1.0 / (1.0 - probability)};
}

template <typename Device>
Tensor run(const Tensor &input, const OptionalTensor &bias, const OptionalTensor &residual, const Tensor &positions,
           double probability, int64_t seed) {
  const char *op = "bias_dropout_add";
  const int dtype = dtype_of(input, op);
  LLMCTL_CHECK(input.dim() >= 2, "llmctl::", op, ": the input has ", input.dim(), " dims, not rows and channels");
  if (bias) check_vector(*bias, input, op, "bias");
  if (residual) check_like(*residual, input, op, "residual");
  LLMCTL_CHECK(positions.scalar_type() == ScalarType::Long && positions.dim() == 1 &&
                   positions.size(0) == input.size(0) && same_device(positions, input),
               "llmctl::", op, ": positions are not one int64 for each row of the input, on its device");
  const Tensor rows = packed(input), output = unwritten(rows, rows.sizes());
  const int64_t count = input.size(0), inner = count == 0 ? 0 : input.numel() / count;
  if (inner == 0) return output;
  Device::run(dtype, {rows, packed(bias), packed(residual), packed(positions), output, count, inner, last_size(input),
                      dropout_of(probability, seed)});
  return output;
}

}  // namespace
}  // namespace llmctl

STABLE_TORCH_LIBRARY_FRAGMENT(llmctl, library) {
  library.def(
      "bias_dropout_add(Tensor input, Tensor? bias, Tensor? residual, Tensor positions, float probability, int seed) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CPU, library) {
  library.impl("bias_dropout_add", TORCH_BOX(&llmctl::run<llmctl::Cpu>));
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CUDA, library) {
  library.impl("bias_dropout_add", TORCH_BOX(&llmctl::run<llmctl::Cuda>));
}
