// Events: marks in streams that other streams and the host can wait for.
#pragma once

#include <cstdint>
#include <memory>

#include "stream.h"

namespace cann_sim {

// Guarded by model_mutex().
struct Event {
  bool timed = false;       // made to tell times
  uint64_t recorded = 0;    // records queued
  uint64_t completed = 0;   // records done
  int code = 0;             // why the last one was dropped
  int64_t nanoseconds = 0;  // when the last one was done
  Clock clock;              // what the last record comes after
};

void* create_event(bool timed);
std::shared_ptr<Event> find_event(const void* handle, const char* user);
void destroy_event(void* handle, const char* user);

int record_event(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream,
                 const char* user);

// Makes what is queued next wait for the last record (or, if there is none yet, for the first).
int await_event(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream, const char* user);

// Lock held. Whether the last record is done, for the host to know; false before the first one.
bool query(const Event& event);

// Time between the last records of two events; 0, or 107006 if one was not made for that, was never recorded
// or is not done, or 107007 if they are in the wrong order.
int elapsed(const Event& first, const Event& last, float* milliseconds, const char* user);

// Waits for the last record; 0, 507047 after `timeout_ms` (negative: never), or why it was dropped.
int synchronize_event(const std::shared_ptr<Event>& event, int timeout_ms, const char* user);

}  // namespace cann_sim
