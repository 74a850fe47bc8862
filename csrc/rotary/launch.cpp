#include "abi.h"

#include <limits>

#include "../common/launch/abi.h"
#include "../common/launch/grid.h"
#include "cuda.h"

namespace {

using llmctl::Kernel;
using llmctl::KernelTypes;

const Kernel rope("rope", KernelTypes::kAll);

bool multiples(int64_t pack, const long long *numbers, int count) {
  return std::all_of(numbers, numbers + count, [=](long long number) { return number % pack == 0; });
}

bool packs(int dtype, const llmctl_heads *parts, int num_parts, const llmctl_angles &angles, int64_t head_dim) {
  const int64_t pack = 16 / llmctl::bytes_of(dtype);
  bool result = angles.rotated % (2 * pack) == 0 && llmctl::packs(dtype, head_dim, {angles.cos, angles.sin}) &&
                multiples(pack, angles.cos_strides, 2) && multiples(pack, angles.sin_strides, 2);
  for (const llmctl_heads *part = parts; part < parts + num_parts; ++part) {
    result = result && llmctl::packs(dtype, head_dim, {part->from, part->to}) &&
             multiples(pack, part->from_strides, 4) && multiples(pack, part->to_strides, 4);
  }
  return result;
}

}  // namespace

extern "C" int llmctl_cuda_rope(int dtype, const llmctl_heads *parts, int num_parts, const llmctl_angles *angles,
                                int64_t tokens, int64_t batch, int64_t head_dim, void *stream) {
  llmctl::Rope arguments{{}, *angles, tokens, batch, head_dim, {}, 0, false, false};
  int64_t heads = 0;
  for (int number = 0; number < num_parts; ++number) {
    const llmctl_heads &part = arguments.parts[number] = parts[number];
    heads += part.groups * part.heads;
    arguments.moves = arguments.moves || part.from != part.to;
  }
  const int64_t channels = heads * head_dim;
  if (tokens == 0 || channels == 0) return 0;
  if (channels > std::numeric_limits<int>::max()) return LLMCTL_CUDA_TOO_LARGE;
  arguments.heads = static_cast<int>(heads);
  for (int number = 0; number < num_parts; ++number) {
    arguments.part_heads[number] = static_cast<int>(parts[number].groups * parts[number].heads);
  }
  arguments.packed = packs(dtype, parts, num_parts, *angles, head_dim);
  const int64_t unit = arguments.packed ? 16 / llmctl::bytes_of(dtype) : 1;
  const int64_t rest = arguments.moves ? (head_dim - angles->rotated) / unit : 0;
  const int64_t units = heads * (angles->rotated / 2 / unit + rest);
  if (units == 0) return 0;
  const llmctl::Grid grid = llmctl::row_grid(tokens, units, 1, llmctl::kRopeThreads);
  return llmctl::launch(rope, dtype, grid, &arguments, stream);
}
