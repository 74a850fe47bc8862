/* Device, image of the kernels (compiled by nvcc or NVRTC from every csrc/<op>/cuda.cu), and errors as text.
 *
 * Functions of this interface that return int give 0, an error of CUDA's driver (a CUresult, positive) or an error
 * of ours (negative). CUDA's driver is looked up at the first call of any of these functions; the library itself
 * loads without the driver. A launch on the given stream neither allocates nor waits nor loads, so that it can be
 * captured into a CUDA graph. All functions are safe to call from several threads. */
#ifndef LLMCTL_CUDA_H
#define LLMCTL_CUDA_H

#ifdef __cplusplus
extern "C" {
#endif

enum llmctl_cuda_failure { LLMCTL_CUDA_NO_DRIVER = -1, LLMCTL_CUDA_NO_IMAGE = -2, LLMCTL_CUDA_TOO_LARGE = -3 };

/* The CUDA version that the driver supports: 12080 for CUDA 12.8. */
int llmctl_cuda_driver_version(int *version);

/* Use `image`, a cubin or a fatbin, for launches on a device from now on, and load all its kernels. The previous image
 * stays in memory. */
int llmctl_cuda_load(int device, const void *image);

/* Make a device's primary context, which torch uses too, the current context of the calling thread. `before`, which
 * may be NULL, takes the context that was current, for llmctl_cuda_restore: this thread's CUDA runtime, and so
 * torch, takes the device of the current context for the current device. */
int llmctl_cuda_use(int device, void **before);

/* Make a context, or no context if `before` is NULL, the current context of the calling thread again. */
int llmctl_cuda_restore(void *before);

/* An error's name and meaning; valid until the calling thread's next call. */
const char *llmctl_cuda_error(int code);

#ifdef __cplusplus
}
#endif

#endif
