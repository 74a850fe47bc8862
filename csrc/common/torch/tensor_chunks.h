/* Lists of tensors as chunks of limited length, so that threads share large tensors and small tensors share a
 * thread. */
#ifndef LLMCTL_TENSOR_CHUNKS_H
#define LLMCTL_TENSOR_CHUNKS_H

#include <cstdint>

#include "tensors.h"

namespace llmctl {

struct Chunk {
  size_t tensor;
  int64_t first, stop;
};

/* A constant length: the order of sums depends on it. */
constexpr int64_t kChunk = 1 << 16;

inline std::vector<Chunk> chunks_of(const std::vector<Tensor> &tensors) {
  std::vector<Chunk> chunks;
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    const int64_t numel = tensors[tensor].numel();
    for (int64_t first = 0; first < numel; first += kChunk) {
      chunks.push_back({tensor, first, std::min(first + kChunk, numel)});
    }
  }
  return chunks;
}

/* Calls body(number, chunk) for every chunk in torch's own threads, several chunks per thread if they are short. */
template <typename Body>
inline void for_chunks(const std::vector<Chunk> &chunks, Body body) {
  if (chunks.empty()) return;
  const int64_t count = static_cast<int64_t>(chunks.size());
  int64_t elements = 0;
  for (const Chunk &chunk : chunks) elements += chunk.stop - chunk.first;
  torch::stable::parallel_for(0, count, std::max<int64_t>(1, count * grain(1) / elements), [&](int64_t first, int64_t stop) {
    for (int64_t number = first; number < stop; ++number) body(number, chunks[static_cast<size_t>(number)]);
  });
}

/* Checks that `tensors` are contiguous, of one dtype and on one device. */
inline void check_list(const std::vector<Tensor> &tensors, const char *op, const char *name) {
  for (const Tensor &tensor : tensors) {
    LLMCTL_CHECK(tensor.is_contiguous(), "llmctl::", op, ": one of ", name, " is not contiguous");
    LLMCTL_CHECK(tensor.scalar_type() == tensors[0].scalar_type(), "llmctl::", op, ": ", name,
                 " have more than one dtype");
    LLMCTL_CHECK(same_device(tensor, tensors[0]), "llmctl::", op, ": ", name, " are on more than one device");
  }
}

/* Checks that `tensors` are like `model` in number, in the elements of each and in the device. */
inline void check_list_like(const std::vector<Tensor> &tensors, const std::vector<Tensor> &model, const char *op,
                            const char *name) {
  check_list(tensors, op, name);
  LLMCTL_CHECK(tensors.size() == model.size(), "llmctl::", op, ": there are ", tensors.size(), " ", name, " for ",
               model.size(), " masters");
  for (size_t i = 0; i < tensors.size(); ++i) {
    LLMCTL_CHECK(tensors[i].numel() == model[i].numel() && same_device(tensors[i], model[i]), "llmctl::", op,
                 ": number ", i, " of ", name, " is not like its master");
  }
}

/* Memory that an op writes to. */
struct Span {
  uintptr_t first, stop;
};

inline void add_spans(std::vector<Span> &spans, const std::vector<Tensor> &tensors) {
  for (const Tensor &tensor : tensors) {
    const auto first = reinterpret_cast<uintptr_t>(mutable_data(tensor));
    const auto bytes = static_cast<uintptr_t>(tensor.numel() * element_bytes(tensor));
    if (bytes > 0) spans.push_back({first, first + bytes});
  }
}

/* Checks that no two of `spans` share memory: one thread alone may change an element. */
inline void check_apart(std::vector<Span> spans, const char *op) {
  std::sort(spans.begin(), spans.end(), [](const Span &left, const Span &right) { return left.first < right.first; });
  for (size_t i = 1; i < spans.size(); ++i) {
    LLMCTL_CHECK(spans[i - 1].stop <= spans[i].first, "llmctl::", op,
                 ": two of the tensors that it changes share memory, or one was given twice");
  }
}

}  // namespace llmctl

#endif
