#include "abi.h"

#include <cmath>

#include "../common/torch/cache_size.h"
#include "../common/torch/cuda_call.h"
#include "../common/torch/tensor_chunks.h"

namespace llmctl {
namespace {

int64_t bytes_of_moment(int dtype) { return dtype == LLMCTL_BFLOAT16 ? 2 : 4; }

/* Bytes of an element: master or remainder, both moments, and at the least 16 bits each for gradient and copy. */
int64_t least_bytes(const llmctl_adamw_dtypes &dtypes) {
  const int64_t of_moments = bytes_of_moment(dtypes.exp_avg) + bytes_of_moment(dtypes.exp_avg_sq);
  return (dtypes.has_remainders != 0 ? 2 : 4) + of_moments + 2 * 2;
}

/* At least one tensor: the dispatcher finds the kind of device by it. */
using Tensors = std::vector<Tensor>;

struct Cpu {
  static void step(const llmctl_adamw_dtypes &dtypes, const std::vector<llmctl_adamw_tensor> &list,
                   const Tensors &masters, llmctl_adamw constants, const double *divisor) {
    if (divisor != nullptr) {
      if (!std::isfinite(*divisor)) return;
      constants.divisor = *divisor;
    }
    int64_t elements = 0;
    for (const Tensor &master : masters) elements += master.numel();
    const bool past_caches = goes_past_caches(elements * least_bytes(dtypes));
    for_chunks(chunks_of(masters), [&](int64_t, const Chunk &chunk) {
      llmctl_cpu_adamw(&dtypes, &list[chunk.tensor], &constants, chunk.first, chunk.stop, past_caches);
    });
  }
};

struct Cuda {
  static void step(const llmctl_adamw_dtypes &dtypes, const std::vector<llmctl_adamw_tensor> &list,
                   const Tensors &masters, const llmctl_adamw &constants, const double *divisor) {
    const CudaCall call(masters[0], "adamw_");
    const int64_t count = static_cast<int64_t>(list.size());
    call.check(llmctl_cuda_adamw(&dtypes, list.data(), count, &constants, divisor, call.stream()));
  }
};

/* True if the masters are remainders of the copies. */
bool has_remainders(const Tensors &masters, const Tensors &copies) {
  if (masters[0].scalar_type() != ScalarType::Short) {
    LLMCTL_CHECK(masters[0].scalar_type() == ScalarType::Float,
                 "llmctl::adamw_: masters are neither float32 nor int16");
    return false;
  }
  LLMCTL_CHECK(!copies.empty() && copies[0].scalar_type() == ScalarType::BFloat16,
               "llmctl::adamw_: masters are int16 remainders, which need copies in bfloat16");
  return true;
}

int low_dtype(const Tensors &tensors, const char *name) {
  const int dtype = dtype_of(tensors[0], "adamw_");
  LLMCTL_CHECK(dtype != LLMCTL_FLOAT64, "llmctl::adamw_: ", name, " are float64");
  return dtype;
}

int moment_dtype(const Tensors &tensors, const char *name) {
  const int dtype = dtype_of(tensors[0], "adamw_");
  LLMCTL_CHECK(dtype == LLMCTL_FLOAT32 || dtype == LLMCTL_BFLOAT16, "llmctl::adamw_: ", name,
               " are neither float32 nor bfloat16");
  return dtype;
}

/* `own_divisor`: on the device of the masters, instead of `divisor`; NaN or infinity changes nothing. */
template <typename Device>
void step(Tensors masters, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors copies, double learning_rate,
          double beta1, double beta2, double epsilon, double weight_decay, int64_t number, double divisor,
          const OptionalTensor &own_divisor) {
  const char *op = "adamw_";
  check_list(masters, op, "masters");
  check_list_like(grads, masters, op, "grads");
  check_list_like(exp_avgs, masters, op, "exp_avgs");
  check_list_like(exp_avg_sqs, masters, op, "exp_avg_sqs");
  LLMCTL_CHECK(number >= 1, "llmctl::adamw_: steps are counted from 1");
  if (own_divisor) {
    LLMCTL_CHECK(own_divisor->scalar_type() == ScalarType::Double && own_divisor->numel() == 1,
                 "llmctl::adamw_: own_divisor is not one float64 number");
    check_device(*own_divisor, masters[0], op, "own_divisor");
  }
  const bool has_copies = !copies.empty(), is_split = has_remainders(masters, copies);
  if (has_copies) check_list_like(copies, masters, op, "copies");
  std::vector<Span> written;
  for (const Tensors *tensors : {&masters, &exp_avgs, &exp_avg_sqs, &copies}) add_spans(written, *tensors);
  check_apart(std::move(written), op);
  std::vector<llmctl_adamw_tensor> list;
  for (size_t i = 0; i < masters.size(); ++i) {
    list.push_back({mutable_data(masters[i]), data(grads[i]), mutable_data(exp_avgs[i]), mutable_data(exp_avg_sqs[i]),
                    has_copies ? mutable_data(copies[i]) : nullptr, masters[i].numel()});
  }
  const double steps = static_cast<double>(number);
  const llmctl_adamw constants{learning_rate, beta1, beta2, epsilon, weight_decay, 1.0 - std::pow(beta1, steps),
                               1.0 - std::pow(beta2, steps), divisor};
  const int copy_dtype = has_copies ? low_dtype(copies, "copies") : LLMCTL_FLOAT32;
  const llmctl_adamw_dtypes dtypes{low_dtype(grads, "grads"), copy_dtype, moment_dtype(exp_avgs, "exp_avgs"),
                                   moment_dtype(exp_avg_sqs, "exp_avg_sqs"), is_split ? 1 : 0};
  Device::step(dtypes, list, masters, constants, static_cast<const double *>(data(own_divisor)));
}

}  // namespace
}  // namespace llmctl

STABLE_TORCH_LIBRARY_FRAGMENT(llmctl, library) {
  library.def(
      "adamw_(Tensor(a!)[] masters, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] copies, float learning_rate, float beta1, float beta2, float epsilon, float weight_decay, "
      "int step, float divisor, Tensor? own_divisor=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CPU, library) { library.impl("adamw_", TORCH_BOX(&llmctl::step<llmctl::Cpu>)); }

STABLE_TORCH_LIBRARY_IMPL(llmctl, CUDA, library) { library.impl("adamw_", TORCH_BOX(&llmctl::step<llmctl::Cuda>)); }
