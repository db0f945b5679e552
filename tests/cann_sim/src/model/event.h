// Events: marks in streams that other streams and the host can wait for.
#pragma once

#include <cstdint>
#include <memory>

#include "stream.h"

namespace cann_sim {

// Guarded by model_mutex().
struct Event {
  uint64_t recorded = 0;    // records queued
  uint64_t completed = 0;   // records done
  int code = 0;             // why the last one was dropped
  int64_t nanoseconds = 0;  // when the last one was done
  Clock clock;              // what the last record comes after
};

void* create_event();
std::shared_ptr<Event> find_event(const void* handle, const char* user);
void destroy_event(void* handle, const char* user);

int record_event(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream,
                 const char* user);

// Makes what is queued next wait for the last record (or, if there is none yet, for the first).
int await_event(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream, const char* user);

// Lock held. Whether the last record is done, for the host to know; false before the first one.
bool query(const Event& event);

// Waits for the last record; 0, 507047 after `timeout_ms` (negative: never), or why it was dropped.
int synchronize_event(const std::shared_ptr<Event>& event, int timeout_ms, const char* user);

}  // namespace cann_sim
