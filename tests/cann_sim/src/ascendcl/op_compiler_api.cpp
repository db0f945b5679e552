// libacl_op_compiler: the options torch_npu sets when it starts. Nothing is compiled here.
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "../model/api.h"
#include "acl_types.h"

namespace {

struct Options {
  std::mutex mutex;
  std::map<int, std::string> values;
};

Options& options() {
  static Options* const made = new Options;
  return *made;
}

}  // namespace

extern "C" {

aclError aclSetCompileopt(int option, const char* value) {
  if (const int code = cann_sim::enter("aclSetCompileopt")) return code;
  const std::lock_guard<std::mutex> lock(options().mutex);
  options().values[option] = value;
  return acl::kSuccess;
}

size_t aclGetCompileoptSize(int option) {
  cann_sim::enter("aclGetCompileoptSize");
  const std::lock_guard<std::mutex> lock(options().mutex);
  return options().values[option].size() + 1;
}

aclError aclGetCompileopt(int option, char* value, size_t bytes) {
  if (const int code = cann_sim::enter("aclGetCompileopt")) return code;
  const std::lock_guard<std::mutex> lock(options().mutex);
  const std::string& found = options().values[option];
  if (found.size() >= bytes) return acl::kInvalidParam;
  std::memcpy(value, found.c_str(), found.size() + 1);
  return acl::kSuccess;
}

}  // extern "C"
