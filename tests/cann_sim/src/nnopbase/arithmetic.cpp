#include "arithmetic.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "../model/faults.h"
#include "../model/violation.h"
#include "launch.h"
#include "recorder.h"

namespace cann_sim {
namespace {

constexpr char kVariable[] = "CANN_SIM_ARITHMETIC";

[[noreturn]] void fail(const std::string& text) { throw Refusal{aclnn::kInner, text}; }

// A connection that ends with the block. No step of it takes longer than the plan allows.
class Connection {
 public:
  explicit Connection(const std::string& path) : path_(path), socket_(socket(AF_UNIX, SOCK_STREAM, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path) give_up("connect", ENAMETOOLONG);
    std::memcpy(address.sun_path, path.data(), path.size());
    const int64_t limit_ms = settings()->arithmetic_ms;
    const timeval limit{limit_ms / 1000, limit_ms % 1000 * 1000};
    for (const int option : {SO_SNDTIMEO, SO_RCVTIMEO})
      setsockopt(socket_, SOL_SOCKET, option, &limit, sizeof limit);
    if (connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address)) give_up("connect", errno);
  }
  ~Connection() { close(socket_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void send_all(const std::string& bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
      const ssize_t count = send(socket_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (count < 0 && errno != EINTR) give_up("send", errno);
      if (count > 0) sent += static_cast<size_t>(count);
    }
  }

  std::string receive(size_t size) {
    std::string bytes(size, '\0');
    for (size_t received = 0; received < size;) {
      const ssize_t count = recv(socket_, &bytes[received], size - received, 0);
      if (count == 0) give_up("receive", ECONNRESET);
      if (count < 0 && errno != EINTR) give_up("receive", errno);
      if (count > 0) received += static_cast<size_t>(count);
    }
    return bytes;
  }

 private:
  [[noreturn]] void give_up(const char* step, int error) {
    const std::string why = error == EAGAIN ? format("nothing came for %lld ms",
                                                     static_cast<long long>(settings()->arithmetic_ms))
                                            : std::strerror(error);
    if (socket_ >= 0) close(std::exchange(socket_, -1));
    fail(format("cannot %s: %s; the process that computes at %s=%s is gone, or stuck", step, why.c_str(),
                kVariable, path_.c_str()));
  }

  std::string path_;
  int socket_;
};

std::string request_of(const KernelRun& run, const ArithmeticCall& call) {
  const auto names = [](const std::vector<std::string>& each) {
    std::string text;
    for (const std::string& name : each) text += (text.empty() ? "" : ", ") + json_of(name);
    return "[" + text + "]";
  };
  const auto seed = static_cast<unsigned long long>(call.in_order ? 0 : run.summation.seed());
  std::string request =
      format("{\"op\": \"%s\", \"seed\": %llu, \"operands\": %s, \"results\": %s, \"arguments\": ",
             call.op.c_str(), seed, names(call.operands).c_str(), names(call.results).c_str());
  request += call.arguments + "}\n";
  for (const std::string& name : call.operands) request += run.read_bytes(name.c_str());
  return request;
}

}  // namespace

void compute_elsewhere(KernelRun& run, const ArithmeticCall& call) {
  const char* const path = std::getenv(kVariable);
  if (!path || !*path) {
    fail(format("%s is not set; expected the socket of a process that computes: see python -m "
                "tests.cann_sim.arithmetic",
                kVariable));
  }
  Connection connection(path);
  connection.send_all(request_of(run, call));
  int64_t size;  // of an error's text, if it is negative
  std::memcpy(&size, connection.receive(sizeof size).data(), sizeof size);
  const std::string reply = connection.receive(static_cast<size_t>(std::abs(size)));
  if (size < 0) fail(reply);
  size_t expected = 0;
  for (const std::string& name : call.results) {
    expected += static_cast<size_t>(run.elements(name.c_str())) * item_size(run.dtype(name.c_str()));
  }
  if (reply.size() != expected)
    fail(format("found %zu bytes of results; expected %zu", reply.size(), expected));
  const char* bytes = reply.data();
  for (const std::string& name : call.results) {
    run.write_bytes(name.c_str(), bytes);
    bytes += static_cast<size_t>(run.elements(name.c_str())) * item_size(run.dtype(name.c_str()));
  }
}

}  // namespace cann_sim
