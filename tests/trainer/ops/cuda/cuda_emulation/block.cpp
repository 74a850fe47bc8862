#include "block.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

/* Bounds of the section of shared variables, set by the linker; null without shared variables. */
extern "C" {
extern char __start_llmctl_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_llmctl_shared[] __attribute__((weak, visibility("hidden")));
}

namespace emulation {

const Thread *running = nullptr;
Block block;

namespace {

constexpr int kLanes = 32;
constexpr int kMostThreads = 1024;
constexpr size_t kStack = 256 << 10;
constexpr int kLaunchFailed = 719;   /* CUDA_ERROR_LAUNCH_FAILED */
constexpr int kIllegalAddress = 700; /* CUDA_ERROR_ILLEGAL_ADDRESS */

/* A point where the threads of a block or of a warp wait for each other. */
struct Meeting {
  unsigned rounds = 0;
  int arrived = 0;
  Place place{};
};

struct Warp {
  Meeting meeting;
  uint64_t values[2][kLanes];
};

struct Fiber {
  Thread thread;
  char *stack;
  ucontext_t context;
  jmp_buf resumed;
  bool has_context, has_run, is_done;
  const Meeting *waits_for;
  unsigned round;
};

/* State of the current launch; only one runs at a time. */
struct Launch {
  const Kernel *kernel;
  const void *arguments;
  int num_threads;
  Meeting block_meeting;
  Warp warps[kMostThreads / kLanes];
  Fiber fibers[kMostThreads];
  Fiber *current;
  ucontext_t scheduler_context;
  jmp_buf scheduler;
  bool failed;
  unsigned order;
  int64_t last_blocks;
  char said[512];
};

Launch launch;

void complain(const char *format, ...) {
  if (launch.failed) return;
  launch.failed = true;
  int length = std::snprintf(launch.said, sizeof launch.said, "%s, block %u: ", launch.kernel->name, block.index.x);
  va_list rest;
  va_start(rest, format);
  std::vsnprintf(launch.said + length, sizeof launch.said - length, format, rest);
  va_end(rest);
}

const char *file_name(Place place) {
  const char *slash = std::strrchr(place.file, '/');
  return slash == nullptr ? place.file : slash + 1;
}

/* Switches between a fiber and the scheduler. ucontext starts a fiber; later switches use _setjmp, which makes no system
 * call and is many times as fast. The address sanitizer must be notified, and supports only ucontext. */
#ifdef __SANITIZE_ADDRESS__
const void *scheduler_stack = nullptr;
size_t scheduler_stack_size = 0;

void to_scheduler() {
  void *token = nullptr;
  Fiber *self = launch.current;
  __sanitizer_start_switch_fiber(&token, scheduler_stack, scheduler_stack_size);
  swapcontext(&self->context, &launch.scheduler_context);
  __sanitizer_finish_switch_fiber(token, &scheduler_stack, &scheduler_stack_size);
}

void to_fiber(Fiber &fiber) {
  void *token = nullptr;
  __sanitizer_start_switch_fiber(&token, fiber.stack, kStack);
  swapcontext(&launch.scheduler_context, &fiber.context);
  __sanitizer_finish_switch_fiber(token, nullptr, nullptr);
}

void on_first_run() { __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size); }
#else
void to_scheduler() {
  if (_setjmp(launch.current->resumed) == 0) _longjmp(launch.scheduler, 1);
}

void to_fiber(Fiber &fiber) {
  if (_setjmp(launch.scheduler) != 0) return;
  if (fiber.has_run) _longjmp(fiber.resumed, 1);
  fiber.has_run = true;
  setcontext(&fiber.context);
}

void on_first_run() {}
#endif

/* A fiber runs one thread of each block in turn. */
void fiber_main() {
  on_first_run();
  for (;;) {
    launch.kernel->call(launch.arguments);
    launch.current->is_done = true;
    to_scheduler();
  }
}

/* Waits until `needed` threads have reached `meeting`. */
void meet(Meeting &meeting, int needed, Place place, const char *what) {
  if (meeting.arrived == 0) {
    meeting.place = place;
  } else if (meeting.place.line != place.line || std::strcmp(meeting.place.file, place.file) != 0) {
    complain("thread %d is at the %s of %s:%d while others are at that of %s:%d", running->number, what,
             file_name(place), place.line, file_name(meeting.place), meeting.place.line);
    to_scheduler();
  }
  if (++meeting.arrived == needed) {
    meeting.arrived = 0;
    ++meeting.rounds;
    return;
  }
  Fiber *self = launch.current;
  self->waits_for = &meeting;
  self->round = meeting.rounds;
  to_scheduler();
  self->waits_for = nullptr;
}

bool is_ready(const Fiber &fiber) {
  return !fiber.is_done && (fiber.waits_for == nullptr || fiber.waits_for->rounds != fiber.round);
}

std::vector<int> order_of(int64_t count) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (launch.order == 1) std::reverse(order.begin(), order.end());
  uint64_t state = launch.order;
  for (int64_t i = count - 1; launch.order > 1 && i > 0; --i) {
    state = state * 6364136223846793005u + 1442695040888963407u; /* Knuth, The Art of Computer Programming 3.3.4 */
    std::swap(order[i], order[(state >> 33) % (i + 1)]);
  }
  return order;
}

