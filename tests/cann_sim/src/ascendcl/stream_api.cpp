// libascendcl: streams and events.
#include "../model/api.h"
#include "../model/context.h"
#include "../model/event.h"
#include "../model/stream.h"
#include "acl_types.h"

using namespace cann_sim;

namespace {

int make_stream(const char* user, aclrtStream* handle, uint32_t priority) {
  if (const int code = enter(user)) return code;
  const auto context = current_context(user);
  if (!context) return this_thread().last_error;
  *handle = create_stream(context, priority)->handle;
  return acl::kSuccess;
}

int synchronize_handle(const char* user, aclrtStream handle, int timeout_ms) {
  if (const int code = enter(user)) return code;
  int code = 0;
  const auto stream = find_stream(handle, user, &code);
  return stream ? synchronize(stream, timeout_ms, user) : code;
}

int synchronize_all(const char* user, int timeout_ms) {
  if (const int code = enter(user)) return code;
  const auto context = current_context(user);
  if (!context) return this_thread().last_error;
  std::set<std::shared_ptr<Stream>> streams;
  {
    const std::lock_guard<std::mutex> lock(model_mutex());
    streams = context->streams;
  }
  int first = acl::kSuccess;
  for (const auto& stream : streams) {
    const int code = synchronize(stream, timeout_ms, user);
    if (!first) first = code;
  }
  return first;
}

// Event functions that also name a stream.
template <typename Act>
int with_stream(const char* user, aclrtEvent event, aclrtStream handle, Act act) {
  if (const int code = enter(user)) return code;
  int code = 0;
  const auto stream = find_stream(handle, user, &code);
  return stream ? act(find_event(event, user), stream, user) : code;
}

}  // namespace

extern "C" {

aclError aclrtCreateStream(aclrtStream* handle) { return make_stream("aclrtCreateStream", handle, 0); }

aclError aclrtCreateStreamWithConfig(aclrtStream* handle, uint32_t priority, uint32_t) {
  return make_stream("aclrtCreateStreamWithConfig", handle, priority);
}

aclError aclrtDestroyStream(aclrtStream handle) {
  if (const int code = enter("aclrtDestroyStream")) return code;
  return destroy_stream(handle, "aclrtDestroyStream", false);
}

aclError aclrtDestroyStreamForce(aclrtStream handle) {
  if (const int code = enter("aclrtDestroyStreamForce")) return code;
  return destroy_stream(handle, "aclrtDestroyStreamForce", true);
}

aclError aclrtSetStreamFailureMode(aclrtStream handle, uint64_t mode) {
  const char* const user = "aclrtSetStreamFailureMode";
  if (const int code = enter(user)) return code;
  int code = 0;
  const auto stream = find_stream(handle, user, &code);
  if (!stream) return code;
  const std::lock_guard<std::mutex> lock(model_mutex());
  if (mode == acl::kStopOnFailure) stream->context->stop_on_failure = true;
  return acl::kSuccess;
}

// torch_npu sets it on the first generation of chips; no kernel here overflows in a way it would tell.
aclError aclrtSetStreamOverflowSwitch(aclrtStream handle, uint32_t) {
  const char* const user = "aclrtSetStreamOverflowSwitch";
  if (const int code = enter(user)) return code;
  int code = 0;
  return find_stream(handle, user, &code) ? acl::kSuccess : code;
}

aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  const char* const user = "aclrtStreamGetId";
  if (const int code = enter(user)) return code;
  int code = 0;
  const auto stream = find_stream(handle, user, &code);
  if (!stream) return code;
  *id = stream->number;
  return acl::kSuccess;
}

aclError aclrtStreamQuery(aclrtStream handle, int* status) {
  const char* const user = "aclrtStreamQuery";
  if (const int code = enter(user)) return code;
  int code = 0;
  const auto stream = find_stream(handle, user, &code);
  if (!stream) return code;
  if (const int failed = check_failure(*stream->context, user, false)) return failed;
  const std::lock_guard<std::mutex> lock(model_mutex());
  *status = query(*stream) ? acl::kStreamComplete : acl::kStreamNotReady;
  return acl::kSuccess;
}

aclError aclrtSynchronizeStream(aclrtStream handle) {
  return synchronize_handle("aclrtSynchronizeStream", handle, -1);
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
  return synchronize_handle("aclrtSynchronizeStreamWithTimeout", handle, timeout_ms);
}

aclError aclrtSynchronizeDevice() { return synchronize_all("aclrtSynchronizeDevice", -1); }

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  return synchronize_all("aclrtSynchronizeDeviceWithTimeout", timeout_ms);
}

aclError aclrtCreateEvent(aclrtEvent* handle) {
  if (const int code = enter("aclrtCreateEvent")) return code;
  *handle = create_event(true);
  return acl::kSuccess;
}

aclError aclrtCreateEventWithFlag(aclrtEvent* handle, uint32_t flag) {
  if (const int code = enter("aclrtCreateEventWithFlag")) return code;
  *handle = create_event(flag & acl::kEventTimeLine);
  return acl::kSuccess;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent* handle, uint32_t flag) {
  if (const int code = enter("aclrtCreateEventExWithFlag")) return code;
  *handle = create_event(flag & acl::kEventTimeLine);
  return acl::kSuccess;
}

aclError aclrtDestroyEvent(aclrtEvent handle) {
  if (const int code = enter("aclrtDestroyEvent")) return code;
  destroy_event(handle, "aclrtDestroyEvent");
  return acl::kSuccess;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  return with_stream("aclrtRecordEvent", event, stream, record_event);
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  return with_stream("aclrtStreamWaitEvent", event, stream, await_event);
}

aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
  // Records are numbered, so nothing has to be reset: a wait means the last record before it.
  return with_stream("aclrtResetEvent", event, stream, [](auto&&...) { return acl::kSuccess; });
}

aclError aclrtQueryEventStatus(aclrtEvent handle, int* status) {
  if (const int code = enter("aclrtQueryEventStatus")) return code;
  const auto event = find_event(handle, "aclrtQueryEventStatus");
  const std::lock_guard<std::mutex> lock(model_mutex());
  *status = query(*event) ? acl::kRecordedComplete : acl::kRecordedNotReady;
  return acl::kSuccess;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, int* status) {
  if (const int code = enter("aclrtQueryEventWaitStatus")) return code;
  const auto event = find_event(handle, "aclrtQueryEventWaitStatus");
  const std::lock_guard<std::mutex> lock(model_mutex());
  *status = event->completed >= event->recorded ? acl::kWaitComplete : acl::kWaitNotReady;
  return acl::kSuccess;
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  if (const int code = enter("aclrtSynchronizeEvent")) return code;
  return synchronize_event(find_event(handle, "aclrtSynchronizeEvent"), -1, "aclrtSynchronizeEvent");
}

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent handle, int32_t timeout_ms) {
  const char* const user = "aclrtSynchronizeEventWithTimeout";
  if (const int code = enter(user)) return code;
  return synchronize_event(find_event(handle, user), timeout_ms, user);
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  const char* const user = "aclrtEventElapsedTime";
  if (const int code = enter(user)) return code;
  const auto first = find_event(start, user), last = find_event(end, user);
  return elapsed(*first, *last, milliseconds, user);
}

}  // extern "C"
