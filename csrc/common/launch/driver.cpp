#include "driver.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"

/* Tests, which emulate a GPU, define another path. */
#ifndef LLMCTL_DRIVER_LIBRARY
#define LLMCTL_DRIVER_LIBRARY "libcuda.so.1"
#endif

namespace llmctl {
namespace {

constexpr int kDevices = 64;
constexpr int64_t kMaxBlocks = 2147483647; /* of a grid's x, on every GPU since 2012 */

/* The functions of CUDA's driver that are called here, with its opaque handles as pointers and its enums as int. */
struct Driver {
  int (*init)(unsigned);
  int (*driver_version)(int *);
  int (*error_name)(int, const char **);
  int (*error_string)(int, const char **);
  int (*retain_primary_context)(void **, int);
  int (*current_context)(void **);
  int (*set_current_context)(void *);
  int (*current_device)(int *);
  int (*load_module)(void **, const void *);
  int (*function_of_module)(void **, void *, const char *);
  int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

  bool complete = false;

  Driver() {
    void *library = dlopen(LLMCTL_DRIVER_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    complete = library != nullptr && found(library, "cuInit", init) &&
               found(library, "cuDriverGetVersion", driver_version) && found(library, "cuGetErrorName", error_name) &&
               found(library, "cuGetErrorString", error_string) &&
               found(library, "cuDevicePrimaryCtxRetain", retain_primary_context) &&
               found(library, "cuCtxGetCurrent", current_context) &&
               found(library, "cuCtxSetCurrent", set_current_context) &&
               found(library, "cuCtxGetDevice", current_device) && found(library, "cuModuleLoadData", load_module) &&
               found(library, "cuModuleGetFunction", function_of_module) && found(library, "cuLaunchKernel", launch) &&
               init(0) == 0;
  }

 private:
  template <typename Function>
  static bool found(void *library, const char *name, Function &function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  }
};

/* The driver, or null without a working one. */
const Driver *driver() {
  static const Driver driver;
  return driver.complete ? &driver : nullptr;
}

constexpr int kDtypes = 4;

/* Every kernel by its number. Filled while the library is loaded, before any call, and never destroyed: other threads
 * may launch while the process ends. */
std::vector<const Kernel *> &registered_kernels() {
  static auto *const kernels = new std::vector<const Kernel *>;
  return *kernels;
}

/* The functions of an image: for each kernel's number one function per dtype, null where the kernel has none. */
struct Functions {
  std::vector<std::array<void *, kDtypes>> of;

  /* Looks up every function. With lazy loading, the default since CUDA 12.2, the lookup loads the kernel (CUDA
   * Programming Guide, "Lazy Loading"), and a launch into a stream that is being captured must not load one. */
  int find(const Driver &driver, void *module) {
    for (const Kernel *kernel : registered_kernels()) {
      of.push_back({});
      if (const int error = find(driver, module, *kernel)) return error;
    }
    return 0;
  }

