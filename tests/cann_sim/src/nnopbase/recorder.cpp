#include "recorder.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>

#include "../model/context.h"
#include "../model/faults.h"
#include "../model/violation.h"

namespace cann_sim {
namespace {

template <typename Values, typename Write>
std::string listed(const Values& values, Write write) {
  std::string text;
  for (const auto& value : values) text += (text.empty() ? "" : ", ") + std::string(write(value));
  return "[" + text + "]";
}

std::string origin(const Context* context) {
  if (!context) return format("\"thread\": %ld, \"device\": null", syscall(SYS_gettid));
  return format("\"thread\": %ld, \"device\": %d, \"context\": %d, \"deterministic\": %d",
                syscall(SYS_gettid), context->device, context->number, plans_deterministic(*context));
}

}  // namespace

std::string json_of(const Tensor& tensor) {
  return format(
      "{\"dtype\": %d, \"shape\": %s, \"strides\": %s, \"offset\": %lld, \"format\": %d, \"storage\": %s, "
      "\"address\": %zu}",
      tensor.dtype, json_of(tensor.shape).c_str(), json_of(tensor.strides).c_str(),
      static_cast<long long>(tensor.offset), tensor.format, json_of(tensor.storage).c_str(),
      reinterpret_cast<size_t>(tensor.data));
}

std::string json_of(const std::vector<bool>& values) {
  return listed(values, [](bool value) { return value ? "true" : "false"; });
}

std::string json_of(const Shape& values) {
  return listed(values, [](int64_t value) { return std::to_string(value); });
}

// JSON has no word for what is not finite; an exponent keeps -0 a double.
std::string json_of(double value) {
  return std::isfinite(value) ? format("%.17e", value) : format("\"%g\"", value);
}

std::string json_of(const std::vector<float>& values) {
  return listed(values, [](float value) { return json_of(static_cast<double>(value)); });
}

std::string json_of(const Scalar& scalar) {
  std::string bytes;
  for (const char byte : scalar.bytes) bytes += format("%02x", static_cast<unsigned char>(byte));
  return format("{\"dtype\": %d, \"bytes\": \"%s\"}", scalar.dtype, bytes.c_str());
}

std::string json_of(const std::string& text) {
  std::string json = "\"";
  for (const char letter : text) {
    const bool is_plain = static_cast<unsigned char>(letter) >= ' ' && letter != '"' && letter != '\\';
    json += is_plain ? std::string(1, letter) : format("\\u%04x", static_cast<unsigned char>(letter));
  }
  return json + "\"";
}

std::string json_of(const std::vector<Argument>& arguments) {
  return listed(arguments, [](const Argument& argument) {
    return format("{\"name\": \"%s\", \"value\": %s}", argument.name.c_str(), argument.json.c_str());
  });
}

void record_plan(const std::string& op, const std::vector<Argument>& arguments, int status,
                 uint64_t workspace, const void* executor, const Context* context) {
  if (!settings()->record) return;
  report_line("abi", format("{\"event\": \"plan\", \"op\": \"%s\", \"arguments\": %s, \"status\": %d, "
                            "\"workspace\": %llu, \"executor\": %zu, %s}",
                            op.c_str(), json_of(arguments).c_str(), status,
                            static_cast<unsigned long long>(workspace), reinterpret_cast<size_t>(executor),
                            origin(context).c_str()));
}

void record_launch(const char* event, const std::string& op, const void* executor, int stream, int status,
                   const Context& context) {
  if (!settings()->record) return;
  report_line("abi", format("{\"event\": \"%s\", \"op\": \"%s\", \"executor\": %zu, \"stream\": %d, "
                            "\"status\": %d, %s}",
                            event, op.c_str(), reinterpret_cast<size_t>(executor), stream, status,
                            origin(&context).c_str()));
}

}  // namespace cann_sim
