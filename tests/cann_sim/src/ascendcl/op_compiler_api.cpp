// libacl_op_compiler: the options torch_npu sets when it starts. Nothing is compiled here.
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "../model/single.h"
#include "calls.h"

using namespace cann_sim;

namespace {

struct Options {
  std::mutex mutex;
  std::map<int, std::string> values;
};

Options& options() { return single<Options>(); }

}  // namespace

extern "C" {

aclError aclSetCompileopt(int option, const char* value) {
  return call("aclSetCompileopt", [&] {
    const std::lock_guard<std::mutex> lock(options().mutex);
    options().values[option] = value;
  });
}

size_t aclGetCompileoptSize(int option) {
  enter("aclGetCompileoptSize");
  const std::lock_guard<std::mutex> lock(options().mutex);
  return options().values[option].size() + 1;
}

aclError aclGetCompileopt(int option, char* value, size_t bytes) {
  return call("aclGetCompileopt", [&] {
    const std::lock_guard<std::mutex> lock(options().mutex);
    const std::string& found = options().values[option];
    if (found.size() >= bytes) return acl::kInvalidParam;
    std::memcpy(value, found.c_str(), found.size() + 1);
    return acl::kSuccess;
  });
}

}  // extern "C"
