#include "stream.h"

#include <chrono>

#include "counters.h"
#include "faults.h"
#include "handles.h"
#include "single.h"
#include "violation.h"

namespace cann_sim {
namespace {

constexpr int kForeignStream = 107003;
constexpr int kSyncTimeout = 507046;

struct Board {
  HandleTable<Stream> streams{"stream"};
  std::set<std::shared_ptr<Stream>> busy;  // with unfinished work
  std::condition_variable progress;        // some task finished, or a context failed
  int numbers = 0;
  int kernels_running = 0;
  int copies_running = 0;
};

Board& board() { return single<Board>(); }

// Lock held. Forgets the queue of every stream of a context, but not tasks that run already.
void poison(Context& context, int code, const std::string& text = "") {
  context.failure = code;
  context.failure_text = text;
  count("contexts_poisoned");
  for (const auto& stream : context.streams) {
    while (stream->queue.size() > (stream->running ? 1u : 0u)) {
      const auto task = stream->queue.back();
      stream->queue.pop_back();
      ++stream->finished;
      count("tasks_dropped");
      if (task->dropped) task->dropped(code);
    }
    if (stream->queue.empty()) board().busy.erase(stream);
  }
}

// Lock held, so that the lines are in the order of what happened.
void record_task(const char* event, const Stream& stream, const Task& task) {
  const bool tells = task.kind == TaskKind::Kernel || task.kind == TaskKind::Copy;
  if (!tells || !settings()->record) return;
  report_line("abi", format("{\"event\": \"%s\", \"task\": \"%s\", \"stream\": %d}", event, task.name.c_str(),
                            stream.number));
}

// Lock held.
void begin(Stream& stream, const Task& task) {
  stream.running = true;
  record_task("begin", stream, task);
  if (task.kind == TaskKind::Kernel) count_maximum("max_concurrent_kernels", ++board().kernels_running);
  if (task.kind == TaskKind::Copy) ++board().copies_running;
  const bool both = board().kernels_running && board().copies_running;
  if (both && (task.kind == TaskKind::Kernel || task.kind == TaskKind::Copy)) count("copies_beside_kernels");
}

// Lock held.
void end(const std::shared_ptr<Stream>& stream, const Task& task, int code) {
  if (task.kind == TaskKind::Kernel) --board().kernels_running;
  if (task.kind == TaskKind::Copy) --board().copies_running;
  record_task("end", *stream, task);
  stream->running = false;
  stream->queue.pop_front();
  ++stream->finished;
  if (stream->queue.empty()) board().busy.erase(stream);
  Context& context = *stream->context;
  if (code && context.stop_on_failure && !context.failure) poison(context, code, task.failure);
  if (code && !context.stop_on_failure && !stream->error) {
    stream->error = code;
    stream->error_text = task.failure;
  }
  board().progress.notify_all();
}

// Nothing a task uses may have been freed.
void verify(const Task& task) {
  for (const Access& access : task.accesses) resolve(access, task.name);
}

// What a sick device does to the first output: a flipped bit, or a byte behind the allocation.
void damage(const Task& task, Action action) {
  for (const Access& access : task.accesses) {
    if (!access.write || !access.bytes) continue;
    if (action == Action::Corrupt) resolve(access, task.name)[access.bytes / 2] ^= 0x40;
    if (action == Action::Overrun) access.allocation->mirror[access.allocation->capacity] = 0;
    return;
  }
}

Injection inject_for(const Task& task, int device) {
  switch (task.kind) {
    case TaskKind::Kernel:
      linger([] { return settings()->kernel_ms; });
      return inject({"kernel", "kernel." + task.name}, device);
    case TaskKind::Copy: linger([] { return settings()->copy_ms; }); return inject({"copy"}, device);
    case TaskKind::Memset: return inject({"memset"}, device);
    case TaskKind::Event:
    case TaskKind::Callback: break;
  }
  return {};
}

int execute(const Task& task, int device) {
  verify(task);
  const Injection fault = inject_for(task, device);
  if (fault.action == Action::Code) return fault.code;
  const int code = task.run();
  damage(task, fault.action);
  verify(task);
  for (const Access& access : task.accesses) {
    if (access.write) check_redzones(*access.allocation, task.name);
  }
  return code;
}

void work(const std::shared_ptr<Stream>& stream) {
  std::unique_lock<std::mutex> lock(model_mutex());
  for (;;) {
    stream->wake.wait(lock, [&] { return !stream->queue.empty() || stream->destroyed; });
    if (stream->queue.empty()) return;
    const auto task = stream->queue.front();
    begin(*stream, *task);
    lock.unlock();
    const int code = execute(*task, stream->context->device);
    lock.lock();
    end(stream, *task, code);
  }
}

// Lock held. A violation if a use by `stream` (null: by the host, now) may coincide with a conflicting task
// elsewhere.
void find_race(const std::vector<Access>& accesses, const Stream* stream, const char* user) {
  for (const auto& other : board().busy) {
    if (other.get() == stream) continue;
    uint64_t past = 0;
    if (stream) {
      const auto known = stream->after.find(other->number);
      if (known != stream->after.end()) past = known->second;
    }
    for (const auto& task : other->queue) {
      if (task->sequence <= past) continue;
      for (const Access& theirs : task->accesses) {
        for (const Access& ours : accesses) {
          if (!(theirs.write || ours.write) || !theirs.overlaps(ours)) continue;
          violation("race", format("%s %s %s at 0x%zx while %s on stream %d %s it as %s", user,
                                   ours.write ? "writes" : "reads", ours.what.c_str(),
                                   static_cast<size_t>(ours.begin), task->name.c_str(), other->number,
                                   theirs.write ? "writes" : "reads", theirs.what.c_str()));
        }
      }
    }
  }
}

// Lock held.
std::shared_ptr<Stream> make_stream(const std::shared_ptr<Context>& context, uint32_t priority) {
  auto stream = std::make_shared<Stream>();
  stream->number = ++board().numbers;
  stream->context = context;
  stream->priority = priority;
  stream->handle = board().streams.add(stream);
  context->streams.insert(stream);
  return stream;
}

std::string explained(const std::string& what, const std::string& why) {
  return why.empty() ? what : what + ": " + why;
}

// Lock held.
int tell_failure(Context& context, const char* user, bool new_work) {
  if (!context.failure) return 0;
  auto& told = this_thread().told;
  if (told.count(context.number) && new_work && settings()->strict_poison) {
    violation("poisoned",
              format("%s on a context that failed with %d, as this thread was told", user, context.failure));
  }
  told.insert(context.number);
  return report(user, context.failure,
                explained("the context takes no work since a task failed on device " +
                              std::to_string(context.device),
                          context.failure_text));
}

// Lock held.
void check_thread(Stream& stream, const Task& task, const char* user) {
  if (task.kind == TaskKind::Event || task.kind == TaskKind::Callback || !settings()->strict_threads) return;
  if (stream.user == std::thread::id()) stream.user = std::this_thread::get_id();
  if (stream.user != std::this_thread::get_id()) {
    violation("wrong-thread",
              format("%s: another thread queued work on stream %d before", user, stream.number));
  }
}

// Lock held. The host is told that the first `goal` tasks of a stream are done, and so all that they came
// after.
void release_finished(const Stream& stream, uint64_t goal) {
  Clock finished = stream.after;
  finished[stream.number] = goal;
  release_guards(finished);
}

// Lock held through `lock`, given up while waiting. Waits until `goal` tasks of the stream have finished.
int wait_until(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Stream>& stream, uint64_t goal,
               int timeout_ms, const char* user) {
  const auto done = [&] { return stream->finished >= goal || stream->context->failure; };
  if (timeout_ms < 0) {
    board().progress.wait(lock, done);
  } else if (!board().progress.wait_for(lock, std::chrono::milliseconds(timeout_ms), done)) {
    return report(user, kSyncTimeout,
                  format("stream %d was not done after %d ms", stream->number, timeout_ms));
  }
  if (stream->context->failure) return tell_failure(*stream->context, user, false);
  release_finished(*stream, goal);
  if (!stream->error) return 0;
  const int code = stream->error;
  stream->error = 0;
  return report(user, code,
                explained(format("a task of stream %d failed", stream->number), stream->error_text));
}

}  // namespace

std::mutex& model_mutex() { return single<std::mutex>(); }

std::condition_variable& model_progress() { return board().progress; }

std::shared_ptr<Stream> create_stream(const std::shared_ptr<Context>& context, uint32_t priority) {
  const std::lock_guard<std::mutex> lock(model_mutex());
  return make_stream(context, priority);
}

std::shared_ptr<Stream> find_stream(void* handle, const char* user, int* code) {
  const auto context = current_context(user);
  if (!context) {
    *code = this_thread().last_error;
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(model_mutex());
  if (!handle) {
    if (!context->default_stream) context->default_stream = make_stream(context, 0)->handle;
    return board().streams.get(context->default_stream, user);
  }
  const auto stream = board().streams.get(handle, user);
  if (stream->context == context) return stream;
  *code = report(user, kForeignStream, format("stream %d is of another context", stream->number));
  return nullptr;
}

int destroy_stream(void* handle, const char* user, bool force) {
  std::unique_lock<std::mutex> lock(model_mutex());
  const auto stream = board().streams.get(handle, user);
  if (!force) {
    board().progress.wait(lock, [&] { return stream->queue.empty() || stream->context->failure; });
  }
  board().streams.remove(handle, user);
  stream->context->streams.erase(stream);
  stream->destroyed = true;
  stream->wake.notify_all();
  return 0;
}

int64_t retire_streams(Context& context) {
  int64_t leaked = 0;
  for (const auto& stream : context.streams) {
    if (stream->handle != context.default_stream) ++leaked;
    board().streams.remove(stream->handle, "aclrtResetDevice");
    stream->destroyed = true;
    stream->wake.notify_all();
  }
  context.streams.clear();
  return leaked;
}

int submit(const std::shared_ptr<Stream>& stream, std::shared_ptr<Task> task, const char* user) {
  const std::lock_guard<std::mutex> lock(model_mutex());
  if (stream->destroyed) {
    violation("use-after-destroy", format("%s: stream %d was destroyed", user, stream->number));
  }
  if (const int code = tell_failure(*stream->context, user, true)) return code;
  check_thread(*stream, *task, user);
  find_race(task->accesses, stream.get(), user);
  task->sequence = ++stream->submitted;
  for (const Access& access : task->accesses) guard(stream->number, task->sequence, access);
  stream->queue.push_back(std::move(task));
  board().busy.insert(stream);
  if (!stream->started) {
    stream->started = true;
    std::thread(work, stream).detach();
  }
  stream->wake.notify_one();
  return 0;
}

int synchronize(const std::shared_ptr<Stream>& stream, int timeout_ms, const char* user) {
  std::unique_lock<std::mutex> lock(model_mutex());
  return wait_until(lock, stream, stream->submitted, timeout_ms, user);
}

int wait_for(const std::shared_ptr<Stream>& stream, uint64_t sequence, const char* user) {
  std::unique_lock<std::mutex> lock(model_mutex());
  return wait_until(lock, stream, sequence, -1, user);
}

int check_failure(Context& context, const char* user, bool new_work) {
  const std::lock_guard<std::mutex> lock(model_mutex());
  return tell_failure(context, user, new_work);
}

void fail_context(Context& context, int code) {
  const std::lock_guard<std::mutex> lock(model_mutex());
  if (!context.failure) poison(context, code);
  board().progress.notify_all();
}

void check_unused(const Allocation& allocation, const char* user) {
  const std::lock_guard<std::mutex> lock(model_mutex());
  for (const auto& stream : board().busy) {
    for (const auto& task : stream->queue) {
      for (const Access& access : task->accesses) {
        if (access.allocation.get() != &allocation) continue;
        violation("freed-in-use",
                  format("%s: %s of unfinished %s on stream %d is in %s", user, access.what.c_str(),
                         task->name.c_str(), stream->number, allocation.describe().c_str()));
      }
    }
  }
}

void unguard(const Allocation& allocation) {
  const std::lock_guard<std::mutex> lock(model_mutex());
  forget_guards(allocation);
}

void check_race(const std::vector<Access>& accesses, const char* user) {
  const std::lock_guard<std::mutex> lock(model_mutex());
  find_race(accesses, nullptr, user);
}

bool query(const Stream& stream) {
  if (!stream.queue.empty()) return false;
  release_finished(stream, stream.submitted);
  return true;
}

bool has_work(const Context* context) {
  for (const auto& stream : board().busy) {
    if (!context || stream->context.get() == context) return true;
  }
  return false;
}

}  // namespace cann_sim
