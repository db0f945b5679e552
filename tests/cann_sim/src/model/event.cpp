#include "event.h"

#include <algorithm>
#include <chrono>

#include "handles.h"
#include "violation.h"

namespace cann_sim {
namespace {

constexpr int kTimestampInvalid = 107006;
constexpr int kTimestampReversal = 107007;
constexpr int kEventTimeout = 507047;

HandleTable<Event>& events() {
  static HandleTable<Event>* const made = new HandleTable<Event>("event");
  return *made;
}

int64_t nanoseconds_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void complete(Event& event, uint64_t record, int code) {
  event.completed = std::max(event.completed, record);
  event.code = code;
  event.nanoseconds = nanoseconds_now();
}

}  // namespace

void* create_event(bool timed) {
  const auto event = std::make_shared<Event>();
  event->timed = timed;
  const std::lock_guard<std::mutex> lock(model_mutex());
  return events().add(event);
}

std::shared_ptr<Event> find_event(const void* handle, const char* user) {
  const std::lock_guard<std::mutex> lock(model_mutex());
  return events().get(handle, user);
}

void destroy_event(void* handle, const char* user) {
  const std::lock_guard<std::mutex> lock(model_mutex());
  events().remove(handle, user);
}

int record_event(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream,
                 const char* user) {
  auto task = std::make_shared<Task>();
  task->kind = TaskKind::Event;
  task->name = user;
  uint64_t record = 0;
  {
    const std::lock_guard<std::mutex> lock(model_mutex());
    record = event->recorded + 1;
  }
  task->run = [event, record] {
    const std::lock_guard<std::mutex> lock(model_mutex());
    complete(*event, record, 0);
    return 0;
  };
  task->dropped = [event, record](int code) { complete(*event, record, code); };
  if (const int code = submit(stream, task, user)) return code;
  const std::lock_guard<std::mutex> lock(model_mutex());
  event->recorded = record;
  event->clock = stream->after;
  event->clock[stream->number] = task->sequence;
  return 0;
}

int await_event(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream,
                const char* user) {
  auto task = std::make_shared<Task>();
  task->kind = TaskKind::Event;
  task->name = user;
  Clock clock;
  uint64_t record = 0;
  {
    const std::lock_guard<std::mutex> lock(model_mutex());
    record = std::max<uint64_t>(event->recorded, 1);
    clock = event->clock;
  }
  const auto context = stream->context;
  task->run = [event, record, context] {
    std::unique_lock<std::mutex> lock(model_mutex());
    model_progress().wait(lock, [&] { return event->completed >= record || context->failure; });
    return 0;
  };
  if (const int code = submit(stream, task, user)) return code;
  const std::lock_guard<std::mutex> lock(model_mutex());
  for (const auto& [number, sequence] : clock) {
    uint64_t& known = stream->after[number];
    known = std::max(known, sequence);
  }
  return 0;
}

bool query(const Event& event) {
  if (!event.recorded || event.completed < event.recorded) return false;
  release_guards(event.clock);
  return true;
}

int elapsed(const Event& first, const Event& last, float* milliseconds, const char* user) {
  const std::lock_guard<std::mutex> lock(model_mutex());
  for (const Event* event : {&first, &last}) {
    if (!event->timed)
      return report(user, kTimestampInvalid, "an event was made without ACL_EVENT_TIME_LINE");
    if (!event->recorded || event->completed < event->recorded || event->code) {
      return report(user, kTimestampInvalid, "an event has no time, or not yet");
    }
  }
  if (last.nanoseconds < first.nanoseconds) {
    return report(user, kTimestampReversal, "the end is before the start");
  }
  *milliseconds = static_cast<float>(last.nanoseconds - first.nanoseconds) * 1e-6f;
  return 0;
}

int synchronize_event(const std::shared_ptr<Event>& event, int timeout_ms, const char* user) {
  std::unique_lock<std::mutex> lock(model_mutex());
  const uint64_t goal = event->recorded;
  const auto done = [&] { return event->completed >= goal; };
  if (timeout_ms < 0) {
    model_progress().wait(lock, done);
  } else if (!model_progress().wait_for(lock, std::chrono::milliseconds(timeout_ms), done)) {
    return report(user, kEventTimeout, format("the event was not done after %d ms", timeout_ms));
  }
  if (event->code) return report(user, event->code, "the event was dropped with its stream");
  query(*event);
  return 0;
}

}  // namespace cann_sim
