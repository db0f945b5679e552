// What every interface function does first.
#pragma once

#include <cstddef>
#include <tuple>

namespace cann_sim {

// Counts the call, makes it slow, and injects what the plan says. 0: go on; otherwise the code to return.
// `device` matters to faults meant for one device; -1: the thread's.
int enter(const char* function, int device = -1, const char* alias = "");

// The same for functions that return a pointer: false if they shall return null.
bool enter_pointer(const char* function);

// The version this simulator plays, such as "9.1.0".
const char* cann_version();

// The same to compare with: {9, 2, 1} is 9.2.0-beta.1; what is no beta has a beta above all.
struct Release {
  int major, minor, beta;
};
Release cann_release();
inline bool operator<(const Release& one, const Release& other) {
  return std::tie(one.major, one.minor, one.beta) < std::tie(other.major, other.minor, other.beta);
}

}  // namespace cann_sim

// Interface of the simulator itself, for tests and for software that must say SIMULATED.
extern "C" {
int cann_sim_marker(void);                              // 1; that it exists is what matters
long long cann_sim_counter(const char* name);           // one counter
void cann_sim_set_plan(const char* plan);               // replaces what CANN_SIM_PLAN said
[[noreturn]] void cann_sim_trap(const char* function);  // for functions nobody modelled
}