/* A guard page ends each stack, so that a stack overflow of a kernel is detected. */
char *new_stack() {
  const size_t page = sysconf(_SC_PAGESIZE);
  void *memory =
      mmap(nullptr, page + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  mprotect(memory, page, PROT_NONE);
  return static_cast<char *>(memory) + page;
}

void prepare_fibers() {
  const Dim3 size = block.threads;
  for (int number = 0; number < launch.num_threads; ++number) {
    Fiber &fiber = launch.fibers[number];
    const unsigned n = number;
    fiber.thread = {{n % size.x, n / size.x % size.y, n / size.x / size.y}, number};
    fiber.is_done = false;
    fiber.waits_for = nullptr;
    if (fiber.has_context) continue;
    fiber.has_context = true;
    fiber.has_run = false;
    if (fiber.stack == nullptr) fiber.stack = new_stack();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
  }
  launch.block_meeting = Meeting();
  for (Warp &warp : launch.warps) warp.meeting = Meeting();
}

void explain_deadlock() {
  for (int number = 0; number < launch.num_threads; ++number) {
    const Fiber &fiber = launch.fibers[number];
    if (fiber.is_done || fiber.waits_for == nullptr) continue;
    const bool whole = fiber.waits_for == &launch.block_meeting;
    complain("thread %d waits at the %s of %s:%d, which only %d of %d threads reach", number,
             whole ? "barrier" : "shuffle", file_name(fiber.waits_for->place), fiber.waits_for->place.line,
             fiber.waits_for->arrived, whole ? launch.num_threads : kLanes);
  }
}

/* Runs the ready threads of a warp, each until it waits or ends. Returns true if any thread ran. */
bool run_warp(int warp, const std::vector<int> &lanes) {
  bool has_moved = false;
  for (const int lane : lanes) {
    const int number = warp * kLanes + lane;
    Fiber &fiber = launch.fibers[number];
    if (number >= launch.num_threads || !is_ready(fiber)) continue;
    has_moved = true;
    launch.current = &fiber;
    running = &fiber.thread;
    to_fiber(fiber);
    if (launch.failed) return false;
  }
  return has_moved;
}

/* Every warp runs as far as possible before the next warp, so that missing synchronization has an effect. */
void run_block(const std::vector<int> &warps, const std::vector<int> &lanes) {
  if (__start_llmctl_shared != nullptr) {
    std::memset(__start_llmctl_shared, 0xff, __stop_llmctl_shared - __start_llmctl_shared);
  }
  prepare_fibers();
  bool has_moved = true;
  while (has_moved && !launch.failed) {
    has_moved = false;
    for (const int warp : warps) {
      while (run_warp(warp, lanes)) has_moved = true;
      if (launch.failed) return;
    }
  }
  explain_deadlock();
}

sigjmp_buf out_of_launch;

void on_fault(int, siginfo_t *facts, void *) {
  complain("thread %d touches %p, which is not mapped", running->number, facts->si_addr);
  siglongjmp(out_of_launch, 1);
}

/* Catches memory faults during its lifetime. */
class FaultHandler {
 public:
  FaultHandler() : stack_(64 << 10) {
    stack_t stack{};
    stack.ss_sp = stack_.data();
    stack.ss_size = stack_.size();
    sigaltstack(&stack, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &old_segv_);
    sigaction(SIGBUS, &action, &old_bus_);
  }
  ~FaultHandler() {
    sigaction(SIGSEGV, &old_segv_, nullptr);
    sigaction(SIGBUS, &old_bus_, nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  std::vector<char> stack_;
  stack_t old_stack_;
  struct sigaction old_segv_, old_bus_;
};

Warp &this_warp() { return launch.warps[running->number / kLanes]; }

void check_mask(unsigned mask, Place place) {
  if (mask == 0xffffffffu) return;
  complain("the shuffle of %s:%d has mask %x, not all lanes", file_name(place), place.line, mask);
  to_scheduler();
}

int run_blocks(Dim3 blocks, Dim3 threads) {
  const int64_t count = static_cast<int64_t>(blocks.x) * blocks.y * blocks.z;
  const int64_t some = launch.last_blocks > 0 ? std::min(launch.last_blocks, count) : count;
  const std::vector<int> order = order_of(some);
  const std::vector<int> warps = order_of((launch.num_threads + kLanes - 1) / kLanes), lanes = order_of(kLanes);
  const FaultHandler handler;
  if (sigsetjmp(out_of_launch, 1) != 0) return kIllegalAddress;
  for (const int number : order) {
    const int64_t n = count - some + number;
    const auto part = [](int64_t value) { return static_cast<unsigned>(value); };
    block = {{part(n % blocks.x), part(n / blocks.x % blocks.y), part(n / blocks.x / blocks.y)}, threads, blocks};
    run_block(warps, lanes);
    if (launch.failed) return kLaunchFailed;
  }
  return 0;
}

}  // namespace

void barrier(Place place) { meet(launch.block_meeting, launch.num_threads, place, "barrier"); }

uint64_t exchange(unsigned mask, uint64_t value, int from, Place place) {
  check_mask(mask, place);
  Warp &warp = this_warp();
  /* Two sets of values: a lane that is one shuffle ahead must not overwrite values that other lanes still read. No lane
   * can be two shuffles ahead. */
  uint64_t *values = warp.values[warp.meeting.rounds % 2];
  values[lane()] = value;
  meet(warp.meeting, kLanes, place, "shuffle");
  return values[from];
}

int run(const Kernel &kernel, Dim3 blocks, Dim3 threads, const void *arguments) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  launch.kernel = &kernel;
  launch.arguments = arguments;
  launch.num_threads = static_cast<int>(threads.x * threads.y * threads.z);
  launch.failed = false;
  launch.said[0] = '\0';
  const int error = run_blocks(blocks, threads);
  /* The fibers of a failed launch are unfinished. */
  for (Fiber &fiber : launch.fibers) fiber.has_context = fiber.has_context && error == 0;
  return error;
}

const char *complaint() { return launch.said; }

void set_order(unsigned seed) { launch.order = seed; }

void set_last_blocks(int64_t count) { launch.last_blocks = count; }

}  // namespace emulation

/* With -fsanitize=alignment, g++ makes an unaligned access call this function. The sanitizer's library is not linked,
 * because no other function is needed. The arguments are the location, the type and the logarithm of the alignment
 * (GCC, libsanitizer/ubsan/ubsan_handlers.h, TypeMismatchData). */
struct Misaligned {
  const char *file;
  uint32_t line, column;
  const void *type;
  unsigned char log_alignment, kind;
};

extern "C" void __ubsan_handle_type_mismatch_v1(const Misaligned *facts, uintptr_t address) {
  const emulation::Place place{facts->file, static_cast<int>(facts->line)};
  emulation::complain("thread %d touches %#zx in %s:%u, which is not a multiple of %d", emulation::running->number,
                      static_cast<size_t>(address), emulation::file_name(place), facts->line, 1 << facts->log_alignment);
  emulation::to_scheduler();
}
