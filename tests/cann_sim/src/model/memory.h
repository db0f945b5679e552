// Memory of the devices and pinned memory of the host.
//
// A device address means nothing to the host: what a device holds lies in a mirror elsewhere, and only
// resolve() leads there, after checking that the whole range belongs to one live allocation. Fresh memory is
// poisoned with 0xFF bytes (NaN in every float type, -1 as an integer). Both sides of a mirror have a
// redzone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace cann_sim {

enum class Space { Device, Pinned, Registered };

struct Allocation {
  uint64_t number = 0;
  Space space = Space::Device;
  int device = -1;  // of a device allocation
  uintptr_t base = 0;
  size_t bytes = 0;        // asked for
  size_t capacity = 0;     // usable: CANN rounds up to 32 bytes and adds 32
  char* mirror = nullptr;  // where the simulator finds the bytes; pinned memory is mapped twice
  bool live = true;

  ~Allocation();
  std::string describe() const;
};

// One use of memory by a queued task. It keeps the mirror from going away, not the allocation from being
// freed.
struct Access {
  uintptr_t begin = 0;
  size_t bytes = 0;
  bool write = false;
  std::string what;  // for messages, such as "gradOut"
  std::shared_ptr<Allocation> allocation;

  bool overlaps(const Access& other) const {
    return bytes && other.bytes && begin < other.begin + other.bytes && other.begin < begin + bytes;
  }
};

// Allocates; 0, or 207001 if the device has not that much left.
int allocate_device(int device, size_t bytes, void** address);
void* allocate_pinned(size_t bytes);
void register_host(void* address, size_t bytes);

// Frees, after checking redzones; a violation if `address` is not the start of a live allocation of that
// space.
void free_memory(void* address, Space space, const char* user);

// The live allocation that begins at an address; a violation if there is none.
std::shared_ptr<Allocation> allocation_at(void* address, Space space, const char* user);

// Pageable: in no allocation known here.
enum class Kind { Pageable, Pinned, Device };
Kind kind_of(const void* address);

// The device that owns an address of kind Device.
int device_of(const void* address);

// A checked use of [address, address + bytes): a violation unless it lies in one live allocation. `address`
// must not be pageable.
Access access(const void* address, size_t bytes, bool write, const std::string& what, const char* user);

// Where the bytes are; a violation if the allocation was freed since.
char* resolve(const Access& access, const std::string& user);

// A violation if something wrote beside the allocation.
void check_redzones(const Allocation& allocation, const std::string& user);

size_t device_bytes_used(int device);
// For the fault handler: what is wrong with touching an address of pinned memory; null if it is no such
// address.
const char* pinned_fault(uintptr_t address);

// Frees what a device still holds, as a reset does; returns how many allocations that were.
int64_t free_all(int device);

}  // namespace cann_sim
