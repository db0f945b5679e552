// The plan in force, and the question every place asks that may fail on order.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>

#include "settings.h"

namespace cann_sim {

// Settings in force now; never null.
std::shared_ptr<const Settings> settings();

// Replaces what CANN_SIM_PLAN said; the file, if there is one, stays in force on top of it.
void set_plan(const std::string& text);

struct Injection {
  Action action = Action::None;
  int code = 0;
  int last_error = 0;
  bool poison = false;
  std::string message;
};

// Counts a call of each target name and returns what shall happen to it. A hang, a kill and slowness happen
// in here.
Injection inject(std::initializer_list<std::string_view> targets, int device);

// A thread that never goes on; it ends with the process.
[[noreturn]] void hang();

// Sleeps for as long as the plan wants; one that changes its mind meanwhile is heard.
void linger(const std::function<int64_t()>& wanted_ms);

}  // namespace cann_sim
