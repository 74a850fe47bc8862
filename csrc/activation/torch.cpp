#include "abi.h"

#include <functional>
#include <numeric>

#include "../common/torch/cache_size.h"
#include "../common/torch/cuda_call.h"
#include "../common/torch/tensors.h"

namespace llmctl {
namespace {

/* The inputs of forward and backward, made contiguous, and their sizes. */
struct Inputs {
  int dtype, kind;
  bool gated;
  Tensor inner;
  OptionalTensor bias, row_weight;
  int64_t rows, inner_width, width;

  Inputs(const Tensor &inner_in, const OptionalTensor &bias_in, const OptionalTensor &row_weight_in, int64_t kind_in,
         bool gated_in, const char *op)
      : dtype(dtype_of(inner_in, op)),
        kind(static_cast<int>(kind_in)),
        gated(gated_in),
        inner(packed(inner_in)),
        bias(packed(bias_in)),
        row_weight(packed(row_weight_in)),
        rows(rows_of(inner)),
        inner_width(last_size(inner)),
        width(gated ? inner_width / 2 : inner_width) {
    LLMCTL_CHECK(kind_in >= LLMCTL_SILU && kind_in <= LLMCTL_SQUARED_RELU, "llmctl::", op,
                 ": there is no activation ", kind_in);
    LLMCTL_CHECK(!gated || inner_width % 2 == 0, "llmctl::", op, ": ", inner_width,
                 " channels are not pairs of gates and ups");
    if (bias) check_vector(*bias, inner, op, "bias");
    if (!row_weight) return;
    /* Rows without channels also have weights. */
    const auto sizes = inner.sizes();
    const int64_t weights = std::accumulate(sizes.begin(), sizes.end() - 1, int64_t{1}, std::multiplies<int64_t>());
    LLMCTL_CHECK(row_weight->numel() == weights, "llmctl::", op, ": ", row_weight->numel(), " row weights for ",
                 weights, " rows");
    LLMCTL_CHECK(row_weight->scalar_type() == wide_type(inner), "llmctl::", op,
                 ": row weights are float32, of float64 rows float64");
    check_device(*row_weight, inner, op, "row_weight");
  }

  std::vector<int64_t> activated_sizes() const {
    const auto sizes = inner.sizes();
    std::vector<int64_t> result(sizes.begin(), sizes.end());
    result.back() = width;
    return result;
  }

  /* Memory for the gradients of row weights, if there are any; rows without channels leave these gradients at 0. */
  Tensor memory_for_row_weights() const {
    return width == 0 ? zeros(*row_weight, row_weight->sizes()) : unwritten(*row_weight, row_weight->sizes());
  }
};

/* The kernels of one kind of device. Backward writes grad_row_weight if there are row weights, and returns the
 * gradient of the bias if there is a bias. */
struct Cpu {
  static void forward(const Inputs &in, const Tensor &activated) {
    const bool past_caches = goes_past_caches(bytes_of(in.inner) + bytes_of(activated));
    for_rows(in.rows, in.inner_width, [&](int64_t first, int64_t stop) {
      llmctl_cpu_activation(in.dtype, in.kind, in.gated, data(in.inner), data(in.bias), data(in.row_weight),
                            mutable_data(activated), in.width, first, stop, past_caches);
    });
  }

  static OptionalTensor backward(const Inputs &in, const Tensor &grad_activated, const Tensor &grad_inner,
                                 void *grad_row_weight) {
    const bool past_caches = goes_past_caches(bytes_of(grad_activated) + 2 * bytes_of(in.inner));
    const auto run = [&](void *grad_bias, int64_t first, int64_t stop) {
      llmctl_cpu_activation_backward(in.dtype, in.kind, in.gated, data(grad_activated), data(in.inner), data(in.bias),
                                     data(in.row_weight), mutable_data(grad_inner), grad_bias, grad_row_weight,
                                     in.width, first, stop, past_caches);
    };
    if (!in.bias) {
      for_rows(in.rows, in.inner_width, [&](int64_t first, int64_t stop) { run(nullptr, first, stop); });
      return std::nullopt;
    }
    RowSums grad_bias(in.inner, in.rows, in.inner_width);
    for_blocks(in.rows, in.inner_width, grad_bias.blocks(),
               [&](int64_t block, int64_t first, int64_t stop) { run(grad_bias.of(block), first, stop); });
    return grad_bias.total();
  }
};

struct Cuda {
  static void forward(const Inputs &in, const Tensor &activated) {
    const CudaCall call(in.inner, "activation");
    call.check(llmctl_cuda_activation(in.dtype, in.kind, in.gated, data(in.inner), data(in.bias), data(in.row_weight),
                                      mutable_data(activated), in.rows, in.width, call.stream()));
  }

