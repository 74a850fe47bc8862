/* Included before each torch.cpp of csrc: ops for CUDA are registered for the CPU and run on the emulated GPU; ops for the
 * CPU are left out. */
#ifndef LLMCTL_EMULATION_CPU_FOR_CUDA_H
#define LLMCTL_EMULATION_CPU_FOR_CUDA_H

#include <torch/csrc/stable/library.h>

#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(ns, k, m) LLMCTL_EMULATION_IMPL_##k(ns, m)
#define LLMCTL_EMULATION_IMPL_CUDA(ns, m) _STABLE_TORCH_LIBRARY_IMPL(ns, CPU, m, C10_UID)
#define LLMCTL_EMULATION_IMPL_CPU(ns, m) \
  [[maybe_unused]] static void C10_CONCATENATE(left_out_, C10_UID)(torch::stable::detail::StableLibrary &m)

/* Replaces csrc/common/torch/cuda_call.h: CPU tensors are on no CUDA device, and there is no stream. Branches for the CPU
 * are compiled away. */
#define LLMCTL_CUDA_CALL_H
#include "../../../../../csrc/common/torch/tensors.h"
#include "../../../../../csrc/common/launch/abi.h"

extern "C" const char *emulation_complaint();

namespace llmctl {

inline bool on_cuda(const Tensor &) { return true; }

class CudaCall {
 public:
  CudaCall(const Tensor &, const char *op) : op_(op) { check(llmctl_cuda_use(0, nullptr)); }

  void *stream() const { return nullptr; }

  void check(int error) const {
    LLMCTL_CHECK(error == 0, "llmctl::", op_, ": ", llmctl_cuda_error(error), ": ", emulation_complaint());
  }

 private:
  const char *op_;
};

}  // namespace llmctl

#endif
