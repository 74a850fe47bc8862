/* Included before csrc/common/launch/driver.cpp, whose driver is the fake one in the same library. */
#ifndef LLMCTL_EMULATION_OWN_PATH_H
#define LLMCTL_EMULATION_OWN_PATH_H

#include <dlfcn.h>

namespace emulation {

inline const char *own_path() {
  Dl_info facts{};
  dladdr(reinterpret_cast<const void *>(&own_path), &facts);
  return facts.dli_fname;
}

}  // namespace emulation

#define LLMCTL_DRIVER_LIBRARY emulation::own_path()

#endif
