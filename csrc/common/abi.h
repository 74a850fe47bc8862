/* The identity of the sources that a library was built from. */
#ifndef LLMCTL_ABI_H
#define LLMCTL_ABI_H

#ifdef __cplusplus
extern "C" {
#endif

/* The hash of the sources that the build used: the loader compares it with the hash of the present sources. */
const char *llmctl_kernels_abi(void);

#ifdef __cplusplus
}
#endif

#endif
