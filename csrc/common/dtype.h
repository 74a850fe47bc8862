/* Numbers of the element types that kernels take. torch's own numbers may differ between releases. */
#ifndef LLMCTL_DTYPE_H
#define LLMCTL_DTYPE_H

enum llmctl_dtype { LLMCTL_FLOAT32 = 0, LLMCTL_BFLOAT16 = 1, LLMCTL_FLOAT16 = 2, LLMCTL_FLOAT64 = 3 };

#endif
