#include "abi.h"

#include "../common/column_sums/launch.h"
#include "../common/launch/grid.h"
#include "cuda.h"

namespace {

using llmctl::Activation;
using llmctl::Grid;
using llmctl::Kernel;
using llmctl::KernelTypes;

const Kernel activation("activation", KernelTypes::kNoDouble);
const Kernel activation_with_bias("activation_with_bias", KernelTypes::kNoDouble);
const Kernel gated_activation("gated_activation", KernelTypes::kNoDouble);
const Kernel gated_activation_with_bias("gated_activation_with_bias", KernelTypes::kNoDouble);
const Kernel activation_by_element("activation_by_element", KernelTypes::kAll);
const Kernel activation_backward("activation_backward", KernelTypes::kNoDouble);
const Kernel activation_with_bias_backward("activation_with_bias_backward", KernelTypes::kNoDouble);
const Kernel gated_activation_backward("gated_activation_backward", KernelTypes::kNoDouble);
const Kernel gated_activation_with_bias_backward("gated_activation_with_bias_backward", KernelTypes::kNoDouble);
const Kernel activation_by_element_backward("activation_by_element_backward", KernelTypes::kAll);

/* The fewest rows of a thread: enough to amortise the start of a thread. */
constexpr int64_t kRows = 4;

/* The number of tasks of 256 threads (or as many threads in smaller tasks) if rows are summed. Each of the 132 to 160
 * multiprocessors of the largest GPUs gets about fifteen tasks, so that the last round is short, and the sums are few
 * compared with the rows. The number depends only on shape and alignment, so that results have the same bits on every
 * GPU. */
constexpr int64_t kTasks = 2048;

/* The tasks of a call: chunks of channels as wide as the threads of one task, and segments of rows. */
struct Plan {
  Activation shared;
  int64_t threads, together, segments;
  bool packed;

  /* `pointers`: all memory that is read and written, except inner and bias. */
  Plan(int dtype, int kind, int gated, std::initializer_list<const void *> pointers, const void *inner,
       const void *bias, const void *row_weight, int64_t rows, int64_t width, bool sums_rows) {
    packed = dtype != LLMCTL_FLOAT64 && llmctl::packs(dtype, width, pointers) &&
             llmctl::packs(dtype, width, {inner, bias});
    const int64_t units = packed ? width * llmctl::bytes_of(dtype) / 16 : width;
    threads = llmctl::kWarpThreads;
    while (threads < llmctl::kActivationThreads && threads < units) threads *= 2;
    /* The threads of one task stay within a block; narrow tasks share a block, and those tasks are whole rows. */
    together = threads == llmctl::kWarpThreads ? llmctl::kNarrowThreads / llmctl::kWarpThreads : 1;
    const int64_t chunks = (units + threads - 1) / threads;
    const int64_t most = sums_rows ? std::max<int64_t>(1, kTasks * llmctl::kActivationThreads / threads / chunks) : rows;
    const int64_t rows_of_segment = std::max(kRows, (rows + most - 1) / std::max<int64_t>(1, most));
    /* Sums over no rows are written too. */
    segments = std::max<int64_t>(1, (rows + rows_of_segment - 1) / rows_of_segment);
    shared = {inner, bias, row_weight, rows, width, chunks, rows_of_segment, kind, gated != 0};
  }

  /* The kernel of a direction, for packs or for single elements. */
  const Kernel &kernel(const Kernel &plain, const Kernel &biased, const Kernel &gated, const Kernel &both,
                       const Kernel &by_element) const {
    if (!packed) return by_element;
    if (shared.gated) return shared.bias != nullptr ? both : gated;
    return shared.bias != nullptr ? biased : plain;
  }

  Grid grid() const {
    const int64_t tasks = shared.chunks * segments;
    return {(tasks + together - 1) / together, static_cast<int>(threads), static_cast<int>(together)};
  }

  int64_t bias_partials() const {
    return shared.bias == nullptr ? 0 : segments * (shared.gated ? 2 : 1) * shared.width;
  }
  int64_t weight_slices() const { return shared.chunks * threads / llmctl::kWarpThreads; }
};

Plan backward_plan(int dtype, int kind, int gated, const void *grad_activated, const void *inner, const void *bias,
                   const void *row_weight, const void *grad_inner, int64_t rows, int64_t width) {
  return Plan(dtype, kind, gated, {grad_activated, grad_inner}, inner, bias, row_weight, rows, width, bias != nullptr);
}

}  // namespace

extern "C" int llmctl_cuda_activation(int dtype, int kind, int gated, const void *inner, const void *bias,
                                      const void *row_weight, void *activated, int64_t rows, int64_t width,
                                      void *stream) {
  if (rows == 0 || width == 0) return 0;
  const Plan plan(dtype, kind, gated, {activated}, inner, bias, row_weight, rows, width, false);
  const llmctl::ActivationForward arguments{plan.shared, activated};
  const Kernel &kernel = plan.kernel(activation, activation_with_bias, gated_activation, gated_activation_with_bias,
                                     activation_by_element);
  return llmctl::launch(kernel, dtype, plan.grid(), &arguments, stream);
}

extern "C" int64_t llmctl_cuda_activation_partials(int dtype, int gated, const void *grad_activated, const void *inner,
                                                   const void *bias, const void *row_weight, const void *grad_inner,
                                                   int64_t rows, int64_t width) {
  if (width == 0) return 0;
  const Plan plan = backward_plan(dtype, 0, gated, grad_activated, inner, bias, row_weight, grad_inner, rows, width);
  return plan.bias_partials() + (row_weight == nullptr ? 0 : plan.weight_slices() * rows);
}

extern "C" int llmctl_cuda_activation_backward(int dtype, int kind, int gated, const void *grad_activated,
                                               const void *inner, const void *bias, const void *row_weight,
                                               void *grad_inner, void *grad_bias, void *grad_row_weight, void *partial,
                                               int64_t rows, int64_t width, void *stream) {
  if (width == 0 || (rows == 0 && bias == nullptr)) return 0;
  const Plan plan = backward_plan(dtype, kind, gated, grad_activated, inner, bias, row_weight, grad_inner, rows, width);
  char *const weight_partial = static_cast<char *>(partial) + plan.bias_partials() * (dtype == LLMCTL_FLOAT64 ? 8 : 4);
  const llmctl::ActivationBackward arguments{plan.shared, grad_activated, grad_inner, bias ? partial : nullptr,
                                             row_weight ? weight_partial : nullptr};
  const Kernel &kernel =
      plan.kernel(activation_backward, activation_with_bias_backward, gated_activation_backward,
                  gated_activation_with_bias_backward, activation_by_element_backward);
  int error = llmctl::launch(kernel, dtype, plan.grid(), &arguments, stream);
  if (error == 0 && bias != nullptr) {
    const int64_t inner_width = gated ? 2 * width : width;
    error = llmctl::column_sums(dtype, partial, grad_bias, plan.segments, inner_width, stream);
  }
  if (error == 0 && row_weight != nullptr) {
    const int wide = dtype == LLMCTL_FLOAT64 ? LLMCTL_FLOAT64 : LLMCTL_FLOAT32;
    error = llmctl::column_sums(wide, weight_partial, grad_row_weight, plan.weight_slices(), rows, stream);
  }
  return error;
}
