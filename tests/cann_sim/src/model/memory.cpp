#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "address_space.h"
#include "counters.h"
#include "faults.h"
#include "single.h"
#include "violation.h"

namespace cann_sim {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kRedzone = kPage;
constexpr char kRedzoneByte = static_cast<char>(0xC5);
constexpr int kPoisonByte = 0xFF;
constexpr size_t kPoisonFileBytes = size_t{1} << 22;
constexpr size_t kAlignment = 512;    // of device addresses; CANN promises 64
constexpr size_t kRemembered = 4096;  // freed allocations kept for messages
constexpr int kOutOfMemory = 207001;
constexpr int kLockTries = 2000;  // a millisecond each, for whoever explains a fault

size_t round_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

struct Board {
  std::mutex mutex;
  std::map<uintptr_t, std::shared_ptr<Allocation>> live;
  std::map<uintptr_t, std::shared_ptr<Allocation>> freed_pinned;  // their addresses are never given back
  std::deque<std::shared_ptr<Allocation>> freed_device;
  uint64_t number = 0;
  size_t next_offset[kMaxDevices] = {};
  size_t used[kMaxDevices] = {};
};

Board& board() { return single<Board>(); }

const char* name_of(Space space) {
  switch (space) {
    case Space::Device: return "device";
    case Space::Pinned: return "pinned";
    case Space::Registered: return "registered";
  }
  return "?";
}

void count_allocation(const Allocation& allocation, int64_t sign) {
  const std::string name = name_of(allocation.space);
  count("live." + name + "_allocations", sign);
  count(name + "_bytes", sign * static_cast<int64_t>(allocation.bytes));
  if (allocation.space == Space::Device) {
    const std::string device = "device_bytes." + std::to_string(allocation.device);
    count(device, sign * static_cast<int64_t>(allocation.bytes));
    count_maximum("max_" + device, counter(device));
  }
}

// Lock held.
std::shared_ptr<Allocation> find(uintptr_t address) {
  auto next = board().live.upper_bound(address);
  if (next == board().live.begin()) return nullptr;
  const auto& allocation = std::prev(next)->second;
  return address - allocation->base < std::max<size_t>(allocation->capacity, 1) ? allocation : nullptr;
}

// Lock held. What became of an address that is in no live allocation.
std::string history(uintptr_t address) {
  for (const auto& allocation : board().freed_device) {
    if (address - allocation->base < allocation->capacity) {
      return "which was freed: " + allocation->describe();
    }
  }
  return "which is in no live allocation";
}

// Lock held.
void retire(const std::shared_ptr<Allocation>& allocation) {
  board().live.erase(allocation->base);
  allocation->live = false;
  count_allocation(*allocation, -1);
  // For messages: the bytes themselves go as soon as no task needs them.
  const auto told = std::make_shared<Allocation>(*allocation);
  told->mirror = nullptr;
  if (allocation->space == Space::Device) {
    board().used[allocation->device] -= allocation->capacity;
    board().freed_device.push_front(told);
    if (board().freed_device.size() > kRemembered) board().freed_device.pop_back();
  } else if (allocation->space == Space::Pinned) {
    // In place of the host's view; the simulator's stays until no task needs it.
    mmap(reinterpret_cast<void*>(allocation->base), round_up(allocation->capacity, kPage), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    board().freed_pinned[allocation->base] = told;
  }
}

// A file full of poison. Its pages are mapped and copied when they are written to: what nobody touches, such
// as most of a workspace, costs nothing.
int poison_file() {
  static const int file = [] {
    const int made = memfd_create("cann_sim poison", MFD_CLOEXEC);
    const std::string poison(kPoisonFileBytes, static_cast<char>(kPoisonByte));
    if (write(made, poison.data(), poison.size()) != static_cast<ssize_t>(poison.size())) {
      violation("plan", "no memory for poison");
    }
    return made;
  }();
  return file;
}

char* map_mirror(size_t capacity) {
  const size_t whole = round_up(capacity, kPage) + 2 * kRedzone;
  void* mapped = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* const first = static_cast<char*>(mapped);
  char* const mirror = first + kRedzone;
  size_t poisoned = 0;
  for (; capacity - poisoned >= kPoisonFileBytes; poisoned += kPoisonFileBytes) {
    void* const part = mmap(mirror + poisoned, kPoisonFileBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_FIXED, poison_file(), 0);
    if (part == MAP_FAILED) violation("plan", "no room to map poison");
  }
  std::memset(first, kRedzoneByte, kRedzone);
  std::memset(mirror + poisoned, kPoisonByte, capacity - poisoned);
  std::memset(mirror + capacity, kRedzoneByte, whole - kRedzone - capacity);
  return mirror;
}

}  // namespace

Allocation::~Allocation() {
  if (!mirror || space == Space::Registered) return;
  const size_t redzones = space == Space::Device ? kRedzone : 0;
  munmap(mirror - redzones, round_up(capacity, kPage) + 2 * redzones);
}

std::string Allocation::describe() const {
  std::string text = format("%s allocation %zu of %zu bytes at 0x%zx", name_of(space),
                            static_cast<size_t>(number), bytes, static_cast<size_t>(base));
  if (space == Space::Device) text += format(" on device %d", device);
  return text;
}

int allocate_device(int device, size_t bytes, void** address) {
  const size_t limit = static_cast<size_t>(settings()->hbm_mb) << 20;
  const Range& range = device_range(device);
  auto allocation = std::make_shared<Allocation>();
  allocation->device = device;
  allocation->bytes = bytes;
  allocation->capacity = round_up(bytes, 32) + 32;
  {
    const std::lock_guard<std::mutex> lock(board().mutex);
    const size_t step = round_up(allocation->capacity, kAlignment) + kAlignment;  // a gap between neighbours
    size_t& offset = board().next_offset[device];
    if (bytes > limit || board().used[device] + allocation->capacity > limit || step > range.bytes - offset) {
      return kOutOfMemory;
    }
    allocation->number = ++board().number;
    allocation->base = range.begin + kAlignment + offset;
    offset += step;
    board().used[device] += allocation->capacity;
  }
  allocation->mirror = map_mirror(allocation->capacity);
  const std::lock_guard<std::mutex> lock(board().mutex);
  if (!allocation->mirror) {
    board().used[device] -= allocation->capacity;
    return kOutOfMemory;
  }
  board().live[allocation->base] = allocation;
  count_allocation(*allocation, 1);
  *address = reinterpret_cast<void*>(allocation->base);
  return 0;
}

void* allocate_pinned(size_t bytes) {
  const size_t whole = round_up(bytes, kPage);
  const int fd = memfd_create("cann_sim pinned", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(whole))) return nullptr;
  // One page more stays inaccessible, so that running over the end is a fault.
  const Range range = reserve(whole + kPage);
  void* const view = mmap(reinterpret_cast<void*>(range.begin), whole, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_FIXED, fd, 0);
  void* const mirror = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (view == MAP_FAILED || mirror == MAP_FAILED) return nullptr;
  std::memset(mirror, kPoisonByte, bytes);
  auto allocation = std::make_shared<Allocation>();
  allocation->space = Space::Pinned;
  allocation->bytes = allocation->capacity = bytes;
  allocation->base = range.begin;
  allocation->mirror = static_cast<char*>(mirror);
  const std::lock_guard<std::mutex> lock(board().mutex);
  allocation->number = ++board().number;
  board().live[allocation->base] = allocation;
  count_allocation(*allocation, 1);
  return view;
}

