/* Arguments from launchers to kernels: one structure per kernel, declared in csrc/<op>/cuda.h and read by g++, nvcc
 * and NVRTC, so that neither side can mistake the order or the size of a parameter. */
#ifndef LLMCTL_ARGUMENTS_H
#define LLMCTL_ARGUMENTS_H

namespace llmctl {

/* int64_t without its header, which NVRTC lacks. */
using int64 = long long;

}  // namespace llmctl

#endif
