// libascendcl: memory, copies and fills.
#include <cstring>

#include "../model/counters.h"
#include "../model/faults.h"
#include "../model/memory.h"
#include "../model/violation.h"
#include "calls.h"

using namespace cann_sim;

namespace {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::Pageable: return "pageable host memory";
    case Kind::Pinned: return "pinned host memory";
    case Kind::Device: return "device memory";
  }
  return "?";
}

// One copy, checked: both ends, as far as they are known memory.
struct Copy {
  void* destination;
  const void* source;
  size_t bytes;
  Kind to;
  Kind from;
  std::vector<Access> accesses;

  bool is_pageable() const { return to == Kind::Pageable || from == Kind::Pageable; }

  void run(const std::string& user) const {
    char* to_bytes = static_cast<char*>(destination);
    const char* from_bytes = static_cast<const char*>(source);
    for (const Access& access : accesses) {
      char* const mirror = resolve(access, user);
      if (access.write) {
        to_bytes = mirror;
      } else {
        from_bytes = mirror;
      }
    }
    std::memmove(to_bytes, from_bytes, bytes);
  }
};

// A wrong kind would make a real driver use a host address on the device, or the reverse.
void check_kind(const Copy& copy, int kind, const char* user) {
  if (kind == acl::kDefault) return;
  const bool to_device = kind == acl::kHostToDevice || kind == acl::kDeviceToDevice;
  const bool from_device = kind == acl::kDeviceToHost || kind == acl::kDeviceToDevice;
  if (kind < 0 || kind > acl::kDefault) {
    violation("copy-kind", format("%s: kind %d is not simulated", user, kind));
  }
  if (to_device == (copy.to == Kind::Device) && from_device == (copy.from == Kind::Device)) return;
  violation("copy-kind", format("%s: kind %d, but the destination %p is %s and the source %p is %s", user,
                                kind, copy.destination, name_of(copy.to), copy.source, name_of(copy.from)));
}

void check_device(const Copy& copy, const Context& context, const char* user) {
  for (const Access& access : copy.accesses) {
    if (access.allocation->space == Space::Device && access.allocation->device != context.device) {
      violation("wrong-device", format("%s: %s is on device %d, the context on %d", user, access.what.c_str(),
                                       access.allocation->device, context.device));
    }
  }
}

Copy checked_copy(void* destination, const void* source, size_t bytes, int kind, const Context& context,
                  const char* user) {
  Copy copy{destination, source, bytes, kind_of(destination), kind_of(source), {}};
  check_kind(copy, kind, user);
  if (copy.to != Kind::Pageable) {
    copy.accesses.push_back(access(destination, bytes, true, "the destination", user));
  }
  if (copy.from != Kind::Pageable) copy.accesses.push_back(access(source, bytes, false, "the source", user));
  check_device(copy, context, user);
  return copy;
}

// CANN queues pinned copies only; with pageable memory the call returns when the copy is done.
int queue_copy(const Copy& copy, const std::shared_ptr<Stream>& stream, const char* user) {
  auto task = std::make_shared<Task>();
  task->kind = TaskKind::Copy;
  task->name = user;
  task->accesses = copy.accesses;
  task->run = [copy, name = task->name] {
    copy.run(name);
    return 0;
  };
  if (copy.is_pageable()) {
    count("pageable_async_copies");
    if (settings()->strict_pageable) violation("pageable", format("%s: host memory is not pinned", user));
  }
  if (const int code = submit(stream, task, user)) return code;
  return copy.is_pageable() ? wait_for(stream, task->sequence, user) : 0;
}

aclError allocate(const char* user, void** address, size_t bytes) {
  const auto take = [&](const Context& context) {
    if (!bytes) return report(user, acl::kInvalidParam, "0 bytes");
    const int code = allocate_device(context.device, bytes, address);
    return code ? report(user, code, format("device %d has no %zu bytes left", context.device, bytes)) : 0;
  };
  return with_working_context(user, take, "malloc");
}

// Whether there is something to do; an error, where it does not fit.
bool fits(const char* user, size_t bytes, size_t room, int& code) {
  if (bytes > room) {
    code = report(user, acl::kRtParamInvalid, format("%zu bytes into room for %zu", bytes, room));
  }
  return bytes && bytes <= room;
}

