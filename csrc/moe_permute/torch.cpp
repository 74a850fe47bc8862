#include "abi.h"

#include "../common/torch/cuda_call.h"
#include "../common/torch/tensors.h"

namespace llmctl {
namespace {

/* Rows, tokens, choices per token, channels. */
struct Sizes {
  int64_t chosen, count, topk, width;
};

const int64_t *numbers(const Tensor &tensor) { return static_cast<const int64_t *>(data(tensor)); }

/* Checks the indices, because kernels use them without a check. */
void check_range(const Tensor &what, int64_t first, int64_t last, const char *op, const char *name) {
  const int64_t *const values = numbers(what), *const stop = values + what.numel();
  const auto wrong = std::find_if(values, stop, [=](int64_t value) { return value < first || value > last; });
  LLMCTL_CHECK(wrong == stop, "llmctl::", op, ": ", name, " has ", wrong == stop ? 0 : *wrong, ", not a number from ",
               first, " to ", last);
}

struct Cpu {
  static void combine(int dtype, const Tensor &rows, const Tensor &places, const OptionalTensor &weights,
                      const Tensor &tokens, const Sizes &s) {
    check_range(places, 0, s.chosen, "moe_combine", "places");
    for_rows(s.count, s.topk * s.width, [&](int64_t first, int64_t stop) {
      llmctl_cpu_moe_combine(dtype, data(rows), numbers(places), data(weights), mutable_data(tokens), s.chosen, s.topk,
                             s.width, first, stop);
    });
  }

  static void backward(int dtype, const Tensor &grad_tokens, const Tensor &rows, const Tensor &choices,
                       const Tensor &weights, const Tensor &grad_rows, const Tensor &grad_weights, const Sizes &s) {
    check_range(choices, 0, s.count * s.topk - 1, "moe_combine_backward", "choices");
    for_rows(s.chosen, s.width, [&](int64_t first, int64_t stop) {
      llmctl_cpu_moe_combine_backward(dtype, data(grad_tokens), data(rows), numbers(choices), data(weights),
                                      mutable_data(grad_rows), mutable_data(grad_weights), s.topk, s.width, first, stop);
    });
  }
};

struct Cuda {
  static void combine(int dtype, const Tensor &rows, const Tensor &places, const OptionalTensor &weights,
                      const Tensor &tokens, const Sizes &s) {
    const CudaCall call(rows, "moe_combine");
    call.check(llmctl_cuda_moe_combine(dtype, data(rows), numbers(places), data(weights), mutable_data(tokens), s.chosen,
                                       s.topk, s.width, s.count, call.stream()));
  }

