/* What is too much for the caches. */
#ifndef LLMCTL_CACHE_SIZE_H
#define LLMCTL_CACHE_SIZE_H

#include <unistd.h>

#include <cstdint>

namespace llmctl {

/* Whether results are stored past the caches that a call moves so many bytes beside: most would have left the caches before
 * anyone reads them. */
inline bool goes_past_caches(int64_t bytes) {
#ifdef _SC_LEVEL3_CACHE_SIZE
  static const int64_t of_processor = sysconf(_SC_LEVEL3_CACHE_SIZE);
#else
  constexpr int64_t of_processor = 0;
#endif
  const int64_t cache = of_processor > 0 ? of_processor : int64_t{32} << 20;
  return bytes > cache / 2;
}

}  // namespace llmctl

#endif
