/* Philox4x32-10: random numbers that are a function of a counter and a key (Salmon et al. 2011, "Parallel Random
 * Numbers: As Easy as 1, 2, 3", section 3.3 and table 2). Every element of a tensor has its own number, on every
 * device and layout. */
#ifndef LLMCTL_PHILOX_H
#define LLMCTL_PHILOX_H

#include "../common/number.h"

namespace llmctl {

using uint64 = unsigned long long;

struct Philox4 {
  unsigned lanes[4];
};

LLMCTL_FN void philox_round(unsigned &c0, unsigned &c1, unsigned &c2, unsigned &c3, unsigned k0, unsigned k1) {
  const uint64 left = 0xD2511F53ull * c0, right = 0xCD9E8D57ull * c2;
  c0 = static_cast<unsigned>(right >> 32) ^ c1 ^ k0;
  c1 = static_cast<unsigned>(right);
  c2 = static_cast<unsigned>(left >> 32) ^ c3 ^ k1;
  c3 = static_cast<unsigned>(left);
}

/* The four numbers of `counter`, whose upper 64 bits are zero, under the key `seed`. */
LLMCTL_FN Philox4 philox(uint64 counter, uint64 seed) {
  unsigned c0 = static_cast<unsigned>(counter), c1 = static_cast<unsigned>(counter >> 32), c2 = 0, c3 = 0;
  unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
#ifdef __CUDACC__
#pragma unroll
#else
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round) {
    philox_round(c0, c1, c2, c3, k0, k1);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/* The keys of all rounds: where many threads share a seed, the caller computes the keys once. */
struct PhiloxKeys {
  unsigned first[10], second[10];
};

LLMCTL_FN PhiloxKeys philox_keys(uint64 seed) {
  PhiloxKeys keys;
  for (unsigned round = 0; round < 10; ++round) {
    keys.first[round] = static_cast<unsigned>(seed) + round * 0x9E3779B9u;
    keys.second[round] = static_cast<unsigned>(seed >> 32) + round * 0xBB67AE85u;
  }
  return keys;
}

LLMCTL_FN Philox4 philox(uint64 counter, const PhiloxKeys &keys) {
  unsigned c0 = static_cast<unsigned>(counter), c1 = static_cast<unsigned>(counter >> 32), c2 = 0, c3 = 0;
#ifdef __CUDACC__
#pragma unroll
#else
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round) philox_round(c0, c1, c2, c3, keys.first[round], keys.second[round]);
  return {{c0, c1, c2, c3}};
}

}  // namespace llmctl

#endif
