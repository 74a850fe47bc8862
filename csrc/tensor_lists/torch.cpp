#include "abi.h"

#include "../common/torch/cuda_call.h"
#include "../common/torch/tensor_chunks.h"

namespace llmctl {
namespace {

/* At least one: the dispatcher finds the kind of device by it. */
using Tensors = std::vector<Tensor>;

/* Pointers and lengths of a list. */
struct Arrays {
  std::vector<const void *> pointers;
  std::vector<int64_t> numels;
  int64_t chunks = 0;

  explicit Arrays(const Tensors &tensors) {
    const int64_t chunk = llmctl_cuda_list_chunk();
    for (const Tensor &tensor : tensors) {
      pointers.push_back(data(tensor));
      numels.push_back(tensor.numel());
      chunks += (tensor.numel() + chunk - 1) / chunk;
    }
  }
  int64_t count() const { return static_cast<int64_t>(pointers.size()); }
};

struct Cpu {
  static void sum_of_squares(int dtype, const Tensors &tensors, const Tensor &sum) {
    const std::vector<Chunk> chunks = chunks_of(tensors);
    std::vector<double> sums(chunks.size());
    for_chunks(chunks, [&](int64_t number, const Chunk &chunk) {
      llmctl_cpu_sum_of_squares(dtype, data(tensors[chunk.tensor]), &sums[static_cast<size_t>(number)], chunk.first,
                                chunk.stop);
    });
    double total = 0;
    for (const double part : sums) total += part;
    *static_cast<double *>(mutable_data(sum)) = total;
  }
};

struct Cuda {
  static void sum_of_squares(int dtype, const Tensors &tensors, const Tensor &sum) {
    const CudaCall call(sum, "sum_of_squares");
    const Arrays arrays(tensors);
    const Tensor partial = unwritten(sum, {std::max<int64_t>(1, arrays.chunks)});
    call.check(llmctl_cuda_sum_of_squares(dtype, arrays.pointers.data(), arrays.numels.data(), arrays.count(),
                                          static_cast<double *>(mutable_data(partial)),
                                          static_cast<double *>(mutable_data(sum)), call.stream()));
  }
};

template <typename Device>
Tensor sum_of_squares(Tensors tensors) {
  check_list(tensors, "sum_of_squares", "tensors");
  const Tensor sum = unwritten(tensors[0], {}, ScalarType::Double);
  Device::sum_of_squares(dtype_of(tensors[0], "sum_of_squares"), tensors, sum);
  return sum;
}

}  // namespace
}  // namespace llmctl

STABLE_TORCH_LIBRARY_FRAGMENT(llmctl, library) {
  library.def("sum_of_squares(Tensor[] tensors) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CPU, library) {
  library.impl("sum_of_squares", TORCH_BOX(&llmctl::sum_of_squares<llmctl::Cpu>));
}

STABLE_TORCH_LIBRARY_IMPL(llmctl, CUDA, library) {
  library.impl("sum_of_squares", TORCH_BOX(&llmctl::sum_of_squares<llmctl::Cuda>));
}