void register_host(void* address, size_t bytes) {
  auto allocation = std::make_shared<Allocation>();
  allocation->space = Space::Registered;
  allocation->bytes = allocation->capacity = bytes;
  allocation->base = reinterpret_cast<uintptr_t>(address);
  allocation->mirror = static_cast<char*>(address);
  const std::lock_guard<std::mutex> lock(board().mutex);
  if (find(allocation->base)) {
    violation("double-register", "host memory is registered already: " + allocation->describe());
  }
  allocation->number = ++board().number;
  board().live[allocation->base] = allocation;
  count_allocation(*allocation, 1);
}

std::shared_ptr<Allocation> allocation_at(void* address, Space space, const char* user) {
  const std::lock_guard<std::mutex> lock(board().mutex);
  const auto base = reinterpret_cast<uintptr_t>(address);
  const auto found = board().live.find(base);
  if (found != board().live.end() && found->second->space == space) return found->second;
  for (const auto& allocation : board().freed_device) {
    if (allocation->base == base) {
      violation("double-free", format("%s: %s", user, allocation->describe().c_str()));
    }
  }
  const auto pinned = board().freed_pinned.find(base);
  if (pinned != board().freed_pinned.end()) {
    violation("double-free", format("%s: %s", user, pinned->second->describe().c_str()));
  }
  violation("unknown-memory",
            format("%s: %p is not the start of a %s allocation", user, address, name_of(space)));
}

