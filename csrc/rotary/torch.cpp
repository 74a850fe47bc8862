#include "abi.h"

#include "../common/torch/cache_size.h"
#include "../common/torch/cuda_call.h"
#include "../common/torch/tensors.h"

namespace llmctl {
namespace {

/* The same tensor, or a copy if its channels are not contiguous. */
Tensor side_by_side(const Tensor &tensor) {
  const int64_t last = tensor.dim() - 1;
  return tensor.size(last) <= 1 || tensor.stride(last) == 1 ? tensor : torch::stable::contiguous(tensor);
}

std::vector<int64_t> first_strides(const Tensor &tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3)};
}

/* The address of the element at this offset from the first. */
void *address(const Tensor &tensor, int64_t element) {
  return static_cast<char *>(mutable_data(tensor)) + element * element_bytes(tensor);
}

/* One call: tokens [sequence, batch] with heads of one width, in parts, and their angles. */
class Call {
 public:
  /* `model`: its dtype, device and last size are those of all heads. */
  Call(const char *op, const Tensor &model, int64_t sequence, int64_t batch)
      : op_(op),
        dtype_(dtype_of(model, op)),
        model_(model),
        sequence_(sequence),
        batch_(batch),
        head_dim_(last_size(model)) {}

  /* Angles [sequence, batch or 1, ..., rotated / 2], with dims of size 1 in between. */
  void turn_by(const OptionalTensor &cos, const OptionalTensor &sin, bool is_interleaved, bool is_inverse) {
    LLMCTL_CHECK(cos.has_value() == sin.has_value(), "llmctl::", op_, ": cos and sin come together or not at all");
    if (!cos) return;
    LLMCTL_CHECK(last_size(*cos) == last_size(*sin), "llmctl::", op_, ": cos and sin differ in width");
    cos_ = side_by_side(*cos);
    sin_ = side_by_side(*sin);
    angles_ = {data(cos_), data(sin_), {}, {}, 2 * last_size(*cos), is_interleaved, is_inverse};
    LLMCTL_CHECK(angles_.rotated <= head_dim_, "llmctl::", op_, ": angles for ", angles_.rotated,
                 " channels, heads have ", head_dim_);
    find_strides(*cos_, "cos", angles_.cos_strides);
    find_strides(*sin_, "sin", angles_.sin_strides);
  }

  void check_kind(const Tensor &tensor, const char *name) const {
    LLMCTL_CHECK(tensor.scalar_type() == model_.scalar_type(), "llmctl::", op_, ": ", name, " has another dtype");
    check_device(tensor, model_, op_, name);
  }

  /* Adds heads [sequence, batch, groups, heads], read with `from_strides` and written with `to_strides`. */
  void add(const void *from, const std::vector<int64_t> &from_strides, void *to, const std::vector<int64_t> &to_strides,
           int64_t groups, int64_t heads, bool is_turned) {
    llmctl_heads &part = parts_[num_parts_++];
    part = {from, to, {}, {}, groups, heads, is_turned && angles_.rotated > 0};
    std::copy(from_strides.begin(), from_strides.end(), part.from_strides);
    std::copy(to_strides.begin(), to_strides.end(), part.to_strides);
    channels_ += groups * heads * head_dim_;
  }

  /* On one kind of device. */
  template <typename Device>
  void run() const {
    if (head_dim_ > 0 && channels_ > 0) Device::run(*this);
  }

 private:
  friend struct Cpu;
  friend struct Cuda;

  void find_strides(const Tensor &table, const char *name, long long *strides) const {
    check_kind(table, name);
    LLMCTL_CHECK(table.dim() >= 3 && table.size(0) == sequence_ && (table.size(1) == batch_ || table.size(1) == 1) &&
                     table.numel() == table.size(0) * table.size(1) * last_size(table),
                 "llmctl::", op_, ": ", name, " is not [sequence, batch or 1, 1, ..., rotated / 2]");
    strides[0] = table.stride(0);
    strides[1] = table.size(1) == 1 ? 0 : table.stride(1);
  }

  const char *op_;
  int dtype_;
  Tensor model_;
  int64_t sequence_, batch_, head_dim_;
  int64_t channels_ = 0; /* of a token */
  llmctl_heads parts_[LLMCTL_MAX_PARTS];
  int num_parts_ = 0;
  llmctl_angles angles_{};
  OptionalTensor cos_, sin_;
};

struct Cpu {
  static void run(const Call &call) {
    const int64_t tokens = call.sequence_ * call.batch_;
    const bool past_caches = goes_past_caches(tokens * call.channels_ * element_bytes(call.model_));
    for_rows(tokens, call.channels_, [&](int64_t first, int64_t stop) {
      llmctl_cpu_rope(call.dtype_, call.parts_, call.num_parts_, &call.angles_, call.batch_, call.head_dim_, first, stop,
                      past_caches);
    });
  }
};

struct Cuda {
  static void run(const Call &call) {
    const CudaCall cuda(call.model_, call.op_);
    cuda.check(llmctl_cuda_rope(call.dtype_, call.parts_, call.num_parts_, &call.angles_, call.sequence_ * call.batch_,
                                call.batch_, call.head_dim_, cuda.stream()));
  }
};

