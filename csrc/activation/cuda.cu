#include "cuda.h"

#include "../common/cuda/approximations.h"
#include "../common/cuda/device.h"

namespace llmctl {
namespace {
namespace activation {

/* Properties of a call that are constants of the kernel, which makes the work on a pack short. */
template <int number, bool is_gated, bool has_a_bias>
struct Fixed {
  static constexpr int kind = number;
  static constexpr bool gated = is_gated, has_bias = has_a_bias;
};

/* The same properties as arguments of the call. */
struct Given {
  int kind;
  bool gated, has_bias;
};

template <typename T, int kind, bool gated, bool has_bias>
__device__ __forceinline__ Activated<wide<T>> activated(Fixed<kind, gated, has_bias>, wide<T> x) {
  return activate<kind, Functions<T>>(x);
}

template <typename T>
__device__ __forceinline__ Activated<wide<T>> activated(const Given &form, wide<T> x) {
  switch (form.kind) {
    case LLMCTL_GELU: return activate<LLMCTL_GELU, Functions<T>>(x);
    case LLMCTL_GELU_TANH: return activate<LLMCTL_GELU_TANH, Functions<T>>(x);
    case LLMCTL_RELU: return activate<LLMCTL_RELU, Functions<T>>(x);
    case LLMCTL_SQUARED_RELU: return activate<LLMCTL_SQUARED_RELU, Functions<T>>(x);
    default: return activate<LLMCTL_SILU, Functions<T>>(x);
  }
}

/* The work of a thread: one pack of channels, with their ups if gated, in a segment of rows. */
template <int N>
struct Task {
  int64 segment, chunk, unit, first, stop, inner_width;
  bool works; /* Threads beyond the last channel take part only in the sums. */

  __device__ __forceinline__ Task(const Activation &a, bool gated) {
    /* With more than one chunk a block has no second row of threads: see Plan in launch.cpp. */
    const unsigned chunks = static_cast<unsigned>(a.chunks);
    segment = chunks == 1 ? first_row() : blockIdx.x / chunks;
    chunk = chunks == 1 ? 0 : blockIdx.x % chunks;
    unit = chunk * blockDim.x + threadIdx.x;
    inner_width = gated ? 2 * a.width : a.width;
    first = segment * a.rows_of_segment;
    stop = first + a.rows_of_segment < a.rows ? first + a.rows_of_segment : a.rows;
    works = (first < a.rows || segment == 0) && unit * N < a.width;
  }
};

/* The biases of a thread's channels, in registers. */
template <int N, typename T, typename Form>
__device__ __forceinline__ void load_biases(const Form &form, const Activation &a, const Task<N> &task,
                                            wide<T> (&gates)[N], wide<T> (&ups)[N]) {
  const bool has_gates = form.has_bias && task.works, has_ups = has_gates && form.gated;
  const T *bias = static_cast<const T *>(a.bias);
  Pack<T, N> of_gates, of_ups;
  if (has_gates) of_gates = load<N>(bias, task.unit);
  if (has_ups) of_ups = load<N>(bias + a.width, task.unit);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    gates[i] = has_gates ? wide<T>(of_gates.values[i]) : wide<T>(0);
    ups[i] = has_ups ? wide<T>(of_ups.values[i]) : wide<T>(0);
  }
}

/* A value with its bias; without biases nothing is added, not even zero. */
template <typename Form, typename W>
__device__ __forceinline__ W with_bias(const Form &form, W value, W bias) {
  return form.has_bias ? value + bias : value;
}

template <typename W>
__device__ __forceinline__ W weight_of(const Activation &a, int64 row) {
  return a.row_weight == nullptr ? W(1) : static_cast<const W *>(a.row_weight)[row];
}

template <int N, typename T, typename Form>
__device__ __forceinline__ void forward_task(const Form &form, const ActivationForward &arguments) {
  using W = wide<T>;
  const Activation &a = arguments.shared;
  const Task<N> task(a, form.gated);
  if (!task.works) return;
  W gate_bias[N], up_bias[N];
  load_biases<N, T>(form, a, task, gate_bias, up_bias);
  /* Rows whose loads come before the first store: the compiler must assume that stores may change what later loads
   * read. */
  constexpr int kRows = N == 1 ? 1 : 2;
  for (int64 first = task.first; first < task.stop; first += kRows) {
    Pack<T, N> gates[kRows], ups[kRows];
    W weights[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      /* An odd last row is loaded twice. */
      const int64 row = first + r < task.stop ? first + r : task.stop - 1;
      const T *inner = static_cast<const T *>(a.inner) + row * task.inner_width;
      gates[r] = load<N>(inner, task.unit);
      ups[r] = form.gated ? load<N>(inner + a.width, task.unit) : gates[r];
      weights[r] = weight_of<W>(a, row);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= task.stop) continue;
      Pack<T, N> result;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        W value = activated<T>(form, with_bias(form, W(gates[r].values[i]), gate_bias[i])).value;
        if (form.gated) value *= with_bias(form, W(ups[r].values[i]), up_bias[i]);
        result.values[i] = T(value * weights[r]);
      }
      store<N>(static_cast<T *>(arguments.activated) + (first + r) * a.width, task.unit, result);
    }
  }
}

