#include "abi.h"

#include <algorithm>
#include <type_traits>

#include "../common/cpu/isa.h"
#include "../common/cpu/processor.h"
#include "../common/cpu/results.h"

namespace {

using llmctl::kCacheLine;
using llmctl::kPerLine;
using llmctl::store_whole_line;
using llmctl::wide;

/* Pairs whose angles are read, and widened, at a time; they serve all heads of the token. */
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

template <typename T, typename Result>
void turn_interleaved(const T *from, Result *to, const wide<T> *cos, const wide<T> *sin, wide<T> sign, int64_t count) {
  using W = wide<T>;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const W x = W(from[2 * i]), y = W(from[2 * i + 1]), c = cos[i], s = sign * sin[i];
    to[2 * i] = x * c - y * s;
    to[2 * i + 1] = y * c + x * s;
  }
}

/* The same for a multiple of kPerLine pairs, a line of memory at a time. With kPastCaches lines go past the caches. Backward
 * of 2048 tokens with 32 heads of 128 bfloat16 takes 4.1 ms on one core of an AMD EPYC, and with a buffer 4.8 ms. */
template <bool kPastCaches, typename T>
void turn_lines(const T *from, T *to, const wide<T> *cos, const wide<T> *sin, wide<T> sign, int64_t apart, int64_t count,
                bool by_instruction) {
  using W = wide<T>;
  alignas(kCacheLine) W first[kPerLine<T>], second[kPerLine<T>];
  for (int64_t start = 0; start < count; start += kPerLine<T>) {
    const T *const line = from + start;
#pragma omp simd
    for (int64_t i = 0; i < kPerLine<T>; ++i) {
      const W x = W(line[i]), y = W(line[i + apart]), c = cos[start + i], s = sign * sin[start + i];
      first[i] = x * c - y * s;
      second[i] = y * c + x * s;
    }
    store_whole_line<kPastCaches>(to + start, first, by_instruction);
    store_whole_line<kPastCaches>(to + start + apart, second, by_instruction);
  }
}

template <bool kPastCaches, typename T>
void turn_interleaved_lines(const T *from, T *to, const wide<T> *cos, const wide<T> *sin, wide<T> sign, int64_t count,
                            bool by_instruction) {
  alignas(kCacheLine) wide<T> turned[2 * kPerLine<T>];
  for (int64_t start = 0; start < count; start += kPerLine<T>) {
    turn_interleaved(from + 2 * start, turned, cos + start, sin + start, sign, kPerLine<T>);
    store_whole_line<kPastCaches>(to + 2 * start, turned, by_instruction);
    store_whole_line<kPastCaches>(to + 2 * start + kPerLine<T>, turned + kPerLine<T>, by_instruction);
  }
}

/* Groups from the one that is read to the one that is prefetched. Processors prefetch consecutive memory by themselves, but
 * gradients of adjacent heads may be far apart in memory. Backward of 2048 tokens with 32 heads of 128 float32 takes
 * 13.6 ms without prefetching and 11.2 ms with it, on one core of an AMD EPYC. */
constexpr int64_t kGroupsAhead = 2;

/* The same in bytes for heads that are rotated in place: beyond the page, which processors do not prefetch by themselves.
 * With bfloat16 this takes 6.1 instead of 6.7 ms on one core of an Intel Xeon. */
constexpr int64_t kBytesAhead = 6144;

/* Tokens that are moved together if a head's tokens are consecutive in memory, as in the gradients of attention: more of a
 * page is read at once. On one core of an Intel Xeon backward of the same heads takes 25 ms, and token by token 36 ms. */
constexpr int64_t kTokens = 8;

template <typename T>
void fetch(const T *head, int64_t head_dim, bool to_write) {
  for (int64_t channel = 0; channel < head_dim; channel += kPerLine<T>) {
    to_write ? __builtin_prefetch(head + channel, 1) : __builtin_prefetch(head + channel, 0);
  }
}

/* Reads a byte of each line, so that heads of which only some channels are rotated in place are read without gaps: AMD's
 * processors prefetch only consecutive memory, and explicit prefetching is slower. Rotating the same heads in place takes
 * 5.2 ms with these reads, 9.5 ms with prefetching and 11.8 ms without either. */
template <typename T>
void read_lines(const T *from, const T *end) {
  for (; from < end; from += kPerLine<T>) (void)*reinterpret_cast<const volatile char *>(from);
}

/* Tokens [first, stop) of a call, numbered along the batch, then along the sequence, and the way of reading them. */
struct Tokens {
  int64_t batch, first, stop, head_dim;
  bool reads_gaps; /* between channels that are rotated in place */

  int64_t count() const { return stop - first; }
};

template <typename T>
const T *source_of(const llmctl_heads &part, int64_t batch, int64_t token) {
  return static_cast<const T *>(part.from) + token / batch * part.from_strides[0] + token % batch * part.from_strides[1];
}
template <typename T>
T *target_of(const llmctl_heads &part, int64_t batch, int64_t token) {
  return static_cast<T *>(part.to) + token / batch * part.to_strides[0] + token % batch * part.to_strides[1];
}

