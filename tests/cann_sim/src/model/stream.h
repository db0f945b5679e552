// Streams: in-order queues, each worked off by a thread of its own.
//
// Two things are checked here that a real device never tells. A task may use memory only as long as it is
// allocated, from the call that queues it until it has run. And two tasks that may run at the same time
// (different streams, no event between them) must not use the same bytes if one of them writes: such a race
// is found when the second one is queued, whether or not it would have gone wrong this time. So a buffer that
// is given back to an allocator too early is noticed as soon as its next owner queues work on it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "context.h"
#include "memory.h"
#include "pinned_guard.h"

namespace cann_sim {

enum class TaskKind { Kernel, Copy, Memset, Event, Callback };

struct Task {
  TaskKind kind = TaskKind::Callback;
  std::string name;  // such as "aclrtMemcpyAsync" or an operator
  std::vector<Access> accesses;
  std::function<int()> run;          // returns an error code
  std::string failure;               // why, if it knows
  std::function<void(int)> dropped;  // instead of run, when a failed context throws its queue away
  uint64_t sequence = 0;             // within its stream
};

struct Stream {
  int number = 0;
  std::shared_ptr<Context> context;
  void* handle = nullptr;
  uint32_t priority = 0;
  std::deque<std::shared_ptr<Task>> queue;  // the first one may be running
  uint64_t submitted = 0;
  uint64_t finished = 0;
  int error = 0;  // of a task, when the context goes on after failures; told once
  std::string error_text;
  bool started = false;
  bool running = false;
  bool destroyed = false;
  Clock after;  // all of this has finished before whatever is queued next
  std::thread::id user;
  std::condition_variable wake;
};

// Guards contexts, streams and events. Never held while a task runs.
std::mutex& model_mutex();

std::shared_ptr<Stream> create_stream(const std::shared_ptr<Context>& context, uint32_t priority);

// The stream of a handle in the current context (null: its default stream); null after reporting 107002 or
// 107003.
std::shared_ptr<Stream> find_stream(void* handle, const char* user, int* code);
int destroy_stream(void* handle, const char* user, bool force);

// Lock held. Destroys the streams of a context that ends, but for its default stream each is a leak; returns
// how many. What still runs is left behind: its thread ends when it is idle.
int64_t retire_streams(Context& context);

// Queues a task; 0, or the context's failure.
int submit(const std::shared_ptr<Stream>& stream, std::shared_ptr<Task> task, const char* user);

// Waits for all queued so far; 0, 507046 after `timeout_ms` (negative: never), or the failure of a task.
int synchronize(const std::shared_ptr<Stream>& stream, int timeout_ms, const char* user);

// Waits for one task just queued.
int wait_for(const std::shared_ptr<Stream>& stream, uint64_t sequence, const char* user);

// Tells the thread of a context's failure; 0 if there is none. To go on queueing after that is a violation.
int check_failure(Context& context, const char* user, bool new_work);

// Lock held. Whether a stream is done with all that was queued, for the host to know.
bool query(const Stream& stream);

// A violation if unfinished work of any stream uses the allocation.
void check_unused(const Allocation& allocation, const char* user);

// The allocation is being freed: its pages need no guard any more.
void unguard(const Allocation& allocation);

// A violation if unfinished work conflicts with an immediate use by the host, as aclrtMemcpy makes.
void check_race(const std::vector<Access>& accesses, const char* user);

// Whether any stream of the context (null: of any context) has unfinished work. Lock held.
bool has_work(const Context* context);

// Fails a context as a failed task would.
void fail_context(Context& context, int code);

// Notified when a task has finished or a context has failed; to be used with model_mutex().
std::condition_variable& model_progress();

}  // namespace cann_sim
