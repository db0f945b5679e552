#include "counters.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "single.h"
#include "violation.h"

namespace cann_sim {
namespace {

constexpr size_t kRecords = 511;
constexpr size_t kNameBytes = 120;

struct Record {
  char name[kNameBytes];
  int64_t value;
};

struct Board {
  std::mutex mutex;
  std::map<std::string, Record*> by_name;
  Record* records = nullptr;  // records[0] is the header
  size_t used = 0;

  Board() {
    constexpr size_t bytes = (kRecords + 1) * sizeof(Record);
    int fd = -1;
    if (!report_dir().empty()) {
      const std::string path = format("%s/counters-%d", report_dir().c_str(), static_cast<int>(getpid()));
      fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
      if (fd < 0 || ftruncate(fd, bytes)) violation("plan", "cannot write " + path);
    }
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) violation("plan", "cannot map the counters");
    if (fd >= 0) close(fd);
    records = static_cast<Record*>(mapped);
    std::memcpy(records->name, "CANNSIM1", 8);
  }

  Record& at(const std::string& name) {
    auto found = by_name.find(name);
    if (found == by_name.end()) {
      if (used == kRecords || name.size() >= kNameBytes) violation("plan", "no room for the counter " + name);
      Record* record = records + ++used;
      std::memcpy(record->name, name.data(), name.size());
      found = by_name.emplace(name, record).first;
    }
    return *found->second;
  }
};

Board& board() { return single_of_process<Board>(); }

}  // namespace

void count(const std::string& name, int64_t amount) {
  const std::lock_guard<std::mutex> lock(board().mutex);
  board().at(name).value += amount;
}

void count_maximum(const std::string& name, int64_t value) {
  const std::lock_guard<std::mutex> lock(board().mutex);
  Record& record = board().at(name);
  if (value > record.value) record.value = value;
}

int64_t counter(const std::string& name) {
  const std::lock_guard<std::mutex> lock(board().mutex);
  const auto found = board().by_name.find(name);
  return found == board().by_name.end() ? 0 : found->second->value;
}

}  // namespace cann_sim