int release(const char* user, void* address, Space space) {
  if (const int code = enter(user)) return code;
  if (space == Space::Device && kind_of(address) != Kind::Device) {
    violation("unknown-memory", format("%s: %p is no device address", user, address));
  }
  const auto allocation = allocation_at(address, space, user);
  if (settings()->free_checks_queue) check_unused(*allocation, user);
  unguard(*allocation);
  free_memory(address, space, user);
  return acl::kSuccess;
}

}  // namespace

extern "C" {

aclError aclrtMalloc(void** address, size_t bytes, int) { return allocate("aclrtMalloc", address, bytes); }

aclError aclrtMallocAlign32(void** address, size_t bytes, int) {
  return allocate("aclrtMallocAlign32", address, bytes);
}

aclError aclrtMallocCached(void** address, size_t bytes, int) {
  return allocate("aclrtMallocCached", address, bytes);
}

aclError aclrtFree(void* address) { return release("aclrtFree", address, Space::Device); }

aclError aclrtMallocHost(void** address, size_t bytes) {
  const char* const user = "aclrtMallocHost";
  return with_context(user, [&](const Context&) {
    if (!bytes) return report(user, acl::kInvalidParam, "0 bytes");
    *address = allocate_pinned(bytes);
    return *address ? acl::kSuccess : report(user, acl::kRtMemoryAllocation, "no pinned memory left");
  });
}

aclError aclrtFreeHost(void* address) { return release("aclrtFreeHost", address, Space::Pinned); }

aclError aclrtHostRegisterV2(void* address, uint64_t bytes, uint32_t) {
  return call("aclrtHostRegisterV2", [&] { register_host(address, bytes); });
}

aclError aclrtHostUnregister(void* address) {
  return release("aclrtHostUnregister", address, Space::Registered);
}

aclError aclrtMemcpy(void* destination, size_t room, const void* source, size_t bytes, int kind) {
  const char* const user = "aclrtMemcpy";
  return with_working_context(user, [&](const Context& context) {
    int code = acl::kSuccess;
    if (!fits(user, bytes, room, code)) return code;
    const Copy copy = checked_copy(destination, source, bytes, kind, context, user);
    check_race(copy.accesses, user);
    count("synchronous_copies");
    copy.run(user);
    return code;
  });
}

aclError aclrtMemcpyAsync(void* destination, size_t room, const void* source, size_t bytes, int kind,
                          aclrtStream handle) {
  const char* const user = "aclrtMemcpyAsync";
  return with_stream(user, handle, [&](const auto& stream) {
    int code = acl::kSuccess;
    if (!fits(user, bytes, room, code)) return code;
    return queue_copy(checked_copy(destination, source, bytes, kind, *stream->context, user), stream, user);
  });
}

aclError aclrtMemset(void* address, size_t room, int32_t value, size_t bytes) {
  const char* const user = "aclrtMemset";
  return with_working_context(user, [&](const Context&) {
    int code = acl::kSuccess;
    if (!fits(user, bytes, room, code)) return code;
    const Access use = access(address, bytes, true, "the destination", user);
    check_race({use}, user);
    std::memset(resolve(use, user), value, bytes);
    return code;
  });
}

aclError aclrtMemsetAsync(void* address, size_t room, int32_t value, size_t bytes, aclrtStream handle) {
  const char* const user = "aclrtMemsetAsync";
  return with_stream(user, handle, [&](const auto& stream) {
    int code = acl::kSuccess;
    if (!fits(user, bytes, room, code)) return code;
    if (kind_of(address) != Kind::Device) {
      violation("copy-kind", format("%s: %p is no device memory", user, address));
    }
    auto task = std::make_shared<Task>();
    task->kind = TaskKind::Memset;
    task->name = user;
    task->accesses.push_back(access(address, bytes, true, "the destination", user));
    if (task->accesses[0].allocation->device != stream->context->device) {
      violation("wrong-device", format("%s: %p is memory of another device than the stream", user, address));
    }
    task->run = [use = task->accesses[0], value, bytes] {
      std::memset(resolve(use, "aclrtMemsetAsync"), value, bytes);
      return 0;
    };
    return submit(stream, task, user);
  });
}

aclError aclrtGetMemInfo(int attribute, size_t* free_bytes, size_t* total_bytes) {
  return with_context("aclrtGetMemInfo", [&](const Context& context) {
    const bool is_hbm = attribute == acl::kHbm;
    *total_bytes = is_hbm ? static_cast<size_t>(settings()->hbm_mb) << 20 : 0;
    const size_t used = is_hbm ? device_bytes_used(context.device) : 0;
    *free_bytes = *total_bytes > used ? *total_bytes - used : 0;
  });
}

}  // extern "C"
