#include "abi.h"

extern "C" const char *llmctl_kernels_abi(void) { return LLMCTL_SOURCES; }
