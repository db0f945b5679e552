// The plan: settings of the simulated machine and faults to inject, as the README describes them. Its file is
// read again whenever it changes, so a test can inject a fault into a running process; an entry that stays
// keeps its count.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace cann_sim {

struct Settings {
  int64_t ndev = 1;       // devices
  int64_t hbm_mb = 1024;  // memory of each device, MiB
  std::string soc = "Ascend910B2";
  std::string cann;              // version; empty: the one the libraries were built as
  int64_t kernel_ms = 0;         // each kernel takes that long
  int64_t copy_ms = 0;           // each queued copy takes that long
  int64_t call_us = 0;           // each call of an interface function takes that long
  int64_t workspace_mb = 0;      // what phase 1 demands on top of its own figure
  int64_t arithmetic_ms = 60000;  // a generated operator waits so long for its results
  bool record = false;           // write phase-1 arguments and launches to the report folder
  bool trace = false;            // write every call of an interface function there
  bool ordered_sums = false;     // sums=ordered: kernels sum in the same order also without the option
  bool accumulate = false;       // kernels add to what lies in outputs that some kernels expect to be zeroed
  bool helpers = false;          // aclrtSetDevice forks processes that keep the device
  bool strict_threads = false;   // threads=strict: one thread for both phases, and for all work of a stream
  bool strict_poison = true;     // poisoned=code: only return the error code again
  bool strict_pageable = false;  // pageable=abort: a queued copy must use pinned memory
  bool strict_pinned = true;     // pinned=real: the host may touch pinned memory at any time
  bool strict_determinism = true;  // determinism=real: the option may change under queued work
  bool free_checks_queue = true;   // free_check=execution: find freed memory only when the task runs
};

enum class Action { None, Code, Hang, Kill, Crash, Stale, Null, Corrupt, Overrun, Slow };

struct Fault {
  std::string text;    // the entry as written; its identity
  std::string target;  // an interface function, malloc, kernel, kernel.aclnnX, copy, memset
  uint64_t first = 1;
  uint64_t last = std::numeric_limits<uint64_t>::max();
  Action action = Action::None;
  int code = 0;
  int slow_ms = 0;
  int device = -1;      // only calls for this device; -1: for any
  bool total = false;   // counted over all processes that share the state file
  int last_error = 0;   // what aclrtPeekAtLastError shall tell
  bool poison = false;  // the context takes no more work
  std::string message;  // error text
};

struct Plan {
  Settings settings;
  std::vector<Fault> faults;
};

// Adds the entries of a text to a plan; a mistake in it is a violation, since a fault that never comes proves
// nothing.
void parse_plan(const std::string& text, Plan& plan);

}  // namespace cann_sim
