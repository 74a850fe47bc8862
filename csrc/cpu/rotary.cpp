#include "../include/rotary.h"

#include <algorithm>
#include <type_traits>

#include "isa.h"
#include "past_caches.h"

namespace {

using llmctl::kCacheLine;
using llmctl::wide;

/* Angles are read, and widened, for so many pairs at a time, and serve all heads of the token. */
constexpr int64_t kPairs = 256;

template <typename T>
const wide<T> *widened(const T *from, wide<T> *buffer, int64_t count) {
  if constexpr (std::is_same_v<T, wide<T>>) {
    return from;
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) buffer[i] = wide<T>(from[i]);
    return buffer;
  }
}

template <typename T>
const T *row_of(const void *table, const long long *strides, int64_t position, int64_t sample) {
  return static_cast<const T *>(table) + position * strides[0] + sample * strides[1];
}

/* `count` pairs, the first of which begins at `from`; `apart` is how far a pair's channels are. `to` may be `from`. */
template <typename T>
void turn(const T *from, T *to, const wide<T> *cos, const wide<T> *sin, wide<T> sign, int64_t apart, int64_t count) {
  using W = wide<T>;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const W x = W(from[i]), y = W(from[i + apart]), c = cos[i], s = sign * sin[i];
    to[i] = x * c - y * s;
    to[i + apart] = y * c + x * s;
  }
}

template <typename T>
void turn_interleaved(const T *from, T *to, const wide<T> *cos, const wide<T> *sin, wide<T> sign, int64_t count) {
  using W = wide<T>;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const W x = W(from[2 * i]), y = W(from[2 * i + 1]), c = cos[i], s = sign * sin[i];
    to[2 * i] = x * c - y * s;
    to[2 * i + 1] = y * c + x * s;
  }
}

/* Groups between the one that is read and the one that is fetched. Processors fetch ahead by themselves what is read
 * without gaps, but packed heads have values between keys and queries, and gradients of neighbouring heads lie far
 * apart: of 2048 tokens with 32 heads of 128 float32, backward takes 32 ms without this and 19 ms with it, on one core
 * of an AMD EPYC. */
constexpr int64_t kGroupsAhead = 2;

/* The same in bytes where heads stay in their place: beyond the page, where processors by themselves fetch no further. Those
 * of bfloat16 take 6.1 instead of 6.7 ms on one core of an Intel Xeon. */
constexpr int64_t kBytesAhead = 6144;

/* Tokens that are moved together where a head's tokens lie side by side, as attention leaves gradients: so much of a page is
 * read at once. On one core of an Intel Xeon backward of the same heads takes 25 ms so, and token by token 36 ms. */
constexpr int64_t kTokens = 8;

template <typename T>
void fetch(const T *head, int64_t head_dim, bool to_write) {
  for (int64_t channel = 0; channel < head_dim; channel += kCacheLine / static_cast<int64_t>(sizeof(T))) {
    to_write ? __builtin_prefetch(head + channel, 1) : __builtin_prefetch(head + channel, 0);
  }
}

template <typename T>
const T *source_of(const llmctl_heads &part, int64_t position, int64_t sample) {
  return static_cast<const T *>(part.from) + position * part.from_strides[0] + sample * part.from_strides[1];
}
template <typename T>
T *target_of(const llmctl_heads &part, int64_t position, int64_t sample) {
  return static_cast<T *>(part.to) + position * part.to_strides[0] + sample * part.to_strides[1];
}

/* visit(from, to) for each head, of `head_dim` channels, that a token has in `part`. */
template <typename T, typename Visitor>
void for_heads(const llmctl_heads &part, int64_t position, int64_t sample, int64_t head_dim, Visitor visit) {
  const T *from = source_of<T>(part, position, sample);
  T *to = target_of<T>(part, position, sample);
  const bool is_in_place = part.from == part.to;
  const int64_t group_bytes = std::max<int64_t>(1, part.from_strides[2] * static_cast<int64_t>(sizeof(T)));
  const int64_t groups_ahead = is_in_place ? std::max<int64_t>(1, kBytesAhead / group_bytes) : kGroupsAhead;
  for (int64_t group = 0; group < part.groups; ++group) {
    for (int64_t head = 0; head < part.heads; ++head) {
      fetch(from + (group + groups_ahead) * part.from_strides[2] + head * part.from_strides[3], head_dim, is_in_place);
      visit(from + group * part.from_strides[2] + head * part.from_strides[3],
            to + group * part.to_strides[2] + head * part.to_strides[3]);
    }
  }
}

/* Some pairs of a token's angles, widened, and which way they turn. */
template <typename T>
struct Turn {
  const wide<T> *cos, *sin;
  wide<T> sign;
  bool is_interleaved;
  int64_t start, count, pairs;

  /* Up to kPairs from `start` on; `cosines` and `sines` are memory for as many. */
  static Turn of(const llmctl_angles &angles, int64_t position, int64_t sample, int64_t start, wide<T> *cosines,
                 wide<T> *sines) {
    const int64_t pairs = angles.rotated / 2, count = std::min(kPairs, pairs - start);
    return {widened(row_of<T>(angles.cos, angles.cos_strides, position, sample) + start, cosines, count),
            widened(row_of<T>(angles.sin, angles.sin_strides, position, sample) + start, sines, count),
            wide<T>(angles.is_inverse ? -1 : 1),
            angles.is_interleaved != 0,
            start,
            count,
            pairs};
  }