  static OptionalTensor backward(const Inputs &in, const Tensor &grad_activated, const Tensor &grad_inner,
                                 void *grad_row_weight) {
    const CudaCall call(in.inner, "activation_backward");
    const int64_t partials =
        llmctl_cuda_activation_partials(in.dtype, in.gated, data(grad_activated), data(in.inner), data(in.bias),
                                        data(in.row_weight), data(grad_inner), in.rows, in.width);
    const Tensor partial = unwritten(in.inner, {partials}, wide_type(in.inner));
    OptionalTensor grad_bias;
    if (in.bias) grad_bias = unwritten(*in.bias, in.bias->sizes());
    call.check(llmctl_cuda_activation_backward(
        in.dtype, in.kind, in.gated, data(grad_activated), data(in.inner), data(in.bias), data(in.row_weight),
        mutable_data(grad_inner), grad_bias ? mutable_data(*grad_bias) : nullptr, grad_row_weight,
        mutable_data(partial), in.rows, in.width, call.stream()));
    return grad_bias;
  }
};

template <typename Device>
Tensor forward(const Tensor &inner, const OptionalTensor &bias, const OptionalTensor &row_weight, int64_t kind,
               bool gated) {
  const Inputs in(inner, bias, row_weight, kind, gated, "activation");
  const Tensor activated = unwritten(in.inner, in.activated_sizes());
  Device::forward(in, activated);
  return activated;
}

/* The gradient of a missing bias, or of missing row weights, has no elements. */
template <typename Device>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor &grad_activated_in, const Tensor &inner,
                                            const OptionalTensor &bias, const OptionalTensor &row_weight, int64_t kind,
                                            bool gated) {
  const char *op = "activation_backward";
  const Inputs in(inner, bias, row_weight, kind, gated, op);
  const Tensor grad_activated = packed(grad_activated_in);
  LLMCTL_CHECK(grad_activated.numel() == in.rows * in.width, "llmctl::", op, ": grad_activated has ",
               grad_activated.numel(), " elements, not ", in.rows * in.width);
  LLMCTL_CHECK(grad_activated.scalar_type() == in.inner.scalar_type(), "llmctl::", op,
               ": grad_activated has another dtype");
  check_device(grad_activated, in.inner, op, "grad_activated");
  const Tensor grad_inner = unwritten(in.inner, in.inner.sizes());
  const Tensor grad_row_weight =
      in.row_weight ? in.memory_for_row_weights() : unwritten(in.inner, {0}, wide_type(in.inner));
  const OptionalTensor grad_bias =
      Device::backward(in, grad_activated, grad_inner, in.row_weight ? mutable_data(grad_row_weight) : nullptr);
  return {grad_inner, grad_bias ? *grad_bias : unwritten(in.inner, {0}), grad_row_weight};
}

}  // namespace
}  // namespace llmctl

STABLE_TORCH_LIBRARY_FRAGMENT(llmctl, library) {
  library.def("activation(Tensor inner, Tensor? bias, Tensor? row_weight, int kind, bool gated) -> Tensor activated");
  library.def(
      "activation_backward(Tensor grad_activated, Tensor inner, Tensor? bias, Tensor? row_weight, int kind, "
      "bool gated) -> (Tensor grad_inner, Tensor grad_bias, Tensor grad_row_weight)");
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CPU, library) {
  library.impl("activation", TORCH_BOX(&llmctl::forward<llmctl::Cpu>));
  library.impl("activation_backward", TORCH_BOX(&llmctl::backward<llmctl::Cpu>));
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CUDA, library) {
  library.impl("activation", TORCH_BOX(&llmctl::forward<llmctl::Cuda>));
  library.impl("activation_backward", TORCH_BOX(&llmctl::backward<llmctl::Cuda>));
}
