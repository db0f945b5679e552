#include "address_space.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <mutex>

#include "handles.h"
#include "memory.h"
#include "violation.h"

namespace cann_sim {
namespace {

constexpr uintptr_t kFirstDeviceAddress = uintptr_t{0x12} << 40;
constexpr size_t kHandleRangeBytes = size_t{1} << 38;
constexpr size_t kHandleStep = 64;

Range device_ranges[kMaxDevices];
std::atomic<int> reserved_devices{0};
struct sigaction previous_action;

const Range& handle_range() {
  static const Range range = reserve(kHandleRangeBytes);
  return range;
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  const int device = device_of_address(address);
  std::string what;
  if (is_handle(address)) {
    what = "an opaque handle";
  } else if (device >= 0) {
    what = format("memory of device %d", device);
  } else if (const char* pinned = pinned_fault(address)) {
    what = pinned;
  }
  if (!what.empty()) {
    violation("host-touch",
              format("the host touched %s at 0x%zx", what.c_str(), static_cast<size_t>(address)));
  }
  if (previous_action.sa_flags & SA_SIGINFO) {
    previous_action.sa_sigaction(signal, info, context);
  } else if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN) {
    previous_action.sa_handler(signal);
  } else {
    std::signal(signal, SIG_DFL);  // the faulting instruction runs again and ends the process
  }
}

// Before anything else can touch a simulated address.
__attribute__((constructor)) void on_load() { install_fault_handler(); }

}  // namespace

Range reserve(size_t bytes, uintptr_t wish) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mapped = MAP_FAILED;
  if (wish) {
    mapped = mmap(reinterpret_cast<void*>(wish), bytes, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
  }
  if (mapped == MAP_FAILED) mapped = mmap(nullptr, bytes, PROT_NONE, flags, -1, 0);
  if (mapped == MAP_FAILED) violation("plan", "no address space left to simulate a device");
  return {reinterpret_cast<uintptr_t>(mapped), bytes};
}

const Range& device_range(int device) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  for (int next = reserved_devices; next <= device; ++next) {
    device_ranges[next] =
        reserve(kDeviceRangeBytes, kFirstDeviceAddress + static_cast<size_t>(next) * kDeviceRangeBytes);
    reserved_devices = next + 1;
  }
  return device_ranges[device];
}

int device_of_address(uintptr_t address) {
  for (int device = 0; device < reserved_devices; ++device) {
    if (device_ranges[device].contains(address)) return device;
  }
  return -1;
}

void* new_handle() {
  static std::atomic<uintptr_t> used{0};
  const uintptr_t offset = used += kHandleStep;
  if (offset >= handle_range().bytes) violation("plan", "no handles left");
  return reinterpret_cast<void*>(handle_range().begin + offset);
}

bool is_handle(uintptr_t address) { return handle_range().contains(address); }

void install_fault_handler() {
  handle_range();  // reserved here, so that the handler never has to
  struct sigaction action;
  std::memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &previous_action);
}

}  // namespace cann_sim
