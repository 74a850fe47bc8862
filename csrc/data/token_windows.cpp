#include "../include/token_windows.h"

#include <algorithm>

namespace {

/* Tokens that are gone through one way after another while they are in the fastest cache. */
constexpr int64_t kBlock = 64;

template <typename Token>
void widen(const Token *from, int64_t count, int64_t *to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

/* Without a way out, so that several are compared at a time. */
template <typename Token>
bool has(const Token *tokens, int64_t count, Token wanted) {
  Token found = 0;
  for (int64_t i = 0; i < count; ++i) found = static_cast<Token>(found | (tokens[i] == wanted));
  return found != 0;
}

/* Numbers as far as there is room, and how many there would be. */
class Bounds {
 public:
  Bounds(int64_t *bounds, int64_t room) : bounds_(bounds), room_(room) {}

  void add(int64_t bound) {
    if (made_ < room_) bounds_[made_] = bound;
    ++made_;
  }

  int64_t made() const { return made_; }

 private:
  int64_t *bounds_;
  int64_t room_, made_ = 0;
};

template <typename Token>
int64_t divide(const Token *windows, int64_t rows, int64_t length, int64_t end, int64_t *tokens, int64_t *labels,
               uint8_t *counts, int64_t *firsts, Bounds bounds) {
  const Token last = static_cast<Token>(end);
  /* Otherwise no token is it. */
  const bool is_token = static_cast<int64_t>(last) == end;
  for (int64_t row = 0; row < rows; ++row) {
    const Token *const window = windows + row * (length + 1);
    firsts[row] = bounds.made();
    bounds.add(0);
    for (int64_t first = 0; first < length; first += kBlock) {
      const Token *const block = window + first;
      const int64_t count = std::min(kBlock, length - first), place = row * length + first;
      widen(block, count, tokens + place);
      widen(block + 1, count, labels + place);
      const bool has_end = is_token && has(block, count, last);
      if (counts != nullptr) {
        std::fill(counts + place, counts + place + count, 1);
        for (int64_t i = 0; i < count && has_end; ++i) counts[place + i] = block[i] != last;
      }
      for (int64_t i = 0; i < count && has_end; ++i)
        if (block[i] == last && first + i + 1 < length) bounds.add(first + i + 1);
    }
    bounds.add(length);
  }
  return firsts[rows] = bounds.made();
}

}  // namespace

extern "C" int64_t llmctl_divide_windows(const void *windows, int64_t width, int64_t rows, int64_t length, int64_t end,
                                         int64_t *tokens, int64_t *labels, uint8_t *counts, int64_t *firsts,
                                         int64_t *bounds, int64_t room) {
  const auto divide_all = [&](const auto *all) {
    return divide(all, rows, length, end, tokens, labels, counts, firsts, Bounds(bounds, room));
  };
  if (width == 2) return divide_all(static_cast<const uint16_t *>(windows));
  if (width == 4) return divide_all(static_cast<const int32_t *>(windows));
  return divide_all(static_cast<const int64_t *>(windows));
}

extern "C" void llmctl_document_positions(const int64_t *firsts, const int64_t *bounds, int64_t rows, int64_t length,
                                          int32_t *positions) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t bound = firsts[row]; bound + 1 < firsts[row + 1]; ++bound) {
      int32_t *const document = positions + row * length + bounds[bound];
      const int32_t count = static_cast<int32_t>(bounds[bound + 1] - bounds[bound]);
      for (int32_t i = 0; i < count; ++i) document[i] = i;
    }
}