  void operator()(const T *from, T *to) const {
    if (is_interleaved) {
      turn_interleaved(from + 2 * start, to + 2 * start, cos, sin, sign, count);
    } else {
      turn(from + start, to + start, cos, sin, sign, pairs, count);
    }
  }
};

/* A whole head, past the caches if it lies elsewhere afterwards. */
template <typename T>
void move_head(const T *from, T *to, const Turn<T> *turn, int64_t head_dim) {
  if (from == to) {
    if (turn != nullptr) (*turn)(from, to);
    return;
  }
  if (turn == nullptr) return llmctl::copy_past_caches(to, from, head_dim);
  alignas(kCacheLine) T turned[2 * kPairs];
  (*turn)(from, turned);
  const int64_t rotated = 2 * turn->pairs;
  std::copy(from + rotated, from + head_dim, turned + rotated);
  llmctl::copy_past_caches(to, turned, head_dim);
}

/* `count` tokens, kTokens at the most, group by group, since what a group has of all parts may lie side by side. */
template <typename T>
void move_past_caches(const llmctl_heads *parts, int num_parts, const llmctl_angles &angles, int64_t batch,
                      int64_t head_dim, int64_t first, int64_t count) {
  alignas(kCacheLine) wide<T> cosines[kTokens][kPairs], sines[kTokens][kPairs];
  Turn<T> turns[kTokens];
  for (int64_t token = 0; token < count; ++token) {
    const int64_t position = (first + token) / batch, sample = (first + token) % batch;
    turns[token] = Turn<T>::of(angles, position, sample, 0, cosines[token], sines[token]);
  }
  const int64_t groups_ahead = count > 1 ? 1 : kGroupsAhead;
  const T *from[LLMCTL_MAX_PARTS][kTokens];
  T *to[LLMCTL_MAX_PARTS][kTokens];
  int64_t groups = 0;
  for (int number = 0; number < num_parts; ++number) {
    groups = std::max<int64_t>(groups, parts[number].groups);
    for (int64_t token = 0; token < count; ++token) {
      from[number][token] = source_of<T>(parts[number], (first + token) / batch, (first + token) % batch);
      to[number][token] = target_of<T>(parts[number], (first + token) / batch, (first + token) % batch);
    }
  }
  for (int64_t group = 0; group < groups; ++group) {
    for (int number = 0; number < num_parts; ++number) {
      const llmctl_heads &part = parts[number];
      const bool is_in_place = part.from == part.to;
      for (int64_t head = 0; group < part.groups && head < part.heads; ++head) {
        const int64_t source = group * part.from_strides[2] + head * part.from_strides[3];
        const int64_t target = group * part.to_strides[2] + head * part.to_strides[3];
        for (int64_t token = 0; token < count; ++token) {
          fetch(from[number][token] + source + groups_ahead * part.from_strides[2], head_dim, is_in_place);
          move_head(from[number][token] + source, to[number][token] + target, part.is_turned ? &turns[token] : nullptr,
                    head_dim);
        }
      }
    }
  }
}

/* One token of parts that stay in their place or in the caches. */
template <typename T>
void turn_token(const llmctl_heads *parts, int num_parts, const llmctl_angles &angles, int64_t position, int64_t sample,
                int64_t head_dim) {
  alignas(kCacheLine) wide<T> cosines[kPairs], sines[kPairs];
  for (int64_t start = 0; start < angles.rotated / 2; start += kPairs) {
    const Turn<T> turn = Turn<T>::of(angles, position, sample, start, cosines, sines);
    for (int part = 0; part < num_parts; ++part) {
      if (parts[part].is_turned) for_heads<T>(parts[part], position, sample, head_dim, turn);
    }
  }
  for (int part = 0; part < num_parts; ++part) {
    const int64_t turned = parts[part].is_turned ? angles.rotated : 0;
    if (turned == head_dim || parts[part].from == parts[part].to) continue;
    for_heads<T>(parts[part], position, sample, head_dim,
                 [=](const T *from, T *to) { std::copy(from + turned, from + head_dim, to + turned); });
  }
}

/* Tokens [first, stop) of all parts. */
template <typename T>
void turn_tokens(const llmctl_heads *parts, int num_parts, const llmctl_angles &angles, int64_t batch, int64_t head_dim,
                 int64_t first, int64_t stop, bool past_caches) {
  const auto is_moved = [](const llmctl_heads &part) { return part.from != part.to; };
  const llmctl_heads *const moved = std::find_if(parts, parts + num_parts, is_moved);
  if (!past_caches || moved == parts + num_parts || head_dim > 2 * kPairs) {
    for (; first < stop; ++first) turn_token<T>(parts, num_parts, angles, first / batch, first % batch, head_dim);
    return;
  }
  const int64_t step = moved->from_strides[0] < moved->from_strides[2] ? kTokens : 1;
  for (; first < stop; first += step) {
    move_past_caches<T>(parts, num_parts, angles, batch, head_dim, first, std::min(step, stop - first));
  }
}

}  // namespace

LLMCTL_CPU_KERNEL(llmctl_cpu_rope,
                  (int dtype, const llmctl_heads *parts, int num_parts, const llmctl_angles *angles, int64_t batch,
                   int64_t head_dim, int64_t first, int64_t stop, int past_caches),
                  (dtype, parts, num_parts, angles, batch, head_dim, first, stop, past_caches)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    turn_tokens<decltype(element)>(parts, num_parts, *angles, batch, head_dim, first, stop, past_caches != 0);
  });
  llmctl::finish_stores(past_caches != 0);
}
