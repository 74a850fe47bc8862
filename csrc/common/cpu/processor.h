/* What is known of the processor beside its instruction set. */
#ifndef LLMCTL_PROCESSOR_H
#define LLMCTL_PROCESSOR_H

namespace llmctl {
/* Of each object its own: one compiled for another instruction set would not do. */
namespace {

/* AMD's processors fetch ahead over pages, but only what is read in order. */
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
