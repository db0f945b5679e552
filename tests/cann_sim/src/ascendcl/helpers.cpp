#include "helpers.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <mutex>
#include <set>

#include "../model/faults.h"
#include "../model/violation.h"

namespace cann_sim {
namespace {

// Inherits every descriptor and every mapping of its parent, and never ends by itself.
void fork_helper(bool detached) {
  if (fork()) return;
  prctl(PR_SET_NAME, "cann_sim_helper");
  if (detached) setsid();
  for (;;) pause();
}

}  // namespace

bool take_with_helpers(int device) {
  if (!settings()->helpers) return true;
  static std::mutex mutex;
  static std::set<int> taken;
  const std::lock_guard<std::mutex> lock(mutex);
  if (taken.count(device)) return true;
  if (report_dir().empty()) violation("plan", "helpers=1 needs CANN_SIM_REPORT_DIR");
  // The lock belongs to the open file, which forked processes share: it ends with the last of them.
  const std::string path = report_dir() + "/device-" + std::to_string(device);
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) violation("plan", "cannot open " + path);
  if (flock(file, LOCK_EX | LOCK_NB)) {
    close(file);
    return false;
  }
  taken.insert(device);
  fork_helper(false);
  fork_helper(true);
  return true;
}

}  // namespace cann_sim