/* Reads the memory between the heads of a group and those of the next group, such as values, but at most one head.
 * `from` is the start of the first of `tokens`. */
template <typename T>
void read_after_group(const llmctl_heads &part, const Tokens &tokens, int64_t group, const T *from) {
  const T *const begin = from + group * part.from_strides[2], *next = begin + part.from_strides[2];
  if (group + 1 == part.groups) {
    if (tokens.count() < 2) return;
    next = source_of<T>(part, tokens.batch, tokens.first + 1);
  }
  const T *const end = begin + part.heads * part.from_strides[3];
  read_lines(end, std::min(next, end + tokens.head_dim));
}

/* Calls body(from, to) for each head of the first token in `part`, of which `turned` channels are rotated. */
template <typename T, typename Body>
void for_heads(const llmctl_heads &part, const Tokens &tokens, int64_t turned, Body body) {
  const T *from = source_of<T>(part, tokens.batch, tokens.first);
  T *to = target_of<T>(part, tokens.batch, tokens.first);
  const bool is_in_place = part.from == part.to, reads_gaps = is_in_place && tokens.reads_gaps;
  const int64_t group_bytes = std::max<int64_t>(1, part.from_strides[2] * static_cast<int64_t>(sizeof(T)));
  const int64_t groups_ahead = is_in_place ? std::max<int64_t>(1, kBytesAhead / group_bytes) : kGroupsAhead;
  for (int64_t group = 0; group < part.groups; ++group) {
    for (int64_t head = 0; head < part.heads; ++head) {
      const T *const source = from + group * part.from_strides[2] + head * part.from_strides[3];
      if (!reads_gaps) fetch(source + groups_ahead * part.from_strides[2], tokens.head_dim, is_in_place);
      body(source, to + group * part.to_strides[2] + head * part.to_strides[3]);
      if (reads_gaps) read_lines(source + turned, source + tokens.head_dim);
    }
    if (reads_gaps) read_after_group(part, tokens, group, from);
  }
}

/* The widened angles of some pairs of a token, and the direction of the rotation. */
template <typename T>
struct Turn {
  const wide<T> *cos, *sin;
  wide<T> sign;
  bool is_interleaved, by_instruction;
  int64_t start, count, pairs;

  /* Up to kPairs pairs from `start` on; `cosines` and `sines` are memory for as many. */
  static Turn of(const llmctl_angles &angles, int64_t batch, int64_t token, int64_t start, wide<T> *cosines, wide<T> *sines) {
    const int64_t position = token / batch, sample = token % batch;
    const int64_t pairs = angles.rotated / 2, count = std::min(kPairs, pairs - start);
    return {widened(row_of<T>(angles.cos, angles.cos_strides, position, sample) + start, cosines, count),
            widened(row_of<T>(angles.sin, angles.sin_strides, position, sample) + start, sines, count),
            wide<T>(angles.is_inverse ? -1 : 1),
            angles.is_interleaved != 0,
            llmctl::rounds_by_instruction<T>(),
            start,
            count,
            pairs};
  }

  /* True if the pairs of a head are whole lines. */
  bool has_whole_lines() const { return pairs % kPerLine<T> == 0; }

  template <bool kPastCaches>
  void by_lines(const T *from, T *to) const {
    if (is_interleaved) {
      turn_interleaved_lines<kPastCaches>(from + 2 * start, to + 2 * start, cos, sin, sign, count, by_instruction);
    } else {
      turn_lines<kPastCaches>(from + start, to + start, cos, sin, sign, pairs, count, by_instruction);
    }
  }

  void operator()(const T *from, T *to) const {
    if (by_instruction && has_whole_lines()) return by_lines<false>(from, to);
    if (is_interleaved) {
      turn_interleaved(from + 2 * start, to + 2 * start, cos, sin, sign, count);
    } else {
      turn(from + start, to + start, cos, sin, sign, pairs, count);
    }
  }
};

/* A whole head, past the caches if it moves to other memory. */
template <typename T>
void move_head(const T *from, T *to, const Turn<T> *turn, int64_t head_dim) {
  if (from == to) {
    if (turn != nullptr) (*turn)(from, to);
    return;
  }
  if (turn == nullptr) return llmctl::copy_past_caches(to, from, head_dim);
  const int64_t rotated = 2 * turn->pairs;
  if (turn->has_whole_lines() && reinterpret_cast<uintptr_t>(to) % kCacheLine == 0) {
    turn->template by_lines<true>(from, to);
    return llmctl::copy_past_caches(to + rotated, from + rotated, head_dim - rotated);
  }
  alignas(kCacheLine) T turned[2 * kPairs];
  (*turn)(from, turned);
  std::copy(from + rotated, from + head_dim, turned + rotated);
  llmctl::copy_past_caches(to, turned, head_dim);
}

