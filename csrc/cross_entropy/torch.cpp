#include "abi.h"

#include "../common/torch/cuda_call.h"
#include "../common/torch/tensors.h"

namespace llmctl {
namespace {

void check(const Tensor &logits, const Tensor &labels, int64_t num_valid, bool exponentials, const char *op) {
  LLMCTL_CHECK(logits.dim() == 2 && logits.is_contiguous(), "llmctl::", op,
               ": logits are not [tokens, columns] without gaps, as what is changed in place must be");
  LLMCTL_CHECK(labels.dim() == 1 && labels.size(0) == logits.size(0) && labels.is_contiguous(), "llmctl::", op,
               ": labels are not one for each of the ", logits.size(0), " rows");
  LLMCTL_CHECK(labels.scalar_type() == ScalarType::Long, "llmctl::", op, ": labels are not int64");
  check_device(labels, logits, op, "labels");
  LLMCTL_CHECK(num_valid >= 0 && num_valid <= logits.size(1), "llmctl::", op, ": ", num_valid,
               " valid columns are not among ", logits.size(1));
  LLMCTL_CHECK(!exponentials || (logits.scalar_type() == wide_type(logits) && !logits.is_cuda()), "llmctl::", op,
               ": only float32 and float64 logits on a CPU become exponentials");
}

/* The results of a pass over the rows: one number per row, or NULL if not requested. */
struct Written {
  void *maximum, *exp_sum, *label_logit, *logit_sum, *losses;
};

/* Statistics of all rows, and if requested losses, for which the columns must be the whole vocabulary. */
void read_rows(const Tensor &logits, const Tensor &labels, const Written &to, int64_t first_column, int64_t num_valid,
               int64_t vocab_size, int64_t ignore_index, double z_loss, double smoothing, bool exponentials,
               const char *op) {
  const int dtype = dtype_of(logits, op);
  const int64_t rows = logits.size(0), width = logits.size(1);
  const int64_t *const label = static_cast<const int64_t *>(data(labels));
  if (on_cuda(logits)) {
    const CudaCall call(logits, op);
    call.check(llmctl_cuda_cross_entropy_stats(dtype, data(logits), label, to.maximum, to.exp_sum, to.label_logit,
                                               to.logit_sum, to.losses, rows, width, first_column, num_valid,
                                               vocab_size, ignore_index, z_loss, smoothing, call.stream()));
    return;
  }
  /* mutable_data gives a lazy copy memory of its own, which torch forbids in threads. */
  void *const values = exponentials ? mutable_data(logits) : const_cast<void *>(data(logits));
  for_rows(rows, width, [&](int64_t first, int64_t stop) {
    llmctl_cpu_cross_entropy_stats(dtype, values, label, to.maximum, to.exp_sum, to.label_logit, to.logit_sum,
                                   to.losses, width, first_column, num_valid, vocab_size, ignore_index, z_loss,
                                   smoothing, exponentials, first, stop);
  });
}

/* Maximum [rows], and [2 or 3, rows]: sum of exponentials, logit of the label and, if requested, sum of the logits. */
std::tuple<Tensor, Tensor> stats(const Tensor &logits, const Tensor &labels, int64_t first_column, int64_t num_valid,
                                 int64_t vocab_size, int64_t ignore_index, bool sum_logits, bool exponentials) {
  const char *op = "cross_entropy_stats";
  check(logits, labels, num_valid, exponentials, op);
  const int64_t rows = logits.size(0);
  const Tensor maximum = unwritten(logits, {rows}, wide_type(logits));
  const Tensor sums = unwritten(logits, {sum_logits ? 3 : 2, rows}, wide_type(logits));
  const int64_t stride = rows * element_bytes(sums);
  char *const exp_sum = static_cast<char *>(mutable_data(sums)), *const label_logit = exp_sum + stride;
  char *const logit_sum = sum_logits ? label_logit + stride : nullptr;
  read_rows(logits, labels, {mutable_data(maximum), exp_sum, label_logit, logit_sum, nullptr}, first_column, num_valid,
            vocab_size, ignore_index, 0, 0, exponentials, op);
  return {maximum, sums};
}

/* Losses, maximum and sum of exponentials, [rows] each, of logits whose columns are the vocabulary and padding. */
std::tuple<Tensor, Tensor, Tensor> losses(const Tensor &logits, const Tensor &labels, int64_t vocab_size,
                                          int64_t ignore_index, double z_loss, double label_smoothing,
                                          bool exponentials) {
  const char *op = "cross_entropy_losses";
  check(logits, labels, vocab_size, exponentials, op);
  const auto one_per_row = [&] { return unwritten(logits, {logits.size(0)}, wide_type(logits)); };
  const Tensor found = one_per_row(), maximum = one_per_row(), exp_sum = one_per_row();
  read_rows(logits, labels, {mutable_data(maximum), mutable_data(exp_sum), nullptr, nullptr, mutable_data(found)}, 0,
            vocab_size, vocab_size, ignore_index, z_loss, label_smoothing, exponentials, op);
  return {found, maximum, exp_sum};
}

void grad(const Tensor &logits, const Tensor &labels, const Tensor &grad_losses, const Tensor &local_max,
          const Tensor &global_max, const Tensor &exp_sum, int64_t first_column, int64_t num_valid, int64_t vocab_size,
          int64_t ignore_index, double z_loss, double label_smoothing, bool exponentials) {
  const char *op = "cross_entropy_grad_";
  const int dtype = dtype_of(logits, op);
  check(logits, labels, num_valid, exponentials, op);
  const int64_t rows = logits.size(0), width = logits.size(1);
  check_row_numbers(grad_losses, logits, rows, op, "grad_losses");
  check_row_numbers(local_max, logits, rows, op, "local_max");
  check_row_numbers(global_max, logits, rows, op, "global_max");
  check_row_numbers(exp_sum, logits, rows, op, "exp_sum");
  const int64_t *const label = static_cast<const int64_t *>(data(labels));
  if (on_cuda(logits)) {
    const CudaCall call(logits, op);
    call.check(llmctl_cuda_cross_entropy_grad(dtype, mutable_data(logits), label, data(grad_losses), data(global_max),
                                              data(exp_sum), rows, width, first_column, num_valid, vocab_size,
                                              ignore_index, z_loss, label_smoothing, call.stream()));
    return;
  }
  void *const values = mutable_data(logits);
  for_rows(rows, width, [&](int64_t first, int64_t stop) {
    llmctl_cpu_cross_entropy_grad(dtype, values, label, data(grad_losses), data(local_max),
                                  data(global_max), data(exp_sum), width, first_column, num_valid, vocab_size,
                                  ignore_index, z_loss, label_smoothing, exponentials, first, stop);
  });
}

}  // namespace
}  // namespace llmctl

