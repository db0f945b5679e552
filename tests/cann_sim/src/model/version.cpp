#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
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

Release cann_release() {
  Release release{0, 0, std::numeric_limits<int>::max()};
  std::sscanf(cann_version(), "%d.%d", &release.major, &release.minor);
  const char* const beta = std::strstr(cann_version(), "beta");
  if (beta) release.beta = std::atoi(beta + std::strcspn(beta, "0123456789"));
  return release;
}

}  // namespace cann_sim