 private:
  int find(const Driver &driver, void *module, const Kernel &kernel) {
    static const char *const suffixes[kDtypes] = {"_float32", "_bfloat16", "_float16", "_float64"};
    const bool no_type = kernel.types == KernelTypes::kNoType;
    const int count = no_type ? 1 : kernel.types == KernelTypes::kNoDouble ? LLMCTL_FLOAT64 : kDtypes;
    for (int dtype = 0; dtype < count; ++dtype) {
      const std::string whole = std::string(kernel.name) + (no_type ? "" : suffixes[dtype]);
      const int error = driver.function_of_module(&of.back()[dtype], module, whole.c_str());
      if (error != 0) return error;
    }
    return 0;
  }
};

/* The state of a device. Nothing is ever unloaded: captured graphs may still launch it. */
struct Device {
  std::mutex loading;
  std::atomic<void *> context{nullptr};
  std::atomic<const Functions *> functions{nullptr};
};

Device *device_number(int number) {
  /* Never destroyed: other threads may launch while the process ends. */
  static Device *const devices = new Device[kDevices];
  return number >= 0 && number < kDevices ? &devices[number] : nullptr;
}

/* The current device. A thread that has used no device yet has no current context, and must call llmctl_cuda_use. */
int current_device(const Driver &driver, Device **device) {
  int number = 0;
  const int error = driver.current_device(&number);
  if (error != 0) return error;
  *device = device_number(number);
  return *device == nullptr ? LLMCTL_CUDA_TOO_LARGE : 0;
}

/* The primary context of a device. */
int context_of(const Driver &driver, Device &device, int number, void **context) {
  *context = device.context.load(std::memory_order_acquire);
  if (*context != nullptr) return 0;
  const std::lock_guard lock(device.loading);
  *context = device.context.load(std::memory_order_relaxed);
  if (*context != nullptr) return 0;
  const int error = driver.retain_primary_context(context, number);
  if (error == 0) device.context.store(*context, std::memory_order_release);
  return error;
}

/* Loads an image into the current context, which is the device's. */
int load(const Driver &driver, Device &device, const void *image) {
  const std::lock_guard lock(device.loading);
  void *module = nullptr;
  int error = driver.load_module(&module, image);
  if (error != 0) return error;
  auto found = std::make_unique<Functions>();
  error = found->find(driver, module);
  /* The table before stays too: another thread may be reading it. */
  if (error == 0) device.functions.store(found.release(), std::memory_order_release);
  return error;
}

}  // namespace

Kernel::Kernel(const char *kernel_name, KernelTypes kernel_types)
    : name(kernel_name), types(kernel_types), number(static_cast<int>(registered_kernels().size())) {
  registered_kernels().push_back(this);
}

int launch(const Kernel &kernel, int dtype, const Grid &grid, const void *arguments, void *stream) {
  const Driver *cuda = driver();
  if (cuda == nullptr) return LLMCTL_CUDA_NO_DRIVER;
  if (grid.blocks > kMaxBlocks) return LLMCTL_CUDA_TOO_LARGE;
  Device *device = nullptr;
  const int error = current_device(*cuda, &device);
  if (error != 0) return error;
  const Functions *functions = device->functions.load(std::memory_order_acquire);
  if (functions == nullptr) return LLMCTL_CUDA_NO_IMAGE;
  void *parameters[] = {const_cast<void *>(arguments)};
  return cuda->launch(functions->of[kernel.number][dtype], static_cast<unsigned>(grid.blocks), 1, 1,
                      static_cast<unsigned>(grid.threads_x), static_cast<unsigned>(grid.threads_y), 1, 0, stream,
                      parameters, nullptr);
}

int launch(const Kernel &kernel, const Grid &grid, const void *arguments, void *stream) {
  return launch(kernel, 0, grid, arguments, stream);
}

}  // namespace llmctl

extern "C" int llmctl_cuda_driver_version(int *version) {
  const llmctl::Driver *cuda = llmctl::driver();
  return cuda == nullptr ? LLMCTL_CUDA_NO_DRIVER : cuda->driver_version(version);
}

extern "C" int llmctl_cuda_use(int number, void **before) {
  const llmctl::Driver *cuda = llmctl::driver();
  llmctl::Device *device = llmctl::device_number(number);
  if (cuda == nullptr) return LLMCTL_CUDA_NO_DRIVER;
  if (device == nullptr) return LLMCTL_CUDA_TOO_LARGE;
  void *wanted = nullptr, *current = nullptr;
  int error = llmctl::context_of(*cuda, *device, number, &wanted);
  if (error == 0) error = cuda->current_context(&current);
  if (error == 0 && current != wanted) error = cuda->set_current_context(wanted);
  if (error == 0 && before != nullptr) *before = current;
  return error;
}

extern "C" int llmctl_cuda_restore(void *before) {
  const llmctl::Driver *cuda = llmctl::driver();
  void *current = nullptr;
  if (cuda == nullptr) return LLMCTL_CUDA_NO_DRIVER;
  const int error = cuda->current_context(&current);
  return error != 0 || current == before ? error : cuda->set_current_context(before);
}

extern "C" int llmctl_cuda_load(int number, const void *image) {
  void *before = nullptr;
  const int unusable = llmctl_cuda_use(number, &before);
  if (unusable != 0) return unusable;
  const int error = llmctl::load(*llmctl::driver(), *llmctl::device_number(number), image);
  const int lost = llmctl_cuda_restore(before);
  return error != 0 ? error : lost;
}

extern "C" const char *llmctl_cuda_error(int code) {
  switch (code) {
    case LLMCTL_CUDA_NO_DRIVER: return "CUDA's driver (libcuda.so.1) cannot be loaded";
    case LLMCTL_CUDA_NO_IMAGE: return "no kernels have been loaded on this device";
    case LLMCTL_CUDA_TOO_LARGE: return "more blocks, or devices, than are supported";
  }
  const llmctl::Driver *cuda = llmctl::driver();
  const char *name = nullptr, *meaning = nullptr;
  if (cuda == nullptr || cuda->error_name(code, &name) != 0) name = "unknown error of CUDA";
  if (cuda == nullptr || cuda->error_string(code, &meaning) != 0) meaning = "no description";
  static thread_local char text[256];
  std::snprintf(text, sizeof text, "%s (%d): %s", name, code, meaning);
  return text;
}