STABLE_TORCH_LIBRARY_FRAGMENT(llmctl, library) {
  library.def(
      "cross_entropy_stats(Tensor(a!) logits, Tensor labels, int first_column, int num_valid, int vocab_size, "
      "int ignore_index, bool sum_logits, bool exponentials) -> (Tensor maximum, Tensor sums)");
  library.def(
      "cross_entropy_losses(Tensor(a!) logits, Tensor labels, int vocab_size, int ignore_index, float z_loss, "
      "float label_smoothing, bool exponentials) -> (Tensor losses, Tensor maximum, Tensor exp_sum)");
  library.def(
      "cross_entropy_grad_(Tensor(a!) logits, Tensor labels, Tensor grad_losses, Tensor local_max, Tensor global_max, "
      "Tensor exp_sum, int first_column, int num_valid, int vocab_size, int ignore_index, float z_loss, "
      "float label_smoothing, bool exponentials) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CPU, library) {
  library.impl("cross_entropy_stats", TORCH_BOX(&llmctl::stats));
  library.impl("cross_entropy_losses", TORCH_BOX(&llmctl::losses));
  library.impl("cross_entropy_grad_", TORCH_BOX(&llmctl::grad));
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CUDA, library) {
  library.impl("cross_entropy_stats", TORCH_BOX(&llmctl::stats));
  library.impl("cross_entropy_losses", TORCH_BOX(&llmctl::losses));
  library.impl("cross_entropy_grad_", TORCH_BOX(&llmctl::grad));
}
