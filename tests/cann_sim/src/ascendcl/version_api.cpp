// libascendcl: its version. Each function is there only in the releases that have it; the build says which.
#include <cstdio>
#include <cstring>

#include "calls.h"

using namespace cann_sim;

namespace {

constexpr char kDriverVersion[] = "25.5.0";

}  // namespace

extern "C" {

#ifdef CANN_SIM_HAS_VERSION_STR
aclError aclsysGetVersionStr(char* package, char* version) {
  return call("aclsysGetVersionStr", [&] {
    std::strcpy(version, package && !std::strcmp(package, "driver") ? kDriverVersion : cann_version());
  });
}
#endif

#ifdef CANN_SIM_HAS_CANN_VERSION
aclError aclsysGetCANNVersion(int package, acl::PackageVersion* version) {
  return call("aclsysGetCANNVersion", [&] {
    const char* const text = package == acl::kPackageDriver ? kDriverVersion : cann_version();
    std::memset(version, 0, sizeof *version);
    std::snprintf(version->version, sizeof version->version, "%s", text);
    std::sscanf(text, "%63[^.].%63[^.].%63s", version->major, version->minor, version->release);
  });
}
#endif

}  // extern "C"
