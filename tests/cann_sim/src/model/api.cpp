#include "api.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>

#include "context.h"
#include "counters.h"
#include "faults.h"
#include "stream.h"
#include "violation.h"

namespace cann_sim {
namespace {

int device_of_thread() {
  const auto& context = this_thread().context;
  return context ? context->device : -1;
}

Injection injected(const char* function, int device, const char* alias) {
  count(std::string("calls.") + function);
  const auto now = settings();
  if (now->trace) report_line("trace", format("%ld %s", syscall(SYS_gettid), function));
  if (now->call_us) std::this_thread::sleep_for(std::chrono::microseconds(now->call_us));
  return inject({function, alias}, device >= 0 ? device : device_of_thread());
}

}  // namespace

int enter(const char* function, int device, const char* alias) {
  const Injection fault = injected(function, device, alias);
  const std::string text = fault.message.empty() ? "injected by the plan" : fault.message;
  if (fault.action == Action::Stale) add_message(function, text + " (stale: the call succeeds)");
  if (fault.action != Action::Code) return 0;
  const int code = report(function, fault.code, text);
  if (fault.last_error) this_thread().last_error = fault.last_error;
  const auto& context = this_thread().context;
  if (fault.poison && context) {
    fail_context(*context, fault.code);
    this_thread().told.insert(context->number);
  }
  return code;
}

bool enter_pointer(const char* function) {
  const Injection fault = injected(function, -1, "");
  if (fault.action != Action::Null && fault.action != Action::Code) return true;
  add_message(function, fault.message.empty() ? "injected by the plan" : fault.message);
  return false;
}

}  // namespace cann_sim

using namespace cann_sim;

extern "C" {

int cann_sim_marker(void) { return 1; }

long long cann_sim_counter(const char* name) { return counter(name); }

void cann_sim_set_plan(const char* plan) { set_plan(plan); }

void cann_sim_trap(const char* function) { violation("trap", format("%s is not modelled", function)); }

}  // extern "C"
