/* One operation's call of CUDA kernels: on the device of a tensor, on torch's current stream, errors as exceptions. */
#ifndef LLMCTL_CUDA_CALL_H
#define LLMCTL_CUDA_CALL_H

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include "../launch/abi.h"
#include "tensors.h"

namespace llmctl {

/* torch's current stream on a device. Its function is in libtorch_cuda.so, which torch without CUDA has not: asked for by
 * name, so that this library loads into any torch. A tensor on a CUDA device means that it is there. */
inline void *current_cuda_stream(int32_t device) {
  using Function = int32_t (*)(int32_t, void **);
  static const auto function = [] {
    void *library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void *found = dlsym(library == nullptr ? RTLD_DEFAULT : library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Function>(found);
  }();
  void *stream = nullptr;
  STD_TORCH_CHECK(function != nullptr && function(device, &stream) == 0, "torch does not tell its current CUDA stream");
  return stream;
}

/* Whether CUDA kernels are to be called for `tensor`: one name, because tests without a GPU answer for themselves. */
inline bool on_cuda(const Tensor &tensor) { return tensor.is_cuda(); }

/* Makes the device of `tensor`, and its primary context, the current ones for as long as it lives. */
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
  /* Before the guard goes back to the device that was current. */
  ~CudaCall() { llmctl_cuda_restore(before_); }

  void *stream() const { return stream_; }

  /* Of what a function llmctl_cuda_... returned. */
  void check(int error) const {
    STD_TORCH_CHECK(error == 0, "llmctl::", op_, " on cuda:", device_, ": ", llmctl_cuda_error(error));
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
