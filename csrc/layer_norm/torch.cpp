#include "abi.h"

#include "../common/torch/cache_size.h"
#include "../common/torch/tensors.h"

namespace llmctl {
namespace {

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor &hidden_in, const Tensor &weight_in, const Tensor &bias_in,
                                           double epsilon) {
  const char *op = "layer_norm";
  const int dtype = dtype_of(hidden_in, op);
  check_vector(weight_in, hidden_in, op, "weight");
  check_vector(bias_in, hidden_in, op, "bias");
  const Tensor hidden = packed(hidden_in), weight = packed(weight_in), bias = packed(bias_in);
  const int64_t rows = rows_of(hidden), width = last_size(hidden);
  const Tensor normed = unwritten(hidden, hidden.sizes());
  const Tensor mean = unwritten(hidden, {rows}, wide_type(hidden));
  const Tensor scale = unwritten(hidden, {rows}, wide_type(hidden));
  const bool past_caches = goes_past_caches(2 * bytes_of(hidden));
  for_rows(rows, width, [&](int64_t first, int64_t stop) {
    llmctl_cpu_layer_norm(dtype, data(hidden), data(weight), data(bias), mutable_data(normed), mutable_data(mean),
                          mutable_data(scale), width, epsilon, first, stop, past_caches);
  });
  return {normed, mean, scale};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor &grad_normed_in, const Tensor &hidden_in,
                                            const Tensor &weight_in, const Tensor &mean, const Tensor &scale) {
  const char *op = "layer_norm_backward";
  const int dtype = dtype_of(hidden_in, op);
  check_like(grad_normed_in, hidden_in, op, "grad_normed");
  check_vector(weight_in, hidden_in, op, "weight");
  const int64_t rows = rows_of(hidden_in), width = last_size(hidden_in);
  check_row_numbers(mean, hidden_in, rows, op, "mean");
  check_row_numbers(scale, hidden_in, rows, op, "scale");
  const Tensor grad_normed = packed(grad_normed_in), hidden = packed(hidden_in), weight = packed(weight_in);
  const Tensor grad_hidden = unwritten(hidden, hidden.sizes());
  const bool past_caches = goes_past_caches(3 * bytes_of(hidden));
  RowSums grad_weight(hidden, rows, width), grad_bias(hidden, rows, width);
  for_blocks(rows, width, grad_weight.blocks(), [&](int64_t block, int64_t first, int64_t stop) {
    llmctl_cpu_layer_norm_backward(dtype, data(grad_normed), data(hidden), data(weight), data(mean), data(scale),
                                   mutable_data(grad_hidden), grad_weight.of(block), grad_bias.of(block), width, first,
                                   stop, past_caches);
  });
  return {grad_hidden, grad_weight.total(), grad_bias.total()};
}

}  // namespace
}  // namespace llmctl

STABLE_TORCH_LIBRARY_FRAGMENT(llmctl, library) {
  library.def(
      "layer_norm(Tensor hidden, Tensor weight, Tensor bias, float epsilon) "
      "-> (Tensor normed, Tensor mean, Tensor scale)");
  library.def(
      "layer_norm_backward(Tensor grad_normed, Tensor hidden, Tensor weight, Tensor mean, Tensor scale) "
      "-> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)");
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CPU, library) {
  library.impl("layer_norm", TORCH_BOX(&llmctl::forward));
  library.impl("layer_norm_backward", TORCH_BOX(&llmctl::backward));
}
