// Address ranges of the simulated machine, all of them inaccessible to the host.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cann_sim {

constexpr int kMaxDevices = 16;
constexpr size_t kDeviceRangeBytes = size_t{1} << 40;  // addresses are never reused: 1 TiB of allocations

struct Range {
  uintptr_t begin = 0;
  size_t bytes = 0;
  bool contains(uintptr_t address) const { return address >= begin && address - begin < bytes; }
};

// Reserves a range that faults on every access.
Range reserve(size_t bytes, uintptr_t wish = 0);

// The range of a device, reserved on first use.
const Range& device_range(int device);

// The device whose range holds an address, or -1. Takes no lock: the fault handler asks.
int device_of_address(uintptr_t address);

// Catches host access to these ranges: SIGSEGV becomes a violation that says what was touched.
void install_fault_handler();

}  // namespace cann_sim