/* Computes the gradients of one thread's part of a row, and adds to `sums`. Returns this thread's part of the row
 * weight's gradient. */
template <int N, typename T, typename Form>
__device__ __forceinline__ wide<T> backward_pack(const Form &form, wide<T> weight, const Pack<T, N> &grads,
                                                 const wide<T> (&gate_bias)[N], const wide<T> (&up_bias)[N],
                                                 Pack<T, N> &gates, Pack<T, N> &ups, wide<T> (&gate_sums)[N],
                                                 wide<T> (&up_sums)[N]) {
  using W = wide<T>;
  W along = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Activated<W> at = activated<T>(form, with_bias(form, W(gates.values[i]), gate_bias[i]));
    const W grad = W(grads.values[i]), weighted = grad * weight;
    W grad_gate = weighted * at.slope;
    if (form.gated) {
      const W up = with_bias(form, W(ups.values[i]), up_bias[i]), grad_up = weighted * at.value;
      grad_gate *= up;
      along += grad * (at.value * up);
      ups.values[i] = T(grad_up);
      if (form.has_bias) up_sums[i] += grad_up;
    } else {
      along += grad * at.value;
    }
    gates.values[i] = T(grad_gate);
    if (form.has_bias) gate_sums[i] += grad_gate;
  }
  return along;
}

template <int N, typename T, typename Form>
__device__ __forceinline__ void backward_task(const Form &form, const ActivationBackward &arguments) {
  using W = wide<T>;
  const Activation &a = arguments.shared;
  const Task<N> task(a, form.gated);
  W gate_bias[N], up_bias[N], gate_sums[N] = {}, up_sums[N] = {};
  load_biases<N, T>(form, a, task, gate_bias, up_bias);
  for (int64 row = task.first; row < task.stop; ++row) {
    W along = 0;
    if (task.works) {
      const T *inner = static_cast<const T *>(a.inner) + row * task.inner_width;
      const Pack<T, N> grads = load<N>(static_cast<const T *>(arguments.grad_activated) + row * a.width, task.unit);
      Pack<T, N> gates = load<N>(inner, task.unit);
      Pack<T, N> ups = form.gated ? load<N>(inner + a.width, task.unit) : gates;
      const W weight = weight_of<W>(a, row);
      along = backward_pack<N, T>(form, weight, grads, gate_bias, up_bias, gates, ups, gate_sums, up_sums);
      T *grad_inner = static_cast<T *>(arguments.grad_inner) + row * task.inner_width;
      store<N>(grad_inner, task.unit, gates);
      if (form.gated) store<N>(grad_inner + a.width, task.unit, ups);
    }
    if (arguments.weight_partial != nullptr) {
      along = warp_reduce(along, Add());
      const int64 slice = task.chunk * (blockDim.x / kWarp) + threadIdx.x / kWarp;
      if (threadIdx.x % kWarp == 0) static_cast<W *>(arguments.weight_partial)[slice * a.rows + row] = along;
    }
  }
  if (!form.has_bias || !task.works) return;
  W *partial = static_cast<W *>(arguments.bias_partial) + task.segment * task.inner_width;
  store_wide<N>(partial, task.unit, gate_sums);
  if (form.gated) store_wide<N>(partial + a.width, task.unit, up_sums);
}

