// libascendcl: initialisation, devices, contexts and error texts.
#include <atomic>
#include <map>

#include "../model/api.h"
#include "../model/context.h"
#include "../model/counters.h"
#include "../model/faults.h"
#include "../model/stream.h"
#include "../model/violation.h"
#include "acl_types.h"
#include "helpers.h"

using namespace cann_sim;

namespace {

std::atomic<bool> initialised{false};

// Options of the process.
struct ProcessOptions {
  std::mutex mutex;
  std::map<int, int64_t> values;
};

ProcessOptions& process_options() {
  static ProcessOptions* const made = new ProcessOptions;
  return *made;
}

}  // namespace

extern "C" {

aclError aclInit(const char*) {
  if (const int code = enter("aclInit")) return code;
  return initialised.exchange(true) ? report("aclInit", acl::kRepeatInitialize, "called before")
                                    : acl::kSuccess;
}

aclError aclFinalize() {
  if (const int code = enter("aclFinalize")) return code;
  initialised = false;
  return acl::kSuccess;
}

aclError aclrtSetDevice(int32_t device) {
  if (const int code = enter("aclrtSetDevice", device)) return code;
  if (!take_with_helpers(device)) {
    return report("aclrtSetDevice", kDeviceTaken, "another process has the device");
  }
  return set_device(device, "aclrtSetDevice");
}

aclError aclrtResetDevice(int32_t device) {
  if (const int code = enter("aclrtResetDevice", device)) return code;
  return reset_device(device, "aclrtResetDevice");
}

aclError aclrtGetDevice(int32_t* device) {
  if (const int code = enter("aclrtGetDevice")) return code;
  const auto context = current_context("aclrtGetDevice");
  if (!context) return this_thread().last_error;
  *device = context->device;
  return acl::kSuccess;
}

aclError aclrtGetDeviceCount(uint32_t* devices) {
  if (const int code = enter("aclrtGetDeviceCount")) return code;
  *devices = static_cast<uint32_t>(settings()->ndev);
  return acl::kSuccess;
}

aclError aclrtQueryDeviceStatus(int32_t device, int* status) {
  if (const int code = enter("aclrtQueryDeviceStatus", device)) return code;
  *status = 0;
  return acl::kSuccess;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  if (const int code = enter("aclrtDeviceCanAccessPeer")) return code;
  *can = 0;
  return acl::kSuccess;
}

aclError aclrtCreateContext(aclrtContext* handle, int32_t device) {
  if (const int code = enter("aclrtCreateContext", device)) return code;
  if (device < 0 || device >= settings()->ndev) {
    return report("aclrtCreateContext", acl::kRtInvalidDevice, format("there is no device %d", device));
  }
  this_thread().context = create_context(device);
  *handle = this_thread().context->handle;
  return acl::kSuccess;
}

aclError aclrtDestroyContext(aclrtContext handle) {
  if (const int code = enter("aclrtDestroyContext")) return code;
  destroy_context(handle);
  return acl::kSuccess;
}

aclError aclrtSetCurrentContext(aclrtContext handle) {
  if (const int code = enter("aclrtSetCurrentContext")) return code;
  this_thread().context = find_context(handle, "aclrtSetCurrentContext");
  return acl::kSuccess;
}

aclError aclrtGetCurrentContext(aclrtContext* handle) {
  if (const int code = enter("aclrtGetCurrentContext")) return code;
  const auto context = current_context("aclrtGetCurrentContext");
  if (!context) return this_thread().last_error;
  *handle = context->handle;
  return acl::kSuccess;
}

aclError aclrtCtxSetSysParamOpt(int option, int64_t value) {
  const char* const user = "aclrtCtxSetSysParamOpt";
  if (const int code = enter(user)) return code;
  const auto context = current_context(user);
  if (!context) return this_thread().last_error;
  if (option == acl::kDeterministic) set_determinism(context.get(), static_cast<int>(value), user);
  return acl::kSuccess;  // the other options do not matter to the operators
}

aclError aclrtCtxGetSysParamOpt(int option, int64_t* value) {
  const char* const user = "aclrtCtxGetSysParamOpt";
  if (const int code = enter(user)) return code;
  const auto context = current_context(user);
  if (!context) return this_thread().last_error;
  if (option != acl::kDeterministic) {
    return report(user, acl::kRtSysParamOptNotSet, "the option was never set");
  }
  *value = determinism_of(*context);
  return acl::kSuccess;
}

aclError aclrtSetSysParamOpt(int option, int64_t value) {
  if (const int code = enter("aclrtSetSysParamOpt")) return code;
  if (option == acl::kDeterministic) set_determinism(nullptr, static_cast<int>(value), "aclrtSetSysParamOpt");
  const std::lock_guard<std::mutex> lock(process_options().mutex);
  process_options().values[option] = value;
  return acl::kSuccess;
}

aclError aclrtGetSysParamOpt(int option, int64_t* value) {
  if (const int code = enter("aclrtGetSysParamOpt")) return code;
  const std::lock_guard<std::mutex> lock(process_options().mutex);
  const auto found = process_options().values.find(option);
  if (found == process_options().values.end()) {
    *value = 0;
    if (option == acl::kDeterministic) {
      return acl::kSuccess;  // torch_npu could not start otherwise
    }
    return report("aclrtGetSysParamOpt", acl::kRtSysParamOptNotSet, "the option was never set");
  }
  *value = found->second;
  return acl::kSuccess;
}

const char* aclrtGetSocName() {
  enter("aclrtGetSocName");
  // The pointer must stay valid: one copy for each name ever asked for.
  static std::mutex mutex;
  static auto* const names = new std::map<std::string, std::string>;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::string name = settings()->soc;
  return names->emplace(name, name).first->second.c_str();
}

aclError aclrtSetDeviceSatMode(int) {
  return enter("aclrtSetDeviceSatMode");  // infinities stay infinities either way: nothing saturates here
}

aclError aclrtSetOpExecuteTimeOut(uint32_t) {
  return enter("aclrtSetOpExecuteTimeOut");  // no kernel is cut off by the device: a hang is a hang
}

aclError aclGetDeviceCapability(uint32_t, int, int64_t* value) {
  if (const int code = enter("aclGetDeviceCapability")) return code;
  *value = 24;  // cores of a kind; what only sizes launches, and none is sized here
  return acl::kSuccess;
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