void free_memory(void* address, Space space, const char* user) {
  const auto allocation = allocation_at(address, space, user);
  check_redzones(*allocation, user);
  const std::lock_guard<std::mutex> lock(board().mutex);
  retire(allocation);
}

Kind kind_of(const void* address) {
  const auto value = reinterpret_cast<uintptr_t>(address);
  if (device_of_address(value) >= 0) return Kind::Device;
  const std::lock_guard<std::mutex> lock(board().mutex);
  return find(value) ? Kind::Pinned : Kind::Pageable;
}

int device_of(const void* address) { return device_of_address(reinterpret_cast<uintptr_t>(address)); }

Access access(const void* address, size_t bytes, bool write, const std::string& what, const char* user) {
  Access made{reinterpret_cast<uintptr_t>(address), bytes, write, what, nullptr};
  const std::lock_guard<std::mutex> lock(board().mutex);
  made.allocation = find(made.begin);
  if (!made.allocation) {
    const std::string fate = history(made.begin);
    violation(fate.find("freed") != std::string::npos ? "use-after-free" : "out-of-bounds",
              format("%s: %s is at %p, %s", user, what.c_str(), address, fate.c_str()));
  }
  const size_t left = made.allocation->base + made.allocation->capacity - made.begin;
  if (bytes > left) {
    violation("out-of-bounds", format("%s: %s needs %zu bytes at %p, %zu are left in %s", user, what.c_str(),
                                      bytes, address, left, made.allocation->describe().c_str()));
  }
  return made;
}

char* resolve(const Access& access, const std::string& user) {
  const std::lock_guard<std::mutex> lock(board().mutex);
  if (!access.allocation->live) {
    violation("use-after-free", format("%s: %s was freed before the task ran: %s", user.c_str(),
                                       access.what.c_str(), access.allocation->describe().c_str()));
  }
  return access.allocation->mirror + (access.begin - access.allocation->base);
}

void check_redzones(const Allocation& allocation, const std::string& user) {
  if (allocation.space != Space::Device) return;
  const char* const begin = allocation.mirror - kRedzone;
  const char* const end = allocation.mirror + round_up(allocation.capacity, kPage) + kRedzone;
  for (const char* byte = begin; byte < end; ++byte) {
    if (byte == allocation.mirror) byte += allocation.capacity;
    if (*byte != kRedzoneByte) {
      violation("redzone", format("%s: something wrote at byte %td of %s", user.c_str(),
                                  byte - allocation.mirror, allocation.describe().c_str()));
    }
  }
}

size_t device_bytes_used(int device) {
  const std::lock_guard<std::mutex> lock(board().mutex);
  return board().used[device];
}

const char* pinned_fault(uintptr_t address) {
  // Another thread may be at the maps just now. If it is this one that broke off there, the plain fault has
  // to do.
  std::unique_lock<std::mutex> lock(board().mutex, std::try_to_lock);
  for (int tries = 0; !lock && tries < kLockTries; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.try_lock();
  }
  if (!lock) return nullptr;
  const auto covering = [&](const std::map<uintptr_t, std::shared_ptr<Allocation>>& allocations) {
    auto next = allocations.upper_bound(address);
    const Allocation* found = next == allocations.begin() ? nullptr : std::prev(next)->second.get();
    const bool is_inside = found && found->space == Space::Pinned &&
                           address - found->base < round_up(found->capacity, kPage) + kPage;
    return is_inside ? found : nullptr;
  };
  if (covering(board().freed_pinned)) return "pinned memory that was freed";
  const Allocation* live = covering(board().live);
  if (!live) return nullptr;
  const bool is_behind = address - live->base >= round_up(live->capacity, kPage);
  return is_behind ? "the page behind pinned memory"
                   : "pinned memory that queued work uses, as far as it was told";
}

int64_t free_all(int device) {
  const std::lock_guard<std::mutex> lock(board().mutex);
  std::deque<std::shared_ptr<Allocation>> all;
  for (const auto& [base, allocation] : board().live) {
    if (allocation->space == Space::Device && allocation->device == device) all.push_back(allocation);
  }
  for (const auto& allocation : all) retire(allocation);
  return static_cast<int64_t>(all.size());
}

}  // namespace cann_sim
