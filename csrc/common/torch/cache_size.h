/* The size of the cache, and the results that are too large for it. */
#ifndef LLMCTL_CACHE_SIZE_H
#define LLMCTL_CACHE_SIZE_H

#include <unistd.h>

#include <cstdint>
#include <cstdio>

namespace llmctl {

/* Bytes of a core's third-level cache, which it may share. Read from sysfs: on AMD's processors sysconf(3) of glibc 2.36
 * adds up the caches of a whole socket, 320 MiB on an EPYC whose cores have 32. */
inline int64_t cache_of_core() {
  long long kib = 0;
  if (FILE *file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "re")) {
    if (std::fscanf(file, "%lldK", &kib) != 1) kib = 0;
    std::fclose(file);
  }
  if (kib > 0) return int64_t{kib} << 10;
#ifdef _SC_LEVEL3_CACHE_SIZE
  const int64_t said = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (said > 0) return said;
#endif
  return int64_t{32} << 20;
}

/* True if a call that moves this many bytes stores its results past the caches, which they would leave before they are
 * read. */
inline bool goes_past_caches(int64_t bytes) {
  static const int64_t cache = cache_of_core();
  return bytes > cache / 2;
}

}  // namespace llmctl

#endif
