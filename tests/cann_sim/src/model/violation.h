// How the simulator says that its user broke a rule.
//
// A real device would corrupt memory, hang or return a code that means nothing. The simulator ends the
// process with one sentence instead, so that no test can pass over such a mistake.
#pragma once

#include <string>

namespace cann_sim {

// Prints "cann_sim: violation [rule]: text", appends it to the report folder, and aborts.
[[noreturn]] void violation(const char* rule, const std::string& text);

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

// Folder of CANN_SIM_REPORT_DIR, empty if there is none.
const std::string& report_dir();

// Appends a whole line to a file of this process in the report folder; one write, so lines never mix.
void report_line(const char* file, const std::string& line);

}  // namespace cann_sim
