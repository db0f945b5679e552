// Counters that outlive the process.
//
// They lie in a file mapped from the report folder (anonymous memory without one), so that they can be read
// while the process runs and after any kind of death: os._exit, SIGKILL and abort run no exit handler.
//
// File: 128 bytes of header ("CANNSIM1"), then records of 128 bytes: name (120 bytes, zero padded), int64
// value.
#pragma once

#include <cstdint>
#include <string>

namespace cann_sim {

void count(const std::string& name, int64_t amount = 1);

// Raises a counter to a value it has not reached yet.
void count_maximum(const std::string& name, int64_t value);

// Value of a counter; 0 for one that never counted.
int64_t counter(const std::string& name);

}  // namespace cann_sim
