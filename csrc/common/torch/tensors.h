/* Functions that every op's binding needs, on torch's stable ABI (target 2.10) without ATen's headers, so that one
 * library serves all later torch. */
#ifndef LLMCTL_TENSORS_H
#define LLMCTL_TENSORS_H

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "../column_sums/abi.h"
#include "../dtype.h"
#include "check.h"

namespace llmctl {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline int dtype_of(const Tensor &tensor, const char *op) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return LLMCTL_FLOAT32;
    case ScalarType::BFloat16: return LLMCTL_BFLOAT16;
    case ScalarType::Half: return LLMCTL_FLOAT16;
    case ScalarType::Double: return LLMCTL_FLOAT64;
    default: LLMCTL_CHECK(false, "llmctl::", op, " takes float32, bfloat16, float16 and float64 only");
  }
  return -1;
}

inline int64_t element_bytes(const Tensor &tensor) {
  const auto type = tensor.scalar_type();
  return type == ScalarType::Double ? 8 : type == ScalarType::Float ? 4 : 2;
}

inline int64_t bytes_of(const Tensor &tensor) { return tensor.numel() * element_bytes(tensor); }

/* The type of the statistics and sums of `tensor`: float, or double for double elements. */
inline ScalarType wide_type(const Tensor &tensor) {
  return tensor.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

/* A new tensor on the device of `model`, by the op's function in the ABI: torch::stable::new_empty and new_zeros
 * look up their function by name, and box every size, at every call. */
inline Tensor made_by(decltype(&aoti_torch_aten_new_empty) op, const Tensor &model,
                      torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType type) {
  int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  int32_t device = 0, layout = aoti_torch_layout_strided();
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(model.get(), &device));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(op(model.get(), sizes.data(), static_cast<int64_t>(sizes.size()), &dtype, &layout, &device,
                            model.get_device_index(), nullptr, &made));
  return Tensor(made);
}

inline Tensor unwritten(const Tensor &model, torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType type) {
  return made_by(aoti_torch_aten_new_empty, model, sizes, type);
}
inline Tensor unwritten(const Tensor &model, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  return unwritten(model, sizes, model.scalar_type());
}
inline Tensor zeros(const Tensor &model, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  return made_by(aoti_torch_aten_new_zeros, model, sizes, model.scalar_type());
}

inline const void *data(const Tensor &tensor) { return tensor.const_data_ptr(); }
inline const void *data(const OptionalTensor &tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }
inline void *mutable_data(const Tensor &tensor) { return tensor.mutable_data_ptr(); }

/* The same elements without gaps; a copy only where there are gaps. */
inline Tensor packed(const Tensor &tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}
inline OptionalTensor packed(const OptionalTensor &tensor) {
  return tensor ? OptionalTensor(packed(*tensor)) : tensor;
}

inline int64_t last_size(const Tensor &tensor) { return tensor.size(tensor.dim() - 1); }

/* The rows of `tensor` as [rows, last size]; no rows if they have no elements. */
inline int64_t rows_of(const Tensor &tensor) {
  const int64_t width = last_size(tensor);
  return width == 0 ? 0 : tensor.numel() / width;
}

