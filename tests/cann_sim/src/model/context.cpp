#include "context.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <array>

#include "address_space.h"
#include "api.h"
#include "counters.h"
#include "faults.h"
#include "handles.h"
#include "memory.h"
#include "single.h"
#include "stream.h"
#include "violation.h"

namespace cann_sim {
namespace {

constexpr int kInvalidDevice = 107001;
constexpr int kNoContext = 107002;
constexpr Release kFirstSwitchable{9, 0, 1};  // 9.0.0-beta.1

struct Device {
  std::shared_ptr<Context> primary;
  int users = 0;  // aclrtSetDevice calls not yet undone
};

struct Board {
  HandleTable<Context> contexts{"context"};
  std::array<Device, kMaxDevices> devices;
  int numbers = 0;
  std::atomic<int> determinism{0};  // of the process
  std::atomic<int> loaded{-1};      // what the first kernel was loaded with; -1: none was loaded yet
};

Board& board() { return single<Board>(); }

// Lock held.
std::shared_ptr<Context> make_context(int device) {
  auto context = std::make_shared<Context>();
  context->number = ++board().numbers;
  context->device = device;
  context->handle = board().contexts.add(context);
  return context;
}

// Lock held.
void end_context(Context& context) {
  context.alive = false;
  count("leaked.streams_at_reset", retire_streams(context));
}

bool is_valid(int device) { return device >= 0 && device < settings()->ndev; }

}  // namespace

int determinism_of(const Context& context) {
  const int own = context.determinism;
  return own < 0 ? board().determinism.load() : own;
}

bool plans_deterministic(const Context& context) {
  if (!(cann_release() < kFirstSwitchable)) return board().determinism == 1;
  const int loaded = board().loaded;
  return (loaded < 0 ? determinism_of(context) : loaded) == 1;
}

void load_kernel(const Context& context) {
  int none = -1;
  board().loaded.compare_exchange_strong(none, determinism_of(context));
}

void set_determinism(Context* context, int level, const char* user) {
  const std::lock_guard<std::mutex> lock(model_mutex());
  const int before = context ? determinism_of(*context) : board().determinism.load();
  if (before != level && settings()->strict_determinism) {
    if (has_work(context)) violation("determinism", format("%s: the option changes under queued work", user));
    if (context && context->open_executors) {
      violation("determinism", format("%s: the option changes between the phases of a launch", user));
    }
  }
  (context ? context->determinism : board().determinism) = level;
}

Thread& this_thread() {
  // Never destroyed: exit handlers of other libraries still call in when thread-local objects are gone.
  static thread_local Thread* const made = new Thread;
  return *made;
}

std::shared_ptr<Context> current_context(const char* user) {
  const auto& context = this_thread().context;
  if (context && context->alive) return context;
  report(user, kNoContext, "the thread has no context: no device is set");
  return nullptr;
}

void add_message(const char* user, const std::string& text) {
  this_thread().messages += format("EE9999: Inner Error!\nEE9999: [PID: %d] [TID: %ld] [SIM] %s: %s\n",
                                   static_cast<int>(getpid()), syscall(SYS_gettid), user, text.c_str());
}

int report(const char* user, int code, const std::string& text) {
  add_message(user, format("%s (error code %d)", text.c_str(), code));
  this_thread().last_error = code;
  count("errors." + std::to_string(code));
  return code;
}

int set_device(int device, const char* user) {
  if (!is_valid(device)) return report(user, kInvalidDevice, format("there is no device %d", device));
  const std::lock_guard<std::mutex> lock(model_mutex());
  Device& found = board().devices[static_cast<size_t>(device)];
  if (!found.primary) {
    device_range(device);
    found.primary = make_context(device);
  }
  ++found.users;
  this_thread().context = found.primary;
  return 0;
}

int reset_device(int device, const char* user) {
  if (!is_valid(device)) return report(user, kInvalidDevice, format("there is no device %d", device));
  const std::lock_guard<std::mutex> lock(model_mutex());
  Device& found = board().devices[static_cast<size_t>(device)];
  if (!found.primary) return 0;
  if (--found.users > 0) return 0;
  end_context(*found.primary);
  if (!has_work(found.primary.get())) count("leaked.device_allocations_at_reset", free_all(device));
  board().contexts.remove(found.primary->handle, user);
  found.primary = nullptr;
  return 0;
}

std::shared_ptr<Context> create_context(int device) {
  const std::lock_guard<std::mutex> lock(model_mutex());
  device_range(device);
  return make_context(device);
}

void destroy_context(void* handle) {
  const std::lock_guard<std::mutex> lock(model_mutex());
  end_context(*board().contexts.remove(handle, "aclrtDestroyContext"));
}

std::shared_ptr<Context> find_context(const void* handle, const char* user) {
  const std::lock_guard<std::mutex> lock(model_mutex());
  return board().contexts.get(handle, user);
}

}  // namespace cann_sim
