// Keeps the host from pinned memory that queued work uses.
//
// A copy is over for the host when a wait or a query has told so, not when it happens to be done. Until then
// the pages of a destination are inaccessible to the host and those of a source are read-only: a staging
// buffer that is read or filled again too early is a fault, each time and not only when it goes wrong. All
// functions: model_mutex() held.
#pragma once

#include <cstdint>
#include <map>

#include "memory.h"

namespace cann_sim {

// Per stream, how far its work is known to have come.
using Clock = std::map<int, uint64_t>;

// A task just queued uses this memory.
void guard(int stream, uint64_t sequence, const Access& access);

// The host has been told that this work is done.
void release_guards(const Clock& finished);

// The allocation is being freed.
void forget_guards(const Allocation& allocation);

}  // namespace cann_sim
