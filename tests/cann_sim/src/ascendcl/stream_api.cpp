// libascendcl: streams and events.
#include "../model/event.h"
#include "calls.h"

using namespace cann_sim;

namespace {

aclError make_stream(const char* user, aclrtStream* handle, uint32_t priority) {
  return with_context(user,
                      [&](Context&) { *handle = create_stream(this_thread().context, priority)->handle; });
}

aclError synchronize_handle(const char* user, aclrtStream handle, int timeout_ms) {
  return with_stream(user, handle, [&](const auto& stream) { return synchronize(stream, timeout_ms, user); });
}

aclError synchronize_all(const char* user, int timeout_ms) {
  return with_context(user, [&](Context& context) {
    std::set<std::shared_ptr<Stream>> streams;
    {
      const std::lock_guard<std::mutex> lock(model_mutex());
      streams = context.streams;
    }
    int first = acl::kSuccess;
    for (const auto& stream : streams) {
      const int code = synchronize(stream, timeout_ms, user);
      if (!first) first = code;
    }
    return first;
  });
}

aclError make_event(const char* user, aclrtEvent* handle, uint32_t flag) {
  return call(user, [&] { *handle = create_event(flag & acl::kEventTimeLine); });
}

// Event functions that also name a stream.
template <typename Act>
aclError with_event_and_stream(const char* user, aclrtEvent event, aclrtStream handle, Act act) {
  return with_stream(user, handle,
                     [&](const auto& stream) { return act(find_event(event, user), stream, user); });
}

// Event functions that ask for its state, under the lock.
template <typename Tell>
aclError query_event(const char* user, aclrtEvent handle, Tell tell) {
  return call(user, [&] {
    const auto event = find_event(handle, user);
    const std::lock_guard<std::mutex> lock(model_mutex());
    tell(*event);
  });
}

aclError wait_for_event(const char* user, aclrtEvent handle, int timeout_ms) {
  return call(user, [&] { return synchronize_event(find_event(handle, user), timeout_ms, user); });
}

}  // namespace

extern "C" {

aclError aclrtCreateStream(aclrtStream* handle) { return make_stream("aclrtCreateStream", handle, 0); }

aclError aclrtCreateStreamWithConfig(aclrtStream* handle, uint32_t priority, uint32_t) {
  return make_stream("aclrtCreateStreamWithConfig", handle, priority);
}

aclError aclrtDestroyStream(aclrtStream handle) {
  return call("aclrtDestroyStream", [&] { return destroy_stream(handle, "aclrtDestroyStream", false); });
}

aclError aclrtDestroyStreamForce(aclrtStream handle) {
  const char* const user = "aclrtDestroyStreamForce";
  return call(user, [&] { return destroy_stream(handle, user, true); });
}

aclError aclrtSetStreamFailureMode(aclrtStream handle, uint64_t mode) {
  return with_stream("aclrtSetStreamFailureMode", handle, [&](const auto& stream) {
    const std::lock_guard<std::mutex> lock(model_mutex());
    if (mode == acl::kStopOnFailure) stream->context->stop_on_failure = true;
  });
}

// torch_npu sets it on the first generation of chips; no kernel here overflows in a way it would tell.
aclError aclrtSetStreamOverflowSwitch(aclrtStream handle, uint32_t) {
  return with_stream("aclrtSetStreamOverflowSwitch", handle, [](const auto&) {});
}

aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  return with_stream("aclrtStreamGetId", handle, [&](const auto& stream) { *id = stream->number; });
}

aclError aclrtStreamQuery(aclrtStream handle, int* status) {
  const char* const user = "aclrtStreamQuery";
  return with_stream(user, handle, [&](const auto& stream) {
    if (const int failed = check_failure(*stream->context, user, false)) return failed;
    const std::lock_guard<std::mutex> lock(model_mutex());
    *status = query(*stream) ? acl::kStreamComplete : acl::kStreamNotReady;
    return acl::kSuccess;
  });
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
  return make_event("aclrtCreateEvent", handle, acl::kEventTimeLine);
}

aclError aclrtCreateEventWithFlag(aclrtEvent* handle, uint32_t flag) {
  return make_event("aclrtCreateEventWithFlag", handle, flag);
}

aclError aclrtCreateEventExWithFlag(aclrtEvent* handle, uint32_t flag) {
  return make_event("aclrtCreateEventExWithFlag", handle, flag);
}

aclError aclrtDestroyEvent(aclrtEvent handle) {
  return call("aclrtDestroyEvent", [&] { destroy_event(handle, "aclrtDestroyEvent"); });
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  return with_event_and_stream("aclrtRecordEvent", event, stream, record_event);
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  return with_event_and_stream("aclrtStreamWaitEvent", event, stream, await_event);
}

aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
  // Records are numbered, so nothing has to be reset: a wait means the last record before it.
  return with_event_and_stream("aclrtResetEvent", event, stream, [](auto&&...) { return acl::kSuccess; });
}

aclError aclrtQueryEventStatus(aclrtEvent handle, int* status) {
  return query_event("aclrtQueryEventStatus", handle, [&](const Event& event) {
    *status = query(event) ? acl::kRecordedComplete : acl::kRecordedNotReady;
  });
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, int* status) {
  return query_event("aclrtQueryEventWaitStatus", handle, [&](const Event& event) {
    *status = event.completed >= event.recorded ? acl::kWaitComplete : acl::kWaitNotReady;
  });
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  return wait_for_event("aclrtSynchronizeEvent", handle, -1);
}

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent handle, int32_t timeout_ms) {
  return wait_for_event("aclrtSynchronizeEventWithTimeout", handle, timeout_ms);
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  const char* const user = "aclrtEventElapsedTime";
  return call(user, [&] {
    const auto first = find_event(start, user), last = find_event(end, user);
    return elapsed(*first, *last, milliseconds, user);
  });
}

}  // extern "C"
