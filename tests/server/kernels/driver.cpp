// Computes calls that it reads from its standard input with a library of kernels: for libraries that the tests' own
// process cannot load, because they are another machine's (an emulator runs this) or because a sanitizer wants a
// process of its own.
//
//   driver LIBRARY THREADS SCRATCH_BYTES
//
// Frames go both ways, of the machine's byte order: a call's number (8 bytes), a kind (4), 4 bytes of 0, the length of
// what follows (8). Calls at once are computed at once, each by a thread of its own. What a call says is in `read_call`
// and its answer in `compute`; `driven.py` is the other end.
#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../../../server/kernels/abi.h"

namespace {

enum Kind : uint32_t { kHello, kCall, kDone, kAsk, kAnswer, kConvert, kScratch, kKept };
// Statuses beyond those of the interface: the kernel wrote where it must not.
enum { kWroteBeside = 100, kWroteOperand = 101 };
enum Role : int32_t { kNull, kInput, kOutput };

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "driver: %s\n", what.c_str());
  std::exit(3);
}

struct Header {
  uint64_t number;
  uint32_t kind, zero;
  uint64_t bytes;
};

using Bytes = std::vector<char>;

bool read_fully(void* target, size_t bytes) {
  auto* at = static_cast<char*>(target);
  while (bytes) {
    const ssize_t got = read(STDIN_FILENO, at, bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got, bytes -= static_cast<size_t>(got);
  }
  return true;
}

void write_fully(const void* source, size_t bytes) {
  auto* at = static_cast<const char*>(source);
  while (bytes) {
    const ssize_t put = write(STDOUT_FILENO, at, bytes);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) fail("nobody reads the answers");
    at += put, bytes -= static_cast<size_t>(put);
  }
}

std::mutex answering;

void send(uint64_t number, Kind kind, const Bytes& body) {
  const Header header{number, kind, 0, body.size()};
  std::lock_guard<std::mutex> lock(answering);
  write_fully(&header, sizeof header);
  write_fully(body.data(), body.size());
}

template <typename T>
void append(Bytes& body, T value) {
  const char* from = reinterpret_cast<const char*>(&value);
  body.insert(body.end(), from, from + sizeof value);
}

// Reads the parts of a frame one after the other.
class Reader {
 public:
  explicit Reader(const Bytes& body) : body_(body) {}
  template <typename T>
  T value() {
    T found;
    std::memcpy(&found, take(sizeof found), sizeof found);
    return found;
  }
  template <typename T>
  std::vector<T> values(size_t count) {
    std::vector<T> found(count);
    if (count) std::memcpy(found.data(), take(count * sizeof(T)), count * sizeof(T));
    return found;
  }
  const char* take(size_t bytes) {
    if (body_.size() - at_ < bytes) fail("a frame ends too early");
    at_ += bytes;
    return body_.data() + at_ - bytes;
  }

 private:
  const Bytes& body_;
  size_t at_ = 0;
};

// A tensor's memory between two stripes of a pattern, at the same place in its page as in the process that asks.
class Memory {
 public:
  Memory(const char* from, size_t bytes, size_t place) : from_(from, from + bytes) {
    block_.resize(kPage + 2 * kStripe + bytes);
    std::memset(block_.data(), kPattern, block_.size());
    const size_t start = reinterpret_cast<uintptr_t>(block_.data()) + kStripe;
    first_ = kStripe + (kPage + place - start % kPage) % kPage;
    if (bytes) std::memcpy(data(), from, bytes);
  }
  char* data() { return block_.data() + first_; }
  size_t bytes() const { return from_.size(); }
  bool untouched() { return !bytes() || !std::memcmp(data(), from_.data(), bytes()); }
  bool whole_around() {
    for (size_t i = 0; i < block_.size(); ++i)
      if ((i < first_ || i >= first_ + bytes()) && block_[i] != kPattern) return false;
    return true;
  }

 private:
  static constexpr size_t kPage = 4096, kStripe = 256;
  static constexpr char kPattern = 0x5c;
  Bytes from_, block_;
  size_t first_;
};

struct Operand {
  int32_t role;
  npugrad_tensor tensor;
  std::vector<int64_t> shape, strides;
  std::unique_ptr<Memory> memory;
};

