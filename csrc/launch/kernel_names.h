/* Every kernel of the image (csrc/cuda), by name: the image's loader looks all of them up. */
#ifndef LLMCTL_KERNEL_NAMES_H
#define LLMCTL_KERNEL_NAMES_H

namespace llmctl {

/* Element types that a kernel has entry points name_<type> for; kNoType: one entry point, without a suffix. */
enum class KernelTypes { kAll, kNoDouble, kNoType };

#define LLMCTL_KERNELS(X)                           \
  X(activation, kNoDouble)                          \
  X(activation_with_bias, kNoDouble)                \
  X(gated_activation, kNoDouble)                    \
  X(gated_activation_with_bias, kNoDouble)          \
  X(activation_by_element, kAll)                    \
  X(activation_backward, kNoDouble)                 \
  X(activation_with_bias_backward, kNoDouble)       \
  X(gated_activation_backward, kNoDouble)           \
  X(gated_activation_with_bias_backward, kNoDouble) \
  X(activation_by_element_backward, kAll)           \
  X(adamw, kNoDouble)                               \
  X(bias_dropout_add, kAll)                         \
  X(column_sums, kAll)                              \
  X(cross_entropy_stats, kAll)                      \
  X(cross_entropy_grad, kAll)                       \
  X(moe_combine, kAll)                              \
  X(moe_combine_backward, kAll)                     \
  X(rms_norm, kAll)                                 \
  X(rms_norm_backward, kAll)                        \
  X(rope, kAll)                                     \
  X(scaled_masked_softmax, kAll)                    \
  X(scaled_causal_softmax, kAll)                    \
  X(scaled_softmax_backward, kAll)                  \
  X(sum_of_squares, kAll)                           \
  X(sum_of_partials, kNoType)

enum class Kernel {
#define LLMCTL_NAMED(name, types) name,
  LLMCTL_KERNELS(LLMCTL_NAMED)
#undef LLMCTL_NAMED
};

}  // namespace llmctl

#endif
