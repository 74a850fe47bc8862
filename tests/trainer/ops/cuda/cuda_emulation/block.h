/* One block of emulated threads. What a GPU leaves undefined is an error here, with the kernel, the block and the thread:
 *
 *   a barrier that not all threads of the block reach, or that they reach at different places;
 *   a shuffle without a full mask, or that not all 32 lanes of the warp reach at the same place;
 *   an address that is not mapped, or not aligned for what is read or written there at once.
 *
 * Shared memory is full of ones (NaN) when a block starts. Warps, the threads of one, and blocks take turns in an order that
 * can be chosen, each warp going as far as it gets: results that depend on the order are a race. */
#ifndef LLMCTL_EMULATION_BLOCK_H
#define LLMCTL_EMULATION_BLOCK_H

#include <cstdint>
#include <cstring>

namespace emulation {

struct Dim3 {
  unsigned x, y, z;
};

struct Place {
  const char *file;
  int line;
};

struct Block {
  Dim3 index, threads, blocks;
};

struct Thread {
  Dim3 index;
  int number;
};

/* Of the thread that is running. */
extern const Thread *running;
extern Block block;
inline const Thread &this_thread() { return *running; }
inline const Block &this_block() { return block; }
inline int lane() { return running->number % 32; }

void barrier(Place place);

/* The 8 bytes that lane `from` of this thread's warp gave to the same call. */
uint64_t exchange(unsigned mask, uint64_t value, int from, Place place);

template <typename T>
T shuffle(unsigned mask, T value, int from, Place place) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves 8 bytes at most");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange(mask, bits, from, place);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/* One kernel of the image: its name, the most threads of a block that it is compiled for, and a call of it with the memory
 * of its one parameter. */
struct Kernel {
  const char *name;
  unsigned most_threads;
  void (*call)(const void *arguments);
};

extern const Kernel kernels[];
extern const int num_kernels;

/* Runs all blocks. Returns 0 or the CUresult that a GPU would give, and then says why by complaint(). */
int run(const Kernel &kernel, Dim3 blocks, Dim3 threads, const void *arguments);

/* What was wrong with the last launch; empty if nothing. */
const char *complaint();

/* 0: warps, threads and blocks in their order, 1: backwards, more: shuffled, by this seed. */
void set_order(unsigned seed);

/* Run only so many blocks, the last ones; 0: all. For tensors too large to be worked through. */
void set_last_blocks(int64_t count);

}  // namespace emulation

#endif
