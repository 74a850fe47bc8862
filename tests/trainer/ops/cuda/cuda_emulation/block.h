/* One block of emulated threads. Undefined behaviour on a GPU is an error here, which names kernel, block and thread:
 *
 *   a barrier that not all threads of the block reach at the same place;
 *   a shuffle without a full mask, or that not all 32 lanes of the warp reach at the same place;
 *   an address that is not mapped, or not aligned for the access.
 *
 * All bits of shared memory are 1 (NaN) when a block starts. Blocks, warps and threads of a warp run in a selectable
 * order, each warp as far as possible: a result that depends on the order shows a race. */
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

/* Indices of the running thread. */
extern const Thread *running;
extern Block block;
inline const Thread &this_thread() { return *running; }
inline const Block &this_block() { return block; }
inline int lane() { return running->number % 32; }

void barrier(Place place);

/* The 8 bytes that lane `from` of this thread's warp passed to the same call. */
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

/* One kernel of the image: its name, its maximum block size, and a function that calls it with the address of its
 * parameter. */
struct Kernel {
  const char *name;
  unsigned most_threads;
  void (*call)(const void *arguments);
};

extern const Kernel kernels[];
extern const int num_kernels;

/* Runs all blocks. Returns 0, or the CUresult of a GPU with the reason in complaint(). */
int run(const Kernel &kernel, Dim3 blocks, Dim3 threads, const void *arguments);

/* Error of the last launch, or empty. */
const char *complaint();

/* Order of warps, threads and blocks. 0: forwards, 1: backwards, larger: shuffled with this seed. */
void set_order(unsigned seed);

/* Run only this number of last blocks; 0: all. For tensors that are too large to process. */
void set_last_blocks(int64_t count);

}  // namespace emulation

#endif