/* Up to kTokens tokens, group by group, since the parts of a group may be adjacent in memory. `stop`: end of the call. */
template <typename T>
void move_past_caches(const llmctl_heads *parts, int num_parts, const llmctl_angles &angles, const Tokens &tokens,
                      int64_t stop) {
  alignas(kCacheLine) wide<T> cosines[kTokens][kPairs], sines[kTokens][kPairs];
  Turn<T> turns[kTokens];
  const T *from[LLMCTL_MAX_PARTS][kTokens];
  T *to[LLMCTL_MAX_PARTS][kTokens];
  const int64_t count = tokens.count();
  for (int64_t token = 0; token < count; ++token) {
    turns[token] = Turn<T>::of(angles, tokens.batch, tokens.first + token, 0, cosines[token], sines[token]);
    for (int number = 0; number < num_parts; ++number) {
      from[number][token] = source_of<T>(parts[number], tokens.batch, tokens.first + token);
      to[number][token] = target_of<T>(parts[number], tokens.batch, tokens.first + token);
    }
  }
  int64_t groups = 0;
  for (int number = 0; number < num_parts; ++number) groups = std::max<int64_t>(groups, parts[number].groups);
  const bool fetches = !tokens.reads_gaps || count > 1;
  const int64_t groups_ahead = count > 1 ? 1 : kGroupsAhead;
  const Tokens last{tokens.batch, tokens.stop - 1, stop, tokens.head_dim, tokens.reads_gaps};
  for (int64_t group = 0; group < groups; ++group) {
    for (int number = 0; number < num_parts; ++number) {
      const llmctl_heads &part = parts[number];
      const bool is_in_place = part.from == part.to;
      for (int64_t head = 0; group < part.groups && head < part.heads; ++head) {
        const int64_t source = group * part.from_strides[2] + head * part.from_strides[3];
        const int64_t target = group * part.to_strides[2] + head * part.to_strides[3];
        for (int64_t token = 0; token < count; ++token) {
          const T *const head_from = from[number][token] + source;
          if (fetches) fetch(head_from + groups_ahead * part.from_strides[2], tokens.head_dim, is_in_place);
          move_head(head_from, to[number][token] + target, part.is_turned ? &turns[token] : nullptr, tokens.head_dim);
        }
      }
      if (tokens.reads_gaps && is_in_place && group < part.groups) {
        read_after_group(part, last, group, from[number][count - 1]);
      }
    }
  }
}

/* The first token of parts that are rotated in place or stay in the caches. */
template <typename T>
void turn_token(const llmctl_heads *parts, int num_parts, const llmctl_angles &angles, const Tokens &tokens) {
  alignas(kCacheLine) wide<T> cosines[kPairs], sines[kPairs];
  for (int64_t start = 0; start < angles.rotated / 2; start += kPairs) {
    const Turn<T> turn = Turn<T>::of(angles, tokens.batch, tokens.first, start, cosines, sines);
    for (int part = 0; part < num_parts; ++part) {
      if (parts[part].is_turned) for_heads<T>(parts[part], tokens, angles.rotated, turn);
    }
  }
  const int64_t head_dim = tokens.head_dim;
  for (int part = 0; part < num_parts; ++part) {
    const int64_t turned = parts[part].is_turned ? angles.rotated : 0;
    if (turned == head_dim || parts[part].from == parts[part].to) continue;
    for_heads<T>(parts[part], tokens, turned,
                 [=](const T *from, T *to) { std::copy(from + turned, from + head_dim, to + turned); });
  }
}

/* All tokens of all parts. */
template <typename T>
void turn_tokens(const llmctl_heads *parts, int num_parts, const llmctl_angles &angles, Tokens tokens, bool past_caches) {
  const auto is_moved = [](const llmctl_heads &part) { return part.from != part.to; };
  const llmctl_heads *const moved = std::find_if(parts, parts + num_parts, is_moved);
  if (!past_caches || moved == parts + num_parts || tokens.head_dim > 2 * kPairs) {
    for (; tokens.count() > 0; ++tokens.first) turn_token<T>(parts, num_parts, angles, tokens);
    return;
  }
  const int64_t step = moved->from_strides[0] < moved->from_strides[2] ? kTokens : 1;
  for (; tokens.count() > 0; tokens.first += step) {
    Tokens together = tokens;
    together.stop = std::min(tokens.first + step, tokens.stop);
    move_past_caches<T>(parts, num_parts, angles, together, tokens.stop);
  }
}

}  // namespace

LLMCTL_CPU_KERNEL(llmctl_cpu_rope,
                  (int dtype, const llmctl_heads *parts, int num_parts, const llmctl_angles *angles, int64_t batch,
                   int64_t head_dim, int64_t first, int64_t stop, int past_caches),
                  (dtype, parts, num_parts, angles, batch, head_dim, first, stop, past_caches)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    /* Data that fits the caches needs no prefetching. */
    const bool reads_gaps = past_caches != 0 && llmctl::is_amd();
    turn_tokens<decltype(element)>(parts, num_parts, *angles, {batch, first, stop, head_dim, reads_gaps}, past_caches != 0);
  });
  llmctl::finish_stores(past_caches != 0);
}
