/* A fake libcuda.so.1: the functions that csrc/common/launch/driver.cpp looks up, on emulated blocks and host memory. It
 * has two devices, and returns the errors of CUDA's driver. */
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

#include "block.h"

namespace {

enum {
  kSuccess = 0,
  kInvalidValue = 1,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNotFound = 500,
  kIllegalAddress = 700,
  kLaunchOutOfResources = 701,
  kLaunchFailed = 719,
};

constexpr int kDevices = 2;
constexpr unsigned kSharedBytes = 48 << 10;
const char kImage[] = "image of the emulated kernels";

char contexts[kDevices];
char module;
std::mutex launched_mutex;
std::set<std::string> launched;
thread_local void *current = nullptr;

struct Name {
  int error;
  const char *name, *meaning;
};
const Name names[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kLaunchOutOfResources, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
};

const Name *name_of(int error) {
  for (const Name &name : names) {
    if (name.error == error) return &name;
  }
  return nullptr;
}

bool within(emulation::Dim3 size, unsigned x, unsigned y, unsigned z) {
  return size.x >= 1 && size.y >= 1 && size.z >= 1 && size.x <= x && size.y <= y && size.z <= z;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return kSuccess; }

int cuDriverGetVersion(int *version) {
  *version = 13000;
  return kSuccess;
}

int cuGetErrorName(int error, const char **text) {
  const Name *name = name_of(error);
  *text = name == nullptr ? nullptr : name->name;
  return name == nullptr ? kInvalidValue : kSuccess;
}

int cuGetErrorString(int error, const char **text) {
  const Name *name = name_of(error);
  *text = name == nullptr ? nullptr : name->meaning;
  return name == nullptr ? kInvalidValue : kSuccess;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  if (device < 0 || device >= kDevices) return kInvalidDevice;
  *context = &contexts[device];
  return kSuccess;
}

int cuCtxGetCurrent(void **context) {
  *context = current;
  return kSuccess;
}

int cuCtxSetCurrent(void *context) {
  current = context;
  return kSuccess;
}

int cuCtxGetDevice(int *device) {
  if (current == nullptr) return kInvalidContext;
  *device = static_cast<int>(static_cast<char *>(current) - contexts);
  return kSuccess;
}

int cuModuleLoadData(void **loaded, const void *image) {
  if (current == nullptr) return kInvalidContext;
  if (image == nullptr || std::strcmp(static_cast<const char *>(image), kImage) != 0) return kInvalidImage;
  *loaded = &module;
  return kSuccess;
}

int cuModuleGetFunction(void **function, void *, const char *name) {
  for (int i = 0; i < emulation::num_kernels; ++i) {
    if (std::strcmp(emulation::kernels[i].name, name) != 0) continue;
    *function = const_cast<emulation::Kernel *>(&emulation::kernels[i]);
    return kSuccess;
  }
  return kNotFound;
}

int cuLaunchKernel(void *function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x,
                   unsigned threads_y, unsigned threads_z, unsigned shared, void *, void **parameters, void **) {
  const auto &kernel = *static_cast<const emulation::Kernel *>(function);
  const emulation::Dim3 blocks{blocks_x, blocks_y, blocks_z}, threads{threads_x, threads_y, threads_z};
  if (current == nullptr) return kInvalidContext;
  if (!within(blocks, 2147483647u, 65535u, 65535u) || !within(threads, 1024u, 1024u, 64u)) return kInvalidValue;
  const unsigned long long count = 1ull * threads_x * threads_y * threads_z;
  if (count > 1024 || shared > kSharedBytes) return kInvalidValue;
  if (count > kernel.most_threads) return kInvalidValue;
  {
    const std::lock_guard lock(launched_mutex);
    launched.insert(kernel.name);
  }
  return emulation::run(kernel, blocks, threads, parameters[0]);
}

/* Functions for tests, not part of CUDA. */
const char *emulation_complaint() { return emulation::complaint(); }
const char *emulation_image() { return kImage; }
/* Names of the kernels launched since the last call, one per line; valid until this thread's next call. */
const char *emulation_launched() {
  static thread_local std::string lines;
  const std::lock_guard lock(launched_mutex);
  lines.clear();
  for (const std::string &name : launched) lines += name + "\n";
  launched.clear();
  return lines.c_str();
}
void emulation_set_order(unsigned seed) { emulation::set_order(seed); }
void emulation_set_last_blocks(long long count) { emulation::set_last_blocks(count); }

}  // extern "C"
