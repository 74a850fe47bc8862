/* One op's call of CUDA kernels: on the device of a tensor, on torch's current stream, with errors as exceptions. */
#ifndef LLMCTL_CUDA_CALL_H
#define LLMCTL_CUDA_CALL_H

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include "../launch/abi.h"
#include "tensors.h"

namespace llmctl {

/* torch's current stream on a device. The function is in libtorch_cuda.so, which torch without CUDA does not have.
 * It is looked up by name, so that this library loads into any torch; a tensor on a CUDA device proves that the
 * function exists. */
inline void *current_cuda_stream(int32_t device) {
  using Function = int32_t (*)(int32_t, void **);
  static const auto function = [] {
    void *library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void *found = dlsym(library == nullptr ? RTLD_DEFAULT : library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Function>(found);
  }();
  void *stream = nullptr;
  LLMCTL_CHECK(function != nullptr && function(device, &stream) == 0, "torch does not tell its current CUDA stream");
  return stream;
}

/* True if CUDA kernels are to be called for `tensor`. A function, because tests without a GPU replace it. */
inline bool on_cuda(const Tensor &tensor) { return tensor.is_cuda(); }

/* Makes the device of `tensor`, and its primary context, current for the lifetime of this object. */
class __attribute__((visibility("hidden"))) CudaCall {
 public:
  CudaCall(const Tensor &tensor, const char *op)
      : op_(op),
        device_(tensor.get_device_index()),
        guard_(device_),
        stream_(current_cuda_stream(device_)) {
    check(llmctl_cuda_use(device_, &before_));
  }
  CudaCall(const CudaCall &) = delete;
  CudaCall &operator=(const CudaCall &) = delete;
  /* Runs before the guard restores the device that was current. */
  ~CudaCall() { llmctl_cuda_restore(before_); }

  void *stream() const { return stream_; }

  /* Throws on an error that a function llmctl_cuda_... returned. */
  void check(int error) const {
    LLMCTL_CHECK(error == 0, "llmctl::", op_, " on cuda:", device_, ": ", llmctl_cuda_error(error));
  }

 private:
  const char *op_;
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  void *stream_;
  void *before_ = nullptr;
};

}  // namespace llmctl

#endif