inline bool same_shape(const Tensor &left, const Tensor &right) {
  const auto a = left.sizes(), b = right.sizes();
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

/* True if both tensors are on one device; for GPUs, on the same GPU. */
inline bool same_device(const Tensor &left, const Tensor &right) {
  return left.is_cuda() == right.is_cuda() &&
         (!left.is_cuda() || left.get_device_index() == right.get_device_index());
}

inline void check_device(const Tensor &what, const Tensor &model, const char *op, const char *name) {
  LLMCTL_CHECK(same_device(what, model), "llmctl::", op, ": ", name, " is on another device");
}

/* Checks that `what` is like `model` in shape, dtype and device. */
inline void check_like(const Tensor &what, const Tensor &model, const char *op, const char *name) {
  LLMCTL_CHECK(same_shape(what, model), "llmctl::", op, ": ", name, " has another shape");
  LLMCTL_CHECK(what.scalar_type() == model.scalar_type(), "llmctl::", op, ": ", name, " has another dtype");
  check_device(what, model, op, name);
}

/* Checks that `what` is a vector as long as the last dim of `model`, of its dtype and on its device. */
inline void check_vector(const Tensor &what, const Tensor &model, const char *op, const char *name) {
  LLMCTL_CHECK(what.dim() == 1 && what.size(0) == last_size(model), "llmctl::", op, ": ", name, " has ",
               what.numel(), " elements, not one for each of the ", last_size(model), " channels");
  LLMCTL_CHECK(what.scalar_type() == model.scalar_type(), "llmctl::", op, ": ", name, " has another dtype");
  check_device(what, model, op, name);
}

/* One number for each of `rows` rows, without gaps, of the type of the statistics of `model` and on its device. */
inline void check_row_numbers(const Tensor &what, const Tensor &model, int64_t rows, const char *op, const char *name) {
  LLMCTL_CHECK(what.dim() == 1 && what.size(0) == rows && what.is_contiguous(), "llmctl::", op, ": ", name,
               " is not one number for each of the ", rows, " rows");
  LLMCTL_CHECK(what.scalar_type() == wide_type(model), "llmctl::", op, ": ", name, " has another dtype");
  check_device(what, model, op, name);
}

/* Fewest rows of a thread: about 32 Ki elements. */
inline int64_t grain(int64_t width) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width)); }

/* Calls body(first, stop) over the rows, in torch's own threads, or in the calling thread if the rows are few. */
template <typename Body>
inline void for_rows(int64_t rows, int64_t width, Body body) {
  if (rows > 0) torch::stable::parallel_for(0, rows, grain(width), body);
}

/* The number of blocks in which rows are summed. It depends only on the shape, not on the number of threads, so that
 * results have the same bits. 32 are enough for threads; more blocks keep digits, of which a running sum loses more with
 * the root of its length. */
constexpr int64_t kBlocksForThreads = 32, kMaxRowsPerBlock = 128;
inline int64_t num_blocks(int64_t rows, int64_t width) {
  return std::max(std::clamp<int64_t>(rows / grain(width), 1, kBlocksForThreads), rows / kMaxRowsPerBlock);
}

/* Calls body(block, first, stop) for `blocks` segments of the rows, several of them per thread if they are short. */
template <typename Body>
inline void for_blocks(int64_t rows, int64_t width, int64_t blocks, Body body) {
  const int64_t worth = std::max<int64_t>(1, blocks * grain(width) / std::max<int64_t>(1, rows));
  torch::stable::parallel_for(0, blocks, worth, [&](int64_t first, int64_t stop) {
    for (int64_t block = first; block < stop; ++block) body(block, rows * block / blocks, rows * (block + 1) / blocks);
  });
}

/* The sum of [rows, width] over the rows, from the partial sum of each block. On CPUs. */
class RowSums {
 public:
  RowSums(const Tensor &model, int64_t rows, int64_t width)
      : dtype_(model.scalar_type()),
        width_(width),
        blocks_(num_blocks(rows, width)),
        partial_(unwritten(model, {blocks_ * width}, wide_type(model))) {}

  int64_t blocks() const { return blocks_; }

  /* The block's partial sum, in the wide type: [width] zeros at first. */
  void *of(int64_t block) {
    const size_t bytes = static_cast<size_t>(width_) * (dtype_ == ScalarType::Double ? sizeof(double) : sizeof(float));
    return std::memset(static_cast<char *>(mutable_data(partial_)) + static_cast<size_t>(block) * bytes, 0, bytes);
  }

  /* [width], of the model's dtype. */
  Tensor total() const {
    if (blocks_ == 1 && dtype_ == partial_.scalar_type()) return partial_;
    const Tensor sums = unwritten(partial_, {width_}, dtype_);
    llmctl_cpu_column_sums(dtype_of(sums, "column_sums"), data(partial_), mutable_data(sums), blocks_, width_);
    return sums;
  }

 private:
  ScalarType dtype_;
  int64_t width_, blocks_;
  Tensor partial_;
};

}  // namespace llmctl

#endif