/* Forward or backward, by the type of the arguments. */
template <int N, typename T, typename Form>
__device__ __forceinline__ void task(const Form &form, const ActivationForward &a) {
  forward_task<N, T>(form, a);
}

template <int N, typename T, typename Form>
__device__ __forceinline__ void task(const Form &form, const ActivationBackward &a) {
  backward_task<N, T>(form, a);
}

template <bool gated, bool has_bias, typename T, typename Arguments>
__device__ __forceinline__ void packs(const Arguments &a) {
  switch (a.shared.kind) {
    case LLMCTL_SILU: return task<kPack<T>, T>(Fixed<LLMCTL_SILU, gated, has_bias>(), a);
    case LLMCTL_GELU: return task<kPack<T>, T>(Fixed<LLMCTL_GELU, gated, has_bias>(), a);
    case LLMCTL_GELU_TANH: return task<kPack<T>, T>(Fixed<LLMCTL_GELU_TANH, gated, has_bias>(), a);
    case LLMCTL_RELU: return task<kPack<T>, T>(Fixed<LLMCTL_RELU, gated, has_bias>(), a);
    case LLMCTL_SQUARED_RELU: return task<kPack<T>, T>(Fixed<LLMCTL_SQUARED_RELU, gated, has_bias>(), a);
  }
}

/* The bodies of entry points, forward and backward. */
template <typename T, typename Arguments>
__device__ __forceinline__ void plain(const Arguments &a) {
  packs<false, false, T>(a);
}

template <typename T, typename Arguments>
__device__ __forceinline__ void biased(const Arguments &a) {
  packs<false, true, T>(a);
}

template <typename T, typename Arguments>
__device__ __forceinline__ void gated(const Arguments &a) {
  packs<true, false, T>(a);
}

template <typename T, typename Arguments>
__device__ __forceinline__ void gated_and_biased(const Arguments &a) {
  packs<true, true, T>(a);
}

template <typename T, typename Arguments>
__device__ __forceinline__ void by_element(const Arguments &a) {
  task<1, T>(Given{a.shared.kind, a.shared.gated, a.shared.bias != nullptr}, a);
}

}  // namespace activation
}  // namespace

/* Separate entry points: kernels without gates or biases need fewer registers, so that more of their blocks run at a
 * time. Packs of two doubles would need more registers than a thread has. */
#define LLMCTL_ACTIVATION_KERNELS(Arguments, direction)                                                               \
  LLMCTL_CUDA_KERNEL_WITHOUT_DOUBLE(activation##direction, kActivationThreads, Arguments, activation::plain)          \
  LLMCTL_CUDA_KERNEL_WITHOUT_DOUBLE(activation_with_bias##direction, kActivationThreads, Arguments,                   \
                                    activation::biased)                                                               \
  LLMCTL_CUDA_KERNEL_WITHOUT_DOUBLE(gated_activation##direction, kActivationThreads, Arguments, activation::gated)    \
  LLMCTL_CUDA_KERNEL_WITHOUT_DOUBLE(gated_activation_with_bias##direction, kActivationThreads, Arguments,             \
                                    activation::gated_and_biased)                                                     \
  LLMCTL_CUDA_KERNEL(activation_by_element##direction, kActivationThreads, Arguments, activation::by_element)

LLMCTL_ACTIVATION_KERNELS(ActivationForward, )
LLMCTL_ACTIVATION_KERNELS(ActivationBackward, _backward)

}  // namespace llmctl
