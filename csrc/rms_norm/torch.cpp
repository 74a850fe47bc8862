#include "abi.h"

#include "../common/torch/cache_size.h"
#include "../common/torch/cuda_call.h"
#include "../common/torch/tensors.h"

namespace llmctl {
namespace {

/* The kernels of one kind of device. `sum` is null without a residual; backward returns the gradient of the weight. */
struct Cpu {
  static void forward(int dtype, const Tensor &hidden, const OptionalTensor &residual, const Tensor &weight, void *sum,
                      const Tensor &normed, const Tensor &scale, double epsilon, bool adds_one) {
    const int64_t rows = rows_of(hidden), width = last_size(hidden);
    const bool past_caches = goes_past_caches(2 * bytes_of(hidden));
    for_rows(rows, width, [&](int64_t first, int64_t stop) {
      llmctl_cpu_rms_norm(dtype, data(hidden), data(residual), data(weight), sum, mutable_data(normed),
                          mutable_data(scale), width, epsilon, adds_one, first, stop, past_caches);
    });
  }

  static Tensor backward(int dtype, const Tensor &grad_normed, const OptionalTensor &grad_sum, const Tensor &hidden,
                         const Tensor &weight, const Tensor &scale, const Tensor &grad_hidden, bool adds_one) {
    const int64_t rows = rows_of(hidden), width = last_size(hidden);
    const bool past_caches = goes_past_caches(3 * bytes_of(hidden));
    RowSums grad_weight(hidden, rows, width);
    for_blocks(rows, width, grad_weight.blocks(), [&](int64_t block, int64_t first, int64_t stop) {
      llmctl_cpu_rms_norm_backward(dtype, data(grad_normed), data(grad_sum), data(hidden), data(weight), data(scale),
                                   mutable_data(grad_hidden), grad_weight.of(block), width, adds_one, first, stop,
                                   past_caches);
    });
    return grad_weight.total();
  }
};

struct Cuda {
  static void forward(int dtype, const Tensor &hidden, const OptionalTensor &residual, const Tensor &weight, void *sum,
                      const Tensor &normed, const Tensor &scale, double epsilon, bool adds_one) {
    const CudaCall call(hidden, "rms_norm");
    call.check(llmctl_cuda_rms_norm(dtype, data(hidden), data(residual), data(weight), sum, mutable_data(normed),
                                    mutable_data(scale), rows_of(hidden), last_size(hidden), epsilon, adds_one,
                                    call.stream()));
  }

  static Tensor backward(int dtype, const Tensor &grad_normed, const OptionalTensor &grad_sum, const Tensor &hidden,
                         const Tensor &weight, const Tensor &scale, const Tensor &grad_hidden, bool adds_one) {
    const CudaCall call(hidden, "rms_norm_backward");
    const int64_t rows = rows_of(hidden), width = last_size(hidden);
    const int64_t segments = llmctl_cuda_rms_norm_segments(rows, width);
    const Tensor partial = unwritten(hidden, {segments, width}, wide_type(hidden));
    const Tensor grad_weight = unwritten(weight, {width});
    call.check(llmctl_cuda_rms_norm_backward(dtype, data(grad_normed), data(grad_sum), data(hidden), data(weight),
                                             data(scale), mutable_data(grad_hidden), mutable_data(grad_weight),
                                             mutable_data(partial), rows, width, adds_one, call.stream()));
    return grad_weight;
  }
};

template <typename Device>
std::tuple<Tensor, Tensor, Tensor> run_forward(const Tensor &hidden_in, const OptionalTensor &residual_in,
                                               const Tensor &weight_in, double epsilon, bool adds_one) {
  const char *op = "rms_norm";
  const int dtype = dtype_of(hidden_in, op);
  check_vector(weight_in, hidden_in, op, "weight");
  if (residual_in) check_like(*residual_in, hidden_in, op, "residual");
  const Tensor hidden = packed(hidden_in), weight = packed(weight_in);
  const OptionalTensor residual = packed(residual_in);
  const Tensor normed = unwritten(hidden, hidden.sizes());
  const Tensor sum = residual ? unwritten(hidden, hidden.sizes()) : normed;
  const Tensor scale = unwritten(hidden, {rows_of(hidden)}, wide_type(hidden));
  void *written = residual ? mutable_data(sum) : nullptr;
  Device::forward(dtype, hidden, residual, weight, written, normed, scale, epsilon, adds_one);
  return {normed, sum, scale};
}

template <typename Device>
std::tuple<Tensor, Tensor> forward(const Tensor &hidden, const Tensor &weight, double epsilon, bool adds_one) {
  const auto [normed, sum, scale] = run_forward<Device>(hidden, std::nullopt, weight, epsilon, adds_one);
  return {normed, scale};
}

template <typename Device>
std::tuple<Tensor, Tensor, Tensor> add_forward(const Tensor &hidden, const Tensor &residual, const Tensor &weight,
                                               double epsilon, bool adds_one) {
  return run_forward<Device>(hidden, residual, weight, epsilon, adds_one);
}

template <typename Device>
std::tuple<Tensor, Tensor> backward(const Tensor &grad_normed_in, const OptionalTensor &grad_sum_in,
                                    const Tensor &hidden_in, const Tensor &weight_in, const Tensor &scale,
                                    bool adds_one) {
  const char *op = "rms_norm_backward";
  const int dtype = dtype_of(hidden_in, op);
  check_like(grad_normed_in, hidden_in, op, "grad_normed");
  check_vector(weight_in, hidden_in, op, "weight");
  if (grad_sum_in) check_like(*grad_sum_in, hidden_in, op, "grad_sum");
  check_row_numbers(scale, hidden_in, rows_of(hidden_in), op, "scale");
  const Tensor grad_normed = packed(grad_normed_in), hidden = packed(hidden_in), weight = packed(weight_in);
  const OptionalTensor grad_sum = packed(grad_sum_in);
  const Tensor grad_hidden = unwritten(hidden, hidden.sizes());
  const Tensor grad_weight =
      Device::backward(dtype, grad_normed, grad_sum, hidden, weight, scale, grad_hidden, adds_one);
  return {grad_hidden, grad_weight};
}

}  // namespace
}  // namespace llmctl

STABLE_TORCH_LIBRARY_FRAGMENT(llmctl, library) {
  library.def("rms_norm(Tensor hidden, Tensor weight, float epsilon, bool adds_one=False) -> (Tensor normed, Tensor scale)");
  library.def(
      "add_rms_norm(Tensor hidden, Tensor residual, Tensor weight, float epsilon, bool adds_one=False) "
      "-> (Tensor normed, Tensor sum, Tensor scale)");
  library.def(
      "rms_norm_backward(Tensor grad_normed, Tensor? grad_sum, Tensor hidden, Tensor weight, Tensor scale, "
      "bool adds_one=False) "
      "-> (Tensor grad_hidden, Tensor grad_weight)");
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&llmctl::forward<llmctl::Cpu>));
  library.impl("add_rms_norm", TORCH_BOX(&llmctl::add_forward<llmctl::Cpu>));
  library.impl("rms_norm_backward", TORCH_BOX(&llmctl::backward<llmctl::Cpu>));
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CUDA, library) {
  library.impl("rms_norm", TORCH_BOX(&llmctl::forward<llmctl::Cuda>));
  library.impl("add_rms_norm", TORCH_BOX(&llmctl::add_forward<llmctl::Cuda>));
  library.impl("rms_norm_backward", TORCH_BOX(&llmctl::backward<llmctl::Cuda>));
}
