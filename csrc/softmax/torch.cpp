#include "abi.h"

#include "../common/torch/cuda_call.h"
#include "../common/torch/tensors.h"

namespace llmctl {
namespace {

int64_t queries_of(const Tensor &scores, const char *op) {
  LLMCTL_CHECK(scores.dim() >= 2, "llmctl::", op, ": scores are not [..., queries, keys]");
  return scores.size(scores.dim() - 2);
}

/* Elements from one index of a dim of the mask to the next: 0 where all share one. */
int64_t mask_stride(const Tensor &mask, const Tensor &scores, int64_t dim, const char *op) {
  const int64_t size = mask.size(dim);
  LLMCTL_CHECK(size == scores.size(dim) || size == 1, "llmctl::", op, ": the mask has ", size, " entries in dim ",
               dim, ", neither 1 nor the ", scores.size(dim), " of the scores");
  return size == 1 ? 0 : mask.stride(dim);
}

/* The mask, of which only the keys must be contiguous: an expanded mask is not copied. */
Tensor with_adjacent_keys(const Tensor &mask) { return mask.stride(3) == 1 ? mask : packed(mask); }

Tensor masked(const Tensor &scores_in, const Tensor &mask_in, double scale) {
  const char *op = "scaled_masked_softmax";
  const int dtype = dtype_of(scores_in, op);
  LLMCTL_CHECK(scores_in.dim() == 4 && mask_in.dim() == 4, "llmctl::", op,
               ": scores and mask are not [batch, heads, queries, keys]");
  LLMCTL_CHECK(last_size(mask_in) == last_size(scores_in), "llmctl::", op, ": the mask has ", last_size(mask_in),
               " keys, the scores have ", last_size(scores_in));
  LLMCTL_CHECK(mask_in.scalar_type() == ScalarType::Bool, "llmctl::", op, ": the mask is not boolean");
  check_device(mask_in, scores_in, op, "the mask");
  const Tensor scores = packed(scores_in), mask = with_adjacent_keys(mask_in);
  const int64_t rows = rows_of(scores), width = last_size(scores), heads = scores.size(1), queries = scores.size(2);
  const int64_t strides[] = {mask_stride(mask, scores, 0, op), mask_stride(mask, scores, 1, op),
                             mask_stride(mask, scores, 2, op)};
  const Tensor shares = unwritten(scores, scores.sizes());
  const unsigned char *const hidden = static_cast<const unsigned char *>(data(mask));
  if (on_cuda(scores)) {
    const CudaCall call(scores, op);
    call.check(llmctl_cuda_scaled_masked_softmax(dtype, data(scores), hidden, mutable_data(shares), heads, queries,
                                                 rows, width, strides[0], strides[1], strides[2], scale,
                                                 call.stream()));
    return shares;
  }
  for_rows(rows, width, [&](int64_t first, int64_t stop) {
    llmctl_cpu_scaled_masked_softmax(dtype, data(scores), hidden, mutable_data(shares), heads, queries, width,
                                     strides[0], strides[1], strides[2], scale, first, stop);
  });
  return shares;
}

Tensor causal(const Tensor &scores_in, double scale) {
  const char *op = "scaled_causal_softmax";
  const int dtype = dtype_of(scores_in, op);
  const Tensor scores = packed(scores_in);
  const int64_t rows = rows_of(scores), width = last_size(scores), queries = queries_of(scores, op);
  const Tensor shares = unwritten(scores, scores.sizes());
  if (on_cuda(scores)) {
    const CudaCall call(scores, op);
    call.check(llmctl_cuda_scaled_causal_softmax(dtype, data(scores), mutable_data(shares), queries, rows, width, scale,
                                                 call.stream()));
    return shares;
  }
  for_rows(rows, width, [&](int64_t first, int64_t stop) {
    llmctl_cpu_scaled_causal_softmax(dtype, data(scores), mutable_data(shares), queries, width, scale, first, stop);
  });
  return shares;
}

Tensor backward(const Tensor &grad_shares_in, const Tensor &shares_in, double scale, bool causal) {
  const char *op = "scaled_softmax_backward";
  const int dtype = dtype_of(shares_in, op);
  check_like(grad_shares_in, shares_in, op, "grad_shares");
  const Tensor grad_shares = packed(grad_shares_in), shares = packed(shares_in);
  const int64_t rows = rows_of(shares), width = last_size(shares), queries = queries_of(shares, op);
  const Tensor grad_scores = unwritten(shares, shares.sizes());
  if (on_cuda(shares)) {
    const CudaCall call(shares, op);
    call.check(llmctl_cuda_scaled_softmax_backward(dtype, data(grad_shares), data(shares), mutable_data(grad_scores),
                                                   queries, rows, width, scale, causal, call.stream()));
    return grad_scores;
  }
  for_rows(rows, width, [&](int64_t first, int64_t stop) {
    llmctl_cpu_scaled_softmax_backward(dtype, data(grad_shares), data(shares), mutable_data(grad_scores), queries,
                                       width, scale, causal, first, stop);
  });
  return grad_scores;
}

}  // namespace
}  // namespace llmctl

STABLE_TORCH_LIBRARY_FRAGMENT(llmctl, library) {
  library.def("scaled_masked_softmax(Tensor scores, Tensor mask, float scale) -> Tensor");
  library.def("scaled_causal_softmax(Tensor scores, float scale) -> Tensor");
  library.def("scaled_softmax_backward(Tensor grad_shares, Tensor shares, float scale, bool causal) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CPU, library) {
  library.impl("scaled_masked_softmax", TORCH_BOX(&llmctl::masked));
  library.impl("scaled_causal_softmax", TORCH_BOX(&llmctl::causal));
  library.impl("scaled_softmax_backward", TORCH_BOX(&llmctl::backward));
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CUDA, library) {
  library.impl("scaled_masked_softmax", TORCH_BOX(&llmctl::masked));
  library.impl("scaled_causal_softmax", TORCH_BOX(&llmctl::causal));
  library.impl("scaled_softmax_backward", TORCH_BOX(&llmctl::backward));
}
