// Opaque handles: addresses that nobody may read, each given out once.
//
// A handle is never reused, so a second destroy and a use after the destroy are recognised with certainty.
// They lie in an inaccessible range, so that a host which looks into one is caught as well.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "counters.h"
#include "violation.h"

namespace cann_sim {

// A handle value that was never given out before; thread safe.
void* new_handle();

// Whether an address lies where handles are.
bool is_handle(uintptr_t address);

// Live objects of one kind. Not locked: its owner's lock guards it.
template <typename Object>
class HandleTable {
 public:
  // `kind` names the objects in messages; their number is the counter "live.<kind>s".
  explicit HandleTable(const char* kind) : kind_(kind), live_(std::string("live.") + kind + "s") {
    count(live_, 0);
  }

  void* add(std::shared_ptr<Object> object) {
    void* handle = new_handle();
    objects_[handle] = std::move(object);
    count(live_);
    return handle;
  }

  // The object; a violation if it was destroyed or never existed.
  std::shared_ptr<Object> get(const void* handle, const char* user) const {
    const auto found = objects_.find(handle);
    if (found != objects_.end()) return found->second;
    if (is_handle(reinterpret_cast<uintptr_t>(handle))) {
      violation("use-after-destroy", format("%s: %s %p was destroyed before", user, kind_, handle));
    }
    violation("unknown-handle", format("%s: %p is not a %s", user, handle, kind_));
  }

  bool has(const void* handle) const { return objects_.count(handle) > 0; }

  // Removes an object; a violation if it was destroyed before or never existed.
  std::shared_ptr<Object> remove(const void* handle, const char* user) {
    const auto found = objects_.find(handle);
    if (found == objects_.end()) {
      const bool known = is_handle(reinterpret_cast<uintptr_t>(handle));
      violation(
          known ? "double-destroy" : "unknown-handle",
          format("%s: %s %p %s", user, kind_, handle, known ? "was destroyed before" : "does not exist"));
    }
    std::shared_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    count(live_, -1);
    return object;
  }

 private:
  const char* kind_;
  std::string live_;
  std::map<const void*, std::shared_ptr<Object>> objects_;
};

}  // namespace cann_sim
