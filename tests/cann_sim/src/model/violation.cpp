#include "violation.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "single.h"

namespace cann_sim {

std::string format(const char* pattern, ...) {
  va_list arguments;
  va_start(arguments, pattern);
  va_list again;
  va_copy(again, arguments);
  std::vector<char> text(static_cast<size_t>(std::vsnprintf(nullptr, 0, pattern, arguments)) + 1);
  va_end(arguments);
  std::vsnprintf(text.data(), text.size(), pattern, again);
  va_end(again);
  return text.data();
}

namespace {

struct ReportDir {
  const char* value = std::getenv("CANN_SIM_REPORT_DIR");
  std::string path = value ? value : "";
};

}  // namespace

const std::string& report_dir() { return single_of_process<ReportDir>().path; }

void report_line(const char* file, const std::string& line) {
  if (report_dir().empty()) return;
  const std::string path = format("%s/%s-%d", report_dir().c_str(), file, static_cast<int>(getpid()));
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) return;
  const std::string whole = line + "\n";
  // The process may be about to die: nothing could be done about a failed write.
  [[maybe_unused]] const ssize_t written = write(fd, whole.data(), whole.size());
  close(fd);
}

void violation(const char* rule, const std::string& text) {
  const std::string line = format("cann_sim: violation [%s]: %s", rule, text.c_str());
  std::fprintf(stderr, "%s\n", line.c_str());
  std::fflush(stderr);
  report_line("violations", line);
  std::abort();
}

}  // namespace cann_sim
