/* What comes before a launch: the image of the kernels (csrc/cuda, compiled by nvcc or NVRTC), a device, and errors as text.
 *
 * Functions of this interface that return int give 0, an error of CUDA's driver (a CUresult, positive) or one of our own
 * (negative). CUDA's driver is looked up at the first call of any of them; the library itself loads without it. A launch
 * neither allocates nor waits nor loads, and goes to the stream that it is given: it can be captured into a CUDA graph. All
 * are safe to call from several threads. */
#ifndef LLMCTL_CUDA_H
#define LLMCTL_CUDA_H

#ifdef __cplusplus
extern "C" {
#endif

enum llmctl_cuda_failure { LLMCTL_CUDA_NO_DRIVER = -1, LLMCTL_CUDA_NO_IMAGE = -2, LLMCTL_CUDA_TOO_LARGE = -3 };

/* What the driver supports: 12080 for CUDA 12.8. */
int llmctl_cuda_driver_version(int *version);

/* Use `image`, a cubin or a fatbin, for launches on a device from now on, and load every kernel of it; one that was there
 * before stays in memory. */
int llmctl_cuda_load(int device, const void *image);

/* Make a device's primary context, which is torch's too, the current one of the calling thread. `before`, which may be NULL,
 * becomes what was current until then, for llmctl_cuda_restore: a context of another device is what this thread's runtime,
 * and its torch, take for the current device. */
int llmctl_cuda_use(int device, void **before);

/* Make a context, or none if it is NULL, the current one of the calling thread again. */
int llmctl_cuda_restore(void *before);

/* An error's name and meaning; valid until the calling thread asks for the next. */
const char *llmctl_cuda_error(int code);

#ifdef __cplusplus
}
#endif

#endif