void check_packed(const Tensor &packed, const char *op) {
  LLMCTL_CHECK(packed.dim() == 5 && packed.size(3) >= 3, "llmctl::", op,
               ": packed is not [sequence, batch, groups, queries per group + 2, head_dim]");
  LLMCTL_CHECK(packed.size(4) <= 1 || packed.stride(4) == 1, "llmctl::", op,
               ": packed has gaps between its channels");
  for (int64_t dim = 0; dim < 4; ++dim) {
    LLMCTL_CHECK(packed.size(dim) <= 1 || packed.stride(dim) > 0, "llmctl::", op,
                 ": packed was expanded, and what is turned in place is turned once: clone it");
  }
}

template <typename Device>
void turn_in_place(const Tensor &packed, const Tensor &cos, const Tensor &sin, bool interleaved) {
  const char *op = "rope_";
  check_packed(packed, op);
  Call call(op, packed, packed.size(0), packed.size(1));
  call.turn_by(cos, sin, interleaved, false);
  void *memory = mutable_data(packed);
  const auto strides = first_strides(packed);
  call.add(memory, strides, memory, strides, packed.size(2), packed.size(3) - 1, true);
  call.run<Device>();
}

template <typename Device>
Tensor take_queries(const Tensor &packed, const OptionalTensor &cos, const OptionalTensor &sin, bool interleaved) {
  const char *op = "rope_take_queries_";
  check_packed(packed, op);
  const int64_t sequence = packed.size(0), batch = packed.size(1), groups = packed.size(2);
  const int64_t queries = packed.size(3) - 2, head_dim = packed.size(4), heads = groups * queries;
  Call call(op, packed, sequence, batch);
  call.turn_by(cos, sin, interleaved, false);
  const Tensor query = unwritten(packed, {sequence, batch, heads, head_dim});
  const auto strides = first_strides(packed);
  call.add(data(packed), strides, mutable_data(query),
           {batch * heads * head_dim, heads * head_dim, queries * head_dim, head_dim}, groups, queries, true);
  if (cos) {
    void *keys = address(packed, queries * packed.stride(3));
    call.add(keys, strides, keys, strides, groups, 1, true);
  }
  call.run<Device>();
  return query;
}

template <typename Device>
Tensor join(const Tensor &grad_query, const Tensor &grad_key, const Tensor &grad_value, const OptionalTensor &cos,
            const OptionalTensor &sin, bool interleaved) {
  const char *op = "rope_join";
  LLMCTL_CHECK(grad_query.dim() == 4 && grad_key.dim() == 4, "llmctl::", op,
               ": gradients are [batch, heads, sequence, head_dim]");
  check_like(grad_value, grad_key, op, "grad_value");
  const int64_t batch = grad_key.size(0), groups = grad_key.size(1), sequence = grad_key.size(2);
  const int64_t head_dim = grad_key.size(3), queries = groups == 0 ? 1 : grad_query.size(1) / groups;
  LLMCTL_CHECK(grad_query.size(0) == batch && grad_query.size(1) == groups * queries &&
                   grad_query.size(2) == sequence && grad_query.size(3) == head_dim,
               "llmctl::", op, ": the shapes of grad_query and grad_key do not belong together");
  Call call(op, grad_key, sequence, batch);
  call.check_kind(grad_query, "grad_query");
  call.turn_by(cos, sin, interleaved, true);
  const Tensor packed = unwritten(grad_key, {sequence, batch, groups, queries + 2, head_dim});
  const Tensor grads[] = {side_by_side(grad_query), side_by_side(grad_key), side_by_side(grad_value)};
  const int64_t heads[] = {queries, 1, 1}, starts[] = {0, queries, queries + 1};
  const auto strides = first_strides(packed);
  for (int part = 0; part < 3; ++part) {
    const Tensor &grad = grads[part];
    call.add(data(grad), {grad.stride(2), grad.stride(0), heads[part] * grad.stride(1), grad.stride(1)},
             address(packed, starts[part] * head_dim), strides, groups, heads[part], part < 2);
  }
  call.run<Device>();
  return packed;
}

}  // namespace
}  // namespace llmctl

STABLE_TORCH_LIBRARY_FRAGMENT(llmctl, library) {
  /* The last head of each group, its value, is not changed. */
  library.def("rope_(Tensor(a!) packed, Tensor cos, Tensor sin, bool interleaved) -> ()");
  /* Rotated queries [sequence, batch, heads, head_dim] in new memory; keys are rotated in place. */
  library.def("rope_take_queries_(Tensor(a!) packed, Tensor? cos, Tensor? sin, bool interleaved) -> Tensor query");
  /* The gradient of packed: gradients [batch, heads, sequence, head_dim], rotated back. */
  library.def(
      "rope_join(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor? cos, Tensor? sin, bool interleaved) "
      "-> Tensor grad_packed");
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CPU, library) {
  library.impl("rope_", TORCH_BOX(&llmctl::turn_in_place<llmctl::Cpu>));
  library.impl("rope_take_queries_", TORCH_BOX(&llmctl::take_queries<llmctl::Cpu>));
  library.impl("rope_join", TORCH_BOX(&llmctl::join<llmctl::Cpu>));
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CUDA, library) {
  library.impl("rope_", TORCH_BOX(&llmctl::turn_in_place<llmctl::Cuda>));
  library.impl("rope_take_queries_", TORCH_BOX(&llmctl::take_queries<llmctl::Cuda>));
  library.impl("rope_join", TORCH_BOX(&llmctl::join<llmctl::Cuda>));
}
