#include "faults.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "counters.h"
#include "single.h"
#include "violation.h"

namespace cann_sim {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

struct FileStamp {
  int64_t seconds = -1, nanoseconds = 0, size = 0;
  uint64_t inode = 0;
  bool operator!=(const FileStamp& other) const {
    return seconds != other.seconds || nanoseconds != other.nanoseconds || size != other.size ||
           inode != other.inode;
  }
};

FileStamp stamp_of(const std::string& path) {
  struct stat found;
  if (path.empty() || stat(path.c_str(), &found)) {
    return {};
  }
  return {found.st_mtim.tv_sec, found.st_mtim.tv_nsec, found.st_size, found.st_ino};
}

struct Board {
  std::mutex mutex;
  std::string text = environment("CANN_SIM_PLAN");
  std::string path = environment("CANN_SIM_PLAN_FILE");
  std::string state_path = environment("CANN_SIM_STATE");
  FileStamp stamp;
  bool loaded = false;
  std::vector<Fault> faults;
  std::map<std::string, uint64_t>
      counts;  // by the entry's text, so that an entry which stays keeps its count
  std::shared_ptr<const Settings> settings;

  void load() {
    Plan plan;
    parse_plan(text, plan);
    stamp = stamp_of(path);
    if (!path.empty()) {
      std::ifstream file(path);
      std::stringstream content;
      content << file.rdbuf();
      parse_plan(content.str(), plan);
      if (state_path.empty()) state_path = path + ".state";
    }
    for (const Fault& fault : plan.faults) {
      if (fault.total && state_path.empty()) violation("plan", fault.text + ": total needs CANN_SIM_STATE");
    }
    for (auto it = counts.begin(); it != counts.end();) {
      const auto same = [&](const Fault& fault) { return fault.text == it->first; };
      it = std::any_of(plan.faults.begin(), plan.faults.end(), same) ? std::next(it) : counts.erase(it);
    }
    faults = plan.faults;
    settings = std::make_shared<const Settings>(plan.settings);
    loaded = true;
  }

  void refresh() {
    if (!loaded || (!path.empty() && stamp_of(path) != stamp)) load();
  }
};

Board& board() { return single_of_process<Board>(); }

// Counts an entry in the state file: one line "count<TAB>entry" for each, under an exclusive lock.
uint64_t count_in_state(const std::string& path, const std::string& entry) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0 || flock(fd, LOCK_EX)) violation("plan", "cannot use the state file " + path);
  std::map<std::string, uint64_t> counts;
  std::ifstream reader(path);
  for (std::string line; std::getline(reader, line);) {
    const auto tab = line.find('\t');
    if (tab != std::string::npos) counts[line.substr(tab + 1)] = std::stoull(line.substr(0, tab));
  }
  const uint64_t count = ++counts[entry];
  std::string content;
  for (const auto& [text, value] : counts) content += std::to_string(value) + "\t" + text + "\n";
  if (pwrite(fd, content.data(), content.size(), 0) != static_cast<ssize_t>(content.size()) ||
      ftruncate(fd, static_cast<off_t>(content.size()))) {
    violation("plan", "cannot write the state file " + path);
  }
  close(fd);
  return count;
}

bool is_in_plan(const Fault& fault) {
  const std::lock_guard<std::mutex> lock(board().mutex);
  board().refresh();
  return std::any_of(board().faults.begin(), board().faults.end(),
                     [&](const Fault& other) { return other.text == fault.text; });
}

const Fault* find_fault(Board& plan, std::initializer_list<std::string_view> targets, int device) {
  const Fault* hit = nullptr;
  for (const Fault& fault : plan.faults) {
    if (std::find(targets.begin(), targets.end(), fault.target) == targets.end()) continue;
    if (fault.device >= 0 && fault.device != device) continue;
    const uint64_t count =
        fault.total ? count_in_state(plan.state_path, fault.text) : ++plan.counts[fault.text];
    if (!hit && fault.first <= count && count <= fault.last) hit = &fault;
  }
  return hit;
}

}  // namespace

std::shared_ptr<const Settings> settings() {
  const std::lock_guard<std::mutex> lock(board().mutex);
  board().refresh();
  return board().settings;
}

void set_plan(const std::string& text) {
  const std::lock_guard<std::mutex> lock(board().mutex);
  board().text = text;
  board().load();
}

void linger(const std::function<int64_t()>& wanted_ms) {
  using std::chrono::milliseconds;
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    const auto end = start + milliseconds(wanted_ms());
    const auto left = std::chrono::ceil<milliseconds>(end - std::chrono::steady_clock::now());
    if (left <= milliseconds(0)) return;
    std::this_thread::sleep_for(std::min(left, milliseconds(10)));
  }
}

void hang() {
  count("hangs");
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

Injection inject(std::initializer_list<std::string_view> targets, int device) {
  Fault fault;
  {
    const std::lock_guard<std::mutex> lock(board().mutex);
    board().refresh();
    const Fault* hit = find_fault(board(), targets, device);
    if (!hit) {
      return {};
    }
    fault = *hit;
  }
  count("faults.injected");
  if (fault.action == Action::Hang) hang();
  if (fault.action == Action::Kill) kill(getpid(), SIGKILL);
  if (fault.action == Action::Crash) raise(SIGSEGV);
  if (fault.action == Action::Slow) linger([&] { return is_in_plan(fault) ? fault.slow_ms : 0; });
  return {fault.action, fault.code, fault.last_error, fault.poison, fault.message};
}

}  // namespace cann_sim
