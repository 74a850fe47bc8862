/* Activations by number. */
#ifndef LLMCTL_ACTIVATION_KIND_H
#define LLMCTL_ACTIVATION_KIND_H

enum { LLMCTL_SILU = 0, LLMCTL_GELU = 1, LLMCTL_GELU_TANH = 2 };

#endif
