#include "settings.h"

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <functional>
#include <map>

#include "violation.h"

namespace cann_sim {
namespace {

std::string trimmed(const std::string& text) {
  const auto first = text.find_first_not_of(" \t\r");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

std::vector<std::string> split(const std::string& text, const std::string& separators) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (separators.find(c) != std::string::npos) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

[[noreturn]] void refuse(const std::string& entry, const std::string& why) {
  violation("plan", format("entry \"%s\": %s", entry.c_str(), why.c_str()));
}

int64_t integer(const std::string& entry, const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end || errno || value < 0) {
    refuse(entry, "\"" + text + "\" is not a number of 0 or more");
  }
  return value;
}

bool choice(const std::string& entry, const std::string& value, const std::string& yes,
            const std::string& no) {
  if (value == yes) return true;
  if (value != no) refuse(entry, "expected " + yes + " or " + no);
  return false;
}

void parse_setting(const std::string& entry, Settings& settings) {
  const auto equals = entry.find('=');
  const std::string name = trimmed(entry.substr(0, equals));
  const std::string value = trimmed(entry.substr(equals + 1));
  const std::map<std::string, int64_t*> numbers = {
      {"ndev", &settings.ndev},           {"hbm_mb", &settings.hbm_mb},
      {"kernel_ms", &settings.kernel_ms}, {"copy_ms", &settings.copy_ms},
      {"call_us", &settings.call_us},     {"workspace_mb", &settings.workspace_mb},
      {"arithmetic_ms", &settings.arithmetic_ms},
  };
  const std::map<std::string, std::string*> texts = {{"soc", &settings.soc}, {"cann", &settings.cann}};
  struct Switch {
    bool* field;
    const char* yes;
    const char* no;
  };
  const std::map<std::string, Switch> switches = {
      {"record", {&settings.record, "1", "0"}},
      {"trace", {&settings.trace, "1", "0"}},
      {"sums", {&settings.ordered_sums, "ordered", "free"}},
      {"accumulate", {&settings.accumulate, "1", "0"}},
      {"helpers", {&settings.helpers, "1", "0"}},
      {"threads", {&settings.strict_threads, "strict", "real"}},
      {"poisoned", {&settings.strict_poison, "abort", "code"}},
      {"pageable", {&settings.strict_pageable, "abort", "block"}},
      {"pinned", {&settings.strict_pinned, "strict", "real"}},
      {"determinism", {&settings.strict_determinism, "strict", "real"}},
      {"free_check", {&settings.free_checks_queue, "now", "execution"}},
  };
  if (numbers.count(name)) {
    *numbers.at(name) = integer(entry, value);
  } else if (texts.count(name)) {
    *texts.at(name) = value;
  } else if (switches.count(name)) {
    const Switch& found = switches.at(name);
    *found.field = choice(entry, value, found.yes, found.no);
  } else {
    refuse(entry, "there is no setting \"" + name + "\"");
  }
}

void parse_when(const std::string& when, Fault& fault) {
  if (when == "*") return;
  const auto dash = when.find('-');
  if (dash != std::string::npos) {
    fault.first = static_cast<uint64_t>(integer(fault.text, when.substr(0, dash)));
    fault.last = static_cast<uint64_t>(integer(fault.text, when.substr(dash + 1)));
  } else if (!when.empty() && when.back() == '+') {
    fault.first = static_cast<uint64_t>(integer(fault.text, when.substr(0, when.size() - 1)));
  } else {
    fault.first = fault.last = static_cast<uint64_t>(integer(fault.text, when));
  }
  if (fault.first < 1 || fault.first > fault.last) refuse(fault.text, "calls are counted from 1");
}

void parse_action(const std::string& action, Fault& fault) {
  static const std::map<std::string, Action> names = {
      {"hang", Action::Hang},   {"kill", Action::Kill},       {"stale", Action::Stale},
      {"null", Action::Null},   {"corrupt", Action::Corrupt}, {"overrun", Action::Overrun},
      {"crash", Action::Crash},
  };
  if (names.count(action)) {
    fault.action = names.at(action);
  } else if (action.rfind("slow=", 0) == 0) {
    fault.action = Action::Slow;
    fault.slow_ms = static_cast<int>(integer(fault.text, action.substr(5)));
  } else {
    fault.action = Action::Code;
    fault.code = static_cast<int>(integer(fault.text, action));
    if (!fault.code) refuse(fault.text, "0 is no error code");
  }
}

void parse_option(const std::string& option, Fault& fault) {
  const auto equals = option.find('=');
  const std::string name = option.substr(0, equals);
  const std::string value = equals == std::string::npos ? "" : option.substr(equals + 1);
  if (name == "dev") {
    fault.device = static_cast<int>(integer(fault.text, value));
  } else if (name == "last") {
    fault.last_error = static_cast<int>(integer(fault.text, value));
  } else if (name == "msg") {
    fault.message = value;
  } else if (option == "total") {
    fault.total = true;
  } else if (option == "poison") {
    fault.poison = true;
  } else {
    refuse(fault.text, "there is no option \"" + option + "\"");
  }
}

// A misspelt target would never match, so its form at least is checked.
void check_target(const Fault& fault) {
  static const char* const known[] = {"malloc", "kernel", "copy", "memset"};
  for (const char* name : known) {
    if (fault.target == name) return;
  }
  for (const char* prefix : {"acl", "kernel.aclnn"}) {
    if (fault.target.rfind(prefix, 0) == 0) return;
  }
  refuse(fault.text,
         "\"" + fault.target + "\" is neither an interface function nor malloc, kernel, copy or memset");
}

Fault parse_fault(const std::string& entry) {
  const std::vector<std::string> parts = split(entry, ":");
  Fault fault;
  fault.text = entry;
  if (parts.size() < 3) refuse(entry, "expected name=value or target:when:action");
  fault.target = trimmed(parts[0]);
  check_target(fault);
  parse_when(trimmed(parts[1]), fault);
  parse_action(trimmed(parts[2]), fault);
  for (size_t i = 3; i < parts.size(); ++i) parse_option(trimmed(parts[i]), fault);
  return fault;
}

}  // namespace

void parse_plan(const std::string& text, Plan& plan) {
  for (const std::string& line : split(text, "\n")) {
    for (const std::string& part : split(line.substr(0, line.find('#')), ";")) {
      const std::string entry = trimmed(part);
      if (entry.empty()) continue;
      // A colon before any equals sign makes it a fault: options have equals signs of their own.
      if (entry.find(':') < entry.find('=')) {
        plan.faults.push_back(parse_fault(entry));
      } else if (entry.find('=') != std::string::npos) {
        parse_setting(entry, plan.settings);
      } else {
        refuse(entry, "expected name=value or target:when:action");
      }
    }
  }
  if (plan.settings.ndev > 16) violation("plan", "at most 16 devices are simulated");
  if (plan.settings.record && report_dir().empty()) violation("plan", "record=1 needs CANN_SIM_REPORT_DIR");
  if (plan.settings.trace && report_dir().empty()) violation("plan", "trace=1 needs CANN_SIM_REPORT_DIR");
}

}  // namespace cann_sim