struct Library {
  explicit Library(const char* path) : handle(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (!handle) fail(dlerror());
  }
  template <typename F>
  F* find(const char* name) const {
    void* found = dlsym(handle, name);
    if (!found) fail(dlerror());
    return reinterpret_cast<F*>(found);
  }
  void* handle;
};
#define FUNCTION(library, name) (library).find<decltype(name)>(#name)

// Threads that compute calls; as many as there are calls at once.
class Callers {
 public:
  ~Callers() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    more_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  void start(std::function<void()> call) {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(std::move(call));
    if (waiting_.size() > idle_) threads_.emplace_back([this] { work(); });
    more_.notify_one();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      more_.wait(lock, [this] { return ending_ || !waiting_.empty(); });
      --idle_;
      if (waiting_.empty()) return;
      auto call = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      call();
      lock.lock();
    }
  }
  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<std::function<void()>> waiting_;
  std::list<std::thread> threads_;
  size_t idle_ = 0;
  bool ending_ = false;
};

// Questions whether calls are still wanted, and the answers.
class Questions {
 public:
  int32_t ask(uint64_t number) {
    send(number, kAsk, {});
    std::unique_lock<std::mutex> lock(mutex_);
    answered_.wait(lock, [&] { return answers_.count(number); });
    const int32_t found = answers_[number];
    answers_.erase(number);
    return found;
  }
  void answer(uint64_t number, int32_t wanted) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      answers_[number] = wanted;
    }
    answered_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable answered_;
  std::map<uint64_t, int32_t> answers_;
};

class Driver {
 public:
  Driver(const char* path, int32_t threads, int64_t scratch_bytes, int32_t float64_coordinates)
      : library_(path), context_(FUNCTION(library_, npugrad_open)(threads, scratch_bytes, float64_coordinates)) {
    if (!context_) fail("no memory for the threads of the kernels");
    operators_ = FUNCTION(library_, npugrad_operators)(&count_);
  }
  ~Driver() {
    callers_.reset();
    FUNCTION(library_, npugrad_close)(context_);
    dlclose(library_.handle);
  }

  void run() {
    hello();
    Header header;
    while (read_fully(&header, sizeof header)) {
      auto body = std::make_shared<Bytes>(header.bytes);
      if (!read_fully(body->data(), body->size())) fail("a frame is cut off");
      take(header, body);
    }
  }

 private:
  void take(const Header& header, const std::shared_ptr<Bytes>& body) {
    const uint64_t number = header.number;
    switch (header.kind) {
      case kCall: return callers_->start([this, number, body] { compute(number, *body); });
      case kAnswer: return questions_.answer(number, Reader(*body).value<int32_t>());
      case kConvert: return convert(number, *body);
      case kScratch: return scratch(number, *body);
      case kKept: return kept(number);
      default: fail("a frame of an unknown kind");
    }
  }

  void hello() {
    Bytes body;
    append(body, FUNCTION(library_, npugrad_abi_version)());
    append(body, FUNCTION(library_, npugrad_threads)(context_));
    append(body, count_);
    std::string names = FUNCTION(library_, npugrad_variant)();
    names += std::string("\n") + FUNCTION(library_, npugrad_compiler)();
    for (int32_t i = 0; i < count_; ++i) {
      append(body, operators_[i].strided);
      names += std::string("\n") + operators_[i].name;
    }
    body.insert(body.end(), names.begin(), names.end());
    send(0, kHello, body);
  }

  struct Request {
    int32_t place = 0;
    bool asks = false;
    std::vector<Operand> operands;
    std::vector<int64_t> integers;
    std::vector<double> reals;
    std::vector<uint8_t> bools;
  };

  // The operator's place, whether to ask, then counts of operands, integers, reals and bools (4 bytes each); the
  // operands; the attributes.
  static Request read_call(const Bytes& body) {
    Reader reader(body);
    Request found;
    found.place = reader.value<int32_t>();
    found.asks = reader.value<int32_t>() != 0;
    const auto counts = reader.values<int32_t>(4);
    for (int32_t i = 0; i < counts[0]; ++i) found.operands.push_back(read_operand(reader));
    found.integers = reader.values<int64_t>(static_cast<size_t>(counts[1]));
    found.reals = reader.values<double>(static_cast<size_t>(counts[2]));
    found.bools = reader.values<uint8_t>(static_cast<size_t>(counts[3]));
    return found;
  }

