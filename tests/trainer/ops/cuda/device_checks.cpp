// The ops' comparison of devices, for tensors whose device the test sets.
#include <cstdint>

#include "../../../../csrc/common/torch/tensors.h"

struct AtenTensorOpaque {
  int32_t type, index;
};

extern "C" {
// Replaces torch's function.
int32_t aoti_torch_device_type_cuda() { return 1; }
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle) { return 0; }
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t *type) {
  *type = tensor->type;
  return 0;
}
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t *index) {
  *index = tensor->index;
  return 0;
}

int are_on_one_device(int left_type, int left_index, int right_type, int right_index) {
  AtenTensorOpaque left{left_type, left_index}, right{right_type, right_index};
  return llmctl::same_device(torch::stable::Tensor(&left), torch::stable::Tensor(&right));
}
}
