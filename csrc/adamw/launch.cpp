#include "abi.h"

#include <cmath>

#include "../common/launch/grid.h"
#include "cuda.h"

namespace {

using llmctl::AdamW;
using llmctl::AdamWTensor;
using llmctl::Kernel;
using llmctl::KernelTypes;

const Kernel adamw("adamw", KernelTypes::kNoDouble);

AdamW with_constants(const llmctl_adamw &c, const llmctl_adamw_dtypes &dtypes) {
  AdamW arguments{};
  arguments.copy_dtype = dtypes.copy;
  arguments.has_low_average = dtypes.exp_avg == LLMCTL_BFLOAT16;
  arguments.has_low_square = dtypes.exp_avg_sq == LLMCTL_BFLOAT16;
  arguments.has_remainders = dtypes.has_remainders != 0;
  arguments.kept = static_cast<float>(1.0 - c.learning_rate * c.weight_decay);
  arguments.beta1 = static_cast<float>(c.beta1);
  arguments.one_minus_beta1 = static_cast<float>(1.0 - c.beta1);
  arguments.beta2 = static_cast<float>(c.beta2);
  arguments.one_minus_beta2 = static_cast<float>(1.0 - c.beta2);
  arguments.step_size = static_cast<float>(c.learning_rate / c.correction1);
  arguments.over_root_correction2 = static_cast<float>(1.0 / std::sqrt(c.correction2));
  arguments.epsilon = static_cast<float>(c.epsilon);
  arguments.over_divisor = static_cast<float>(1.0 / c.divisor);
  return arguments;
}

int64_t blocks_of(int64_t numel) { return (numel + llmctl::kAdamWChunk - 1) / llmctl::kAdamWChunk; }

}  // namespace

extern "C" int llmctl_cuda_adamw(const llmctl_adamw_dtypes *dtypes, const llmctl_adamw_tensor *tensors, int64_t count,
                                 const llmctl_adamw *constants, const double *divisor, void *stream) {
  AdamW arguments = with_constants(*constants, *dtypes);
  arguments.divisor = divisor;
  int64_t blocks = 0;
  for (int64_t number = 0; number < count; ++number) {
    const llmctl_adamw_tensor &t = tensors[number];
    if (t.numel > 0) {
      /* Whole packs for all types: four elements of any type take at most 16 bytes. */
      const bool packed = llmctl::packs(LLMCTL_FLOAT32, 4, {t.master, t.grad, t.exp_avg, t.exp_avg_sq, t.copy});
      arguments.tensors[arguments.count++] =
          AdamWTensor{t.master, t.grad, t.exp_avg, t.exp_avg_sq, t.copy, t.numel, static_cast<int>(blocks), packed};
      blocks += blocks_of(t.numel);
    }
    const bool is_last = number + 1 == count;
    if (blocks == 0 || (!is_last && arguments.count < llmctl::kAdamWTensors)) continue;
    const int error = llmctl::launch(adamw, dtypes->grad, {blocks, llmctl::kAdamWThreads, 1}, &arguments, stream);
    if (error != 0) return error;
    arguments.count = 0;
    blocks = 0;
  }
  return 0;
}
