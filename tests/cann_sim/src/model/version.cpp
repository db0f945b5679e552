#include <string>

#include "api.h"
#include "faults.h"

// The build gives the version its libraries play.
#ifndef CANN_SIM_VERSION
#define CANN_SIM_VERSION "9.1.0"
#endif

namespace cann_sim {

const char* cann_version() {
  static const std::string* const version = [] {
    const std::string asked = settings()->cann;
    return new std::string(asked.empty() ? CANN_SIM_VERSION : asked);
  }();
  return version->c_str();
}

}  // namespace cann_sim
