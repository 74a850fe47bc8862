/* Stores past the caches, for results that would not fit. An ordinary store first reads the line that it changes, unless
 * the processor detects consecutive whole lines, as along a row, but not from head to head. */
#ifndef LLMCTL_PAST_CACHES_H
#define LLMCTL_PAST_CACHES_H

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace llmctl {
/* Internal linkage: each object needs the functions as compiled for its own instruction set. */
namespace {

constexpr int64_t kCacheLine = 64;

#ifdef __SSE2__
/* Stores a line past the caches. `to` is aligned to a line, `from` may be any address. */
inline void store_line(char *to, const char *from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i *>(to), _mm512_loadu_si512(from));
#elif defined(__AVX__)
  for (int part = 0; part < 2; ++part) {
    _mm256_stream_si256(reinterpret_cast<__m256i *>(to) + part,
                        _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from) + part));
  }
#else
  for (int part = 0; part < 4; ++part) {
    _mm_stream_si128(reinterpret_cast<__m128i *>(to) + part,
                     _mm_loadu_si128(reinterpret_cast<const __m128i *>(from) + part));
  }
#endif
}
#else
inline void store_line(char *to, const char *from) { std::memcpy(to, from, kCacheLine); }
#endif

/* A copy whose whole lines go past the caches; other threads see it after `finish_stores`. */
template <typename T>
inline void copy_past_caches(T *to, const T *from, int64_t count) {
  char *const target = reinterpret_cast<char *>(to);
  const char *const source = reinterpret_cast<const char *>(from);
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  int64_t done = std::min<int64_t>(bytes, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) % kCacheLine));
  if (done > 0) std::memcpy(target, source, static_cast<size_t>(done));
  for (; done + kCacheLine <= bytes; done += kCacheLine) store_line(target + done, source + done);
  if (done < bytes) std::memcpy(target + done, source + done, static_cast<size_t>(bytes - done));
}

inline void finish_stores(bool past_caches) {
#ifdef __SSE2__
  if (past_caches) _mm_sfence();
#else
  (void)past_caches;
#endif
}

}  // namespace
}  // namespace llmctl

#endif
