/* The identity of the sources that a library was built from. */
#ifndef LLMCTL_ABI_H
#define LLMCTL_ABI_H

#ifdef __cplusplus
extern "C" {
#endif

/* The name that the build gave to the sources: the loader of the library compares it with the sources at hand. */
const char *llmctl_kernels_abi(void);

#ifdef __cplusplus
}
#endif

#endif