  // Role, dtype, rank, place in the page (4 bytes each), bytes, shape and strides (8 each), then the memory.
  static Operand read_operand(Reader& reader) {
    Operand found{};
    found.role = reader.value<int32_t>();
    found.tensor.dtype = reader.value<int32_t>();
    found.tensor.rank = reader.value<int32_t>();
    const auto place = static_cast<size_t>(reader.value<int32_t>());
    const auto bytes = static_cast<size_t>(reader.value<int64_t>());
    found.shape = reader.values<int64_t>(static_cast<size_t>(found.tensor.rank));
    found.strides = reader.values<int64_t>(static_cast<size_t>(found.tensor.rank));
    found.memory = std::make_unique<Memory>(reader.take(bytes), bytes, place);
    return found;
  }

  struct Asker {
    Questions* questions;
    uint64_t number;
  };

  int32_t called(uint64_t number, Request& request) {
    std::vector<const npugrad_tensor*> tensors;
    for (auto& operand : request.operands) {
      operand.tensor.data = operand.memory->data();
      operand.tensor.shape = operand.shape.data();
      operand.tensor.strides = operand.strides.data();
      tensors.push_back(operand.role == kNull ? nullptr : &operand.tensor);
    }
    Asker asker{&questions_, number};
    npugrad_call call{};
    call.tensors = tensors.data();
    call.integers = request.integers.data();
    call.reals = request.reals.data();
    call.bools = request.bools.data();
    call.tensor_count = static_cast<int32_t>(tensors.size());
    call.integer_count = static_cast<int32_t>(request.integers.size());
    call.real_count = static_cast<int32_t>(request.reals.size());
    call.bool_count = static_cast<int32_t>(request.bools.size());
    if (request.asks) {
      call.poll = [](void* user) {
        auto* one = static_cast<Asker*>(user);
        return one->questions->ask(one->number);
      };
      call.user = &asker;
    }
    return operators_[request.place].run(context_, &call);
  }

  // Answers with the status and the memory of all outputs.
  void compute(uint64_t number, const Bytes& body) {
    Request request = read_call(body);
    if (request.place < 0 || request.place >= count_) fail("an operator that is not there");
    int32_t status = called(number, request);
    Bytes answer;
    for (auto& operand : request.operands) {
      if (!operand.memory->whole_around()) status = kWroteBeside;
      if (operand.role == kInput && !operand.memory->untouched()) status = kWroteOperand;
    }
    append(answer, status);
    for (auto& operand : request.operands)
      if (operand.role == kOutput)
        answer.insert(answer.end(), operand.memory->data(), operand.memory->data() + operand.memory->bytes());
    send(number, kDone, answer);
  }

  // Dtypes, place of the target in its page, 0; count of elements, bytes of the target; source and target.
  void convert(uint64_t number, const Bytes& body) {
    Reader reader(body);
    const auto words = reader.values<int32_t>(4);
    const auto counts = reader.values<int64_t>(3);
    const auto from = static_cast<size_t>(counts[1]), to = static_cast<size_t>(counts[2]);
    Memory source(reader.take(from), from, 0);
    Memory target(reader.take(to), to, static_cast<size_t>(words[2]));
    int32_t status = FUNCTION(library_, npugrad_probe_convert)(
        source.data(), words[0], target.data(), words[1], counts[0]);
    if (!source.whole_around() || !target.whole_around()) status = kWroteBeside;
    Bytes answer;
    append(answer, status);
    answer.insert(answer.end(), target.data(), target.data() + to);
    send(number, kDone, answer);
  }

  void scratch(uint64_t number, const Bytes& body) {
    Reader reader(body);
    const auto bytes = reader.value<int64_t>();
    const auto blocks = reader.value<int32_t>();
    Bytes answer;
    append(answer, FUNCTION(library_, npugrad_probe_scratch)(context_, bytes, blocks));
    send(number, kDone, answer);
  }

  void kept(uint64_t number) {
    Bytes answer;
    append(answer, FUNCTION(library_, npugrad_kept_bytes)(context_));
    send(number, kDone, answer);
  }

  Library library_;
  npugrad_context* context_;
  const npugrad_operator* operators_ = nullptr;
  int32_t count_ = 0;
  Questions questions_;
  std::unique_ptr<Callers> callers_ = std::make_unique<Callers>();
};

}  // namespace

int main(int count, char** words) {
  if (count != 5) fail("expected LIBRARY THREADS SCRATCH_BYTES FLOAT64_COORDINATES");
  Driver(words[1], std::atoi(words[2]), std::atoll(words[3]), std::atoi(words[4])).run();
  return 0;
}
