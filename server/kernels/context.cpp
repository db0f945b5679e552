// The C interface: contexts, and the table of operators.
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <new>

#include "runtime.h"

namespace npugrad {

#define OPERATOR(name, strided) void name(Call& call);
#include "operators.h"

namespace {

// Threads do not survive a fork, and locks may be held by one that is gone: the child makes a new one.
struct State {
  State(int threads, int64_t scratch_bytes) : process(getpid()), pool(threads), scratch(scratch_bytes) {}
  const pid_t process;
  Pool pool;
  Scratch scratch;
};

}  // namespace
}  // namespace npugrad

struct npugrad_context {
  int32_t threads;
  int64_t scratch_bytes;
  bool float64_coordinates;
  std::atomic<npugrad::State*> state;

  npugrad::State& own() {
    npugrad::State* found = state.load(std::memory_order_acquire);
    if (found->process == getpid()) return *found;
    auto made = std::make_unique<npugrad::State>(threads, scratch_bytes);
    // What the parent had is left alone: its memory is a copy, its threads are not there.
    if (state.compare_exchange_strong(found, made.get())) return *made.release();
    return *found;
  }
};

namespace npugrad {

int32_t guarded(npugrad_context* context, const npugrad_call* call, void (*kernel)(Call&)) {
  try {
    State& state = context->own();
    Call one(state.pool, state.scratch, *call, context->float64_coordinates);
    kernel(one);
    return NPUGRAD_OK;
  } catch (const Cancelled&) {
    return NPUGRAD_CANCELLED;
  } catch (const Unsupported&) {
    return NPUGRAD_UNSUPPORTED;
  } catch (const Invalid&) {
    return NPUGRAD_INVALID;
  } catch (const std::bad_alloc&) {
    return NPUGRAD_NO_MEMORY;
  } catch (...) {
    return NPUGRAD_INTERNAL;
  }
}

}  // namespace npugrad

#define OPERATOR(name, strided)                                                         \
  static int32_t run_##name(npugrad_context* context, const npugrad_call* call) {       \
    return npugrad::guarded(context, call, npugrad::name);                              \
  }
#include "operators.h"

static const npugrad_operator kOperators[] = {
#define OPERATOR(name, strided) {#name, run_##name, strided},
#include "operators.h"
};

extern "C" {

int32_t npugrad_abi_version(void) { return NPUGRAD_ABI_VERSION; }
const char* npugrad_variant(void) { return npugrad::kVariant; }
const char* npugrad_compiler(void) {
#if defined(__clang__)
  return "Clang " __clang_version__;
#else
  return "GCC " __VERSION__;
#endif
}

const npugrad_operator* npugrad_operators(int32_t* count) {
  *count = static_cast<int32_t>(sizeof kOperators / sizeof kOperators[0]);
  return kOperators;
}

npugrad_context* npugrad_open(int32_t threads, int64_t scratch_bytes, int32_t float64_coordinates) {
  try {
    auto made = std::make_unique<npugrad::State>(threads, scratch_bytes);
    auto* context = new npugrad_context{threads, scratch_bytes, float64_coordinates != 0, {made.get()}};
    made.release();
    return context;
  } catch (...) {
    return nullptr;
  }
}

void npugrad_close(npugrad_context* context) {
  if (!context) return;
  npugrad::State* state = context->state.load();
  if (state->process == getpid()) delete state;
  delete context;
}

int32_t npugrad_threads(npugrad_context* context) { return context->own().pool.threads(); }
int64_t npugrad_kept_bytes(npugrad_context* context) { return context->own().scratch.kept_bytes(); }

}  // extern "C"
