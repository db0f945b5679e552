#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "api.h"
#include "faults.h"
#include "single.h"

// The build gives the version its libraries play.
#ifndef CANN_SIM_VERSION
#define CANN_SIM_VERSION "9.1.0"
#endif

namespace cann_sim {

namespace {

struct Version {
  std::string asked = settings()->cann, text = asked.empty() ? CANN_SIM_VERSION : asked;
};

}  // namespace

const char* cann_version() { return single_of_process<Version>().text.c_str(); }

Release cann_release() {
  Release release{0, 0, std::numeric_limits<int>::max()};
  std::sscanf(cann_version(), "%d.%d", &release.major, &release.minor);
  const char* const beta = std::strstr(cann_version(), "beta");
  if (beta) release.beta = std::atoi(beta + std::strcspn(beta, "0123456789"));
  return release;
}

}  // namespace cann_sim
