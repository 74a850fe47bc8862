/* Facts about the processor besides its instruction set. */
#ifndef LLMCTL_PROCESSOR_H
#define LLMCTL_PROCESSOR_H

namespace llmctl {
/* Internal linkage: each object needs the functions as compiled for its own instruction set. */
namespace {

/* AMD's processors prefetch across pages, but only data that is read in order. */
inline bool is_amd() {
#ifdef __x86_64__
  static const bool found = __builtin_cpu_is("amd") != 0;
  return found;
#else
  return false;
#endif
}

}  // namespace
}  // namespace llmctl

#endif