  static void backward(int dtype, const Tensor &grad_tokens, const Tensor &rows, const Tensor &choices,
                       const Tensor &weights, const Tensor &grad_rows, const Tensor &grad_weights, const Sizes &s) {
    const CudaCall call(rows, "moe_combine_backward");
    call.check(llmctl_cuda_moe_combine_backward(dtype, data(grad_tokens), data(rows), numbers(choices), data(weights),
                                                mutable_data(grad_rows), mutable_data(grad_weights), s.topk, s.width,
                                                s.chosen, s.count, call.stream()));
  }
};

void check_numbers(const Tensor &what, int64_t dims, const Tensor &model, const char *op, const char *name) {
  LLMCTL_CHECK(what.scalar_type() == ScalarType::Long && what.dim() == dims && same_device(what, model),
               "llmctl::", op, ": ", name, " are not int64 of ", dims, " dims on the device of the rows");
}

void check_weights(const Tensor &weights, int64_t count, int64_t topk, const Tensor &model, const char *op) {
  LLMCTL_CHECK(weights.dim() == 2 && weights.size(0) == count && weights.size(1) == topk, "llmctl::", op,
               ": weights are not one for each of ", topk, " choices of ", count, " tokens");
  LLMCTL_CHECK(weights.scalar_type() == wide_type(model) && same_device(weights, model), "llmctl::", op,
               ": weights are not float32, or float64 of float64 rows, on the device of the rows");
}

template <typename Device>
Tensor combine(const Tensor &rows_in, const Tensor &places_in, const OptionalTensor &weights_in) {
  const char *op = "moe_combine";
  const int dtype = dtype_of(rows_in, op);
  LLMCTL_CHECK(rows_in.dim() == 2, "llmctl::", op, ": rows have ", rows_in.dim(), " dims, not 2");
  check_numbers(places_in, 2, rows_in, op, "places");
  const Sizes sizes{rows_in.size(0), places_in.size(0), places_in.size(1), rows_in.size(1)};
  if (weights_in) check_weights(*weights_in, sizes.count, sizes.topk, rows_in, op);
  const Tensor rows = packed(rows_in), places = packed(places_in);
  const OptionalTensor weights = packed(weights_in);
  const Tensor tokens = unwritten(rows, {sizes.count, sizes.width});
  if (sizes.width > 0) Device::combine(dtype, rows, places, weights, tokens, sizes);
  return tokens;
}

template <typename Device>
std::tuple<Tensor, Tensor> combine_backward(const Tensor &grad_tokens_in, const Tensor &rows_in,
                                            const Tensor &choices_in, const Tensor &weights_in) {
  const char *op = "moe_combine_backward";
  const int dtype = dtype_of(rows_in, op);
  LLMCTL_CHECK(rows_in.dim() == 2 && grad_tokens_in.dim() == 2 && grad_tokens_in.size(1) == rows_in.size(1) &&
                   grad_tokens_in.scalar_type() == rows_in.scalar_type(),
               "llmctl::", op, ": the gradient is not of tokens like the rows");
  check_device(grad_tokens_in, rows_in, op, "grad_tokens");
  check_numbers(choices_in, 1, rows_in, op, "choices");
  LLMCTL_CHECK(choices_in.size(0) == rows_in.size(0), "llmctl::", op, ": there are ", choices_in.size(0),
               " choices for ", rows_in.size(0), " rows");
  LLMCTL_CHECK(weights_in.dim() == 2, "llmctl::", op, ": weights have ", weights_in.dim(), " dims, not 2");
  const Sizes sizes{rows_in.size(0), grad_tokens_in.size(0), weights_in.size(1), rows_in.size(1)};
  check_weights(weights_in, sizes.count, sizes.topk, rows_in, op);
  LLMCTL_CHECK(sizes.count * sizes.topk > 0 || sizes.chosen == 0, "llmctl::", op, ": there are ", sizes.chosen,
               " rows, but tokens have no choices");
  const Tensor grad_tokens = packed(grad_tokens_in), rows = packed(rows_in), choices = packed(choices_in);
  const Tensor weights = packed(weights_in);
  const Tensor grad_rows = unwritten(rows, rows.sizes());
  const Tensor grad_weights = zeros(weights, weights.sizes());
  if (sizes.width > 0) Device::backward(dtype, grad_tokens, rows, choices, weights, grad_rows, grad_weights, sizes);
  return {grad_rows, grad_weights};
}

}  // namespace
}  // namespace llmctl

STABLE_TORCH_LIBRARY_FRAGMENT(llmctl, library) {
  library.def("moe_combine(Tensor rows, Tensor places, Tensor? weights) -> Tensor");
  library.def(
      "moe_combine_backward(Tensor grad_tokens, Tensor rows, Tensor choices, Tensor weights) "
      "-> (Tensor grad_rows, Tensor grad_weights)");
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CPU, library) {
  library.impl("moe_combine", TORCH_BOX(&llmctl::combine<llmctl::Cpu>));
  library.impl("moe_combine_backward", TORCH_BOX(&llmctl::combine_backward<llmctl::Cpu>));
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CUDA, library) {
  library.impl("moe_combine", TORCH_BOX(&llmctl::combine<llmctl::Cuda>));
  library.impl("moe_combine_backward", TORCH_BOX(&llmctl::combine_backward<llmctl::Cuda>));
}
