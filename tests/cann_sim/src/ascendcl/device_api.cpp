// libascendcl: initialisation, devices, contexts and error texts.
#include <atomic>
#include <map>

#include "../model/counters.h"
#include "../model/faults.h"
#include "../model/single.h"
#include "../model/violation.h"
#include "calls.h"
#include "helpers.h"

using namespace cann_sim;

namespace {

struct Board {
  std::atomic<bool> initialised{false};
  std::mutex mutex;
  std::map<int, int64_t> options;  // of the process
  std::map<std::string, std::string>
      names;  // of the chip: one copy for each ever asked for, as pointers stay valid
};

Board& board() { return single<Board>(); }

}  // namespace

extern "C" {

aclError aclInit(const char*) {
  return call("aclInit", [] {
    return board().initialised.exchange(true) ? report("aclInit", acl::kRepeatInitialize, "called before")
                                              : acl::kSuccess;
  });
}

aclError aclFinalize() {
  return call("aclFinalize", [] { board().initialised = false; });
}

aclError aclrtSetDevice(int32_t device) {
  const char* const user = "aclrtSetDevice";
  const auto set = [&] {
    return take_with_helpers(device) ? set_device(device, user)
                                     : report(user, kDeviceTaken, "another process has the device");
  };
  return call(user, set, device);
}

aclError aclrtResetDevice(int32_t device) {
  return call("aclrtResetDevice", [&] { return reset_device(device, "aclrtResetDevice"); }, device);
}

aclError aclrtGetDevice(int32_t* device) {
  return with_context("aclrtGetDevice", [&](const Context& context) { *device = context.device; });
}

aclError aclrtGetDeviceCount(uint32_t* devices) {
  return call("aclrtGetDeviceCount", [&] { *devices = static_cast<uint32_t>(settings()->ndev); });
}

aclError aclrtQueryDeviceStatus(int32_t device, int* status) {
  return call("aclrtQueryDeviceStatus", [&] { *status = 0; }, device);
}

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  return call("aclrtDeviceCanAccessPeer", [&] { *can = 0; });
}

aclError aclrtCreateContext(aclrtContext* handle, int32_t device) {
  const char* const user = "aclrtCreateContext";
  const auto create = [&] {
    if (device < 0 || device >= settings()->ndev) {
      return report(user, acl::kRtInvalidDevice, format("there is no device %d", device));
    }
    this_thread().context = create_context(device);
    *handle = this_thread().context->handle;
    return acl::kSuccess;
  };
  return call(user, create, device);
}

aclError aclrtDestroyContext(aclrtContext handle) {
  return call("aclrtDestroyContext", [&] { destroy_context(handle); });
}

aclError aclrtSetCurrentContext(aclrtContext handle) {
  const char* const user = "aclrtSetCurrentContext";
  return call(user, [&] { this_thread().context = find_context(handle, user); });
}

aclError aclrtGetCurrentContext(aclrtContext* handle) {
  return with_context("aclrtGetCurrentContext", [&](const Context& context) { *handle = context.handle; });
}

aclError aclrtCtxSetSysParamOpt(int option, int64_t value) {
  const char* const user = "aclrtCtxSetSysParamOpt";
  return with_context(user, [&](Context& context) {  // the other options do not matter to the operators
    if (option == acl::kDeterministic) set_determinism(&context, static_cast<int>(value), user);
  });
}

aclError aclrtCtxGetSysParamOpt(int option, int64_t* value) {
  const char* const user = "aclrtCtxGetSysParamOpt";
  return with_context(user, [&](const Context& context) {
    if (option != acl::kDeterministic) {
      return report(user, acl::kRtSysParamOptNotSet, "the option was never set");
    }
    *value = determinism_of(context);
    return acl::kSuccess;
  });
}

aclError aclrtSetSysParamOpt(int option, int64_t value) {
  const char* const user = "aclrtSetSysParamOpt";
  return call(user, [&] {
    if (option == acl::kDeterministic) set_determinism(nullptr, static_cast<int>(value), user);
    const std::lock_guard<std::mutex> lock(board().mutex);
    board().options[option] = value;
  });
}

aclError aclrtGetSysParamOpt(int option, int64_t* value) {
  const char* const user = "aclrtGetSysParamOpt";
  return call(user, [&] {
    const std::lock_guard<std::mutex> lock(board().mutex);
    const auto found = board().options.find(option);
    const bool is_set = found != board().options.end();
    *value = is_set ? found->second : 0;
    // torch_npu could not start otherwise.
    if (is_set || option == acl::kDeterministic) return acl::kSuccess;
    return report(user, acl::kRtSysParamOptNotSet, "the option was never set");
  });
}

const char* aclrtGetSocName() {
  enter("aclrtGetSocName");
  const std::lock_guard<std::mutex> lock(board().mutex);
  const std::string name = settings()->soc;
  return board().names.emplace(name, name).first->second.c_str();
}

aclError aclrtSetDeviceSatMode(int) {
  return enter("aclrtSetDeviceSatMode");  // infinities stay infinities either way: nothing saturates here
}

aclError aclrtSetOpExecuteTimeOut(uint32_t) {
  return enter("aclrtSetOpExecuteTimeOut");  // no kernel is cut off by the device: a hang is a hang
}

aclError aclGetDeviceCapability(uint32_t, int, int64_t* value) {
  // Cores of a kind; what only sizes launches, and none is sized here.
  return call("aclGetDeviceCapability", [&] { *value = 24; });
}

const char* aclGetRecentErrMsg() {
  Thread& thread = this_thread();
  count("calls.aclGetRecentErrMsg");
  thread.fetched.swap(thread.messages);
  thread.messages.clear();
  return thread.fetched.empty() ? nullptr : thread.fetched.c_str();
}

aclError aclrtPeekAtLastError(int) {
  count("calls.aclrtPeekAtLastError");
  return this_thread().last_error;
}

aclError aclrtGetLastError(int) {
  count("calls.aclrtGetLastError");
  const int code = this_thread().last_error;
  this_thread().last_error = 0;
  return code;
}

void aclAppLog(int, const char*, const char*, uint32_t, const char*, ...) {}

}  // extern "C"
