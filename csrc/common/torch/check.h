/* Refusals as exceptions, which torch passes on to Python as RuntimeError.
 *
 * Not torch's STD_TORCH_CHECK: its text begins with a path of the machine that compiled the library, and it formats with
 * iostreams, whose state is shared between all copies of the C++ library in a process. */
#ifndef LLMCTL_CHECK_H
#define LLMCTL_CHECK_H

#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace llmctl {

inline void append(std::string &text, const char *part) { text += part; }
inline void append(std::string &text, const std::string &part) { text += part; }

template <typename Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
inline void append(std::string &text, Number part) {
  char digits[32];
  if constexpr (std::is_floating_point_v<Number>) {
    std::snprintf(digits, sizeof digits, "%g", static_cast<double>(part));
  } else {
    std::snprintf(digits, sizeof digits, "%lld", static_cast<long long>(part));
  }
  text += digits;
}

template <typename... Parts>
[[noreturn]] __attribute__((cold, noinline)) void refuse(const Parts &...parts) {
  std::string text;
  (append(text, parts), ...);
  throw std::runtime_error(text);
}

}  // namespace llmctl

/* Throws the parts, joined, unless the condition holds. */
#define LLMCTL_CHECK(condition, ...)                    \
  do {                                                  \
    if (!(condition)) ::llmctl::refuse(__VA_ARGS__);    \
  } while (false)

#endif
