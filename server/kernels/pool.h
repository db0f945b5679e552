// Threads that compute the tasks of calls.
//
// A call is cut into tasks whose number and bounds follow from shapes alone, never from the number of threads, and
// each task owns what it writes: results have the same bits for any number of threads. Callers take part. At most
// `threads` tasks run at once over all calls, so calls at once do not oversubscribe the processors; the pool's own threads
// go from call to call in turns.
#ifndef NPUGRAD_POOL_H
#define NPUGRAD_POOL_H

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace npugrad {

// Thrown between tasks once a call's `poll` has said that nobody wants it.
struct Cancelled : std::exception {};

class Poll {
 public:
  Poll(int32_t (*ask)(void*), void* user) : ask_(ask), user_(user) {}
  // Asks if the last time is long enough ago; only by the calling thread.
  bool cancelled();
  static constexpr std::chrono::milliseconds kInterval{10};

 private:
  int32_t (*ask_)(void*);
  void* user_;
  bool cancelled_ = false;
  std::chrono::steady_clock::time_point next_{};
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Calls body(task, slot) for each task of [0, tasks), and returns when all are done. Slots are below threads(), and
  // no two tasks of one call run in a slot at once: scratch memory by slot needs no lock. Not to be nested.
  // Rethrows what the first body threw, or Cancelled; then some tasks were not run.
  void run(int64_t tasks, Poll& poll, const std::function<void(int64_t, int)>& body);

 private:
  struct Job {
    int64_t tasks, next = 0, running = 0;
    const std::function<void(int64_t, int)>* body;
    std::exception_ptr error;
    bool open() const { return next < tasks; }
  };
  void work();
  void wake();
  bool execute(Job& job, std::unique_lock<std::mutex>& lock, int& slot);
  int take_slot(int wanted);
  Job* next_job();

  const int threads_;
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::vector<Job*> jobs_;  // those with tasks to give out
  size_t turn_ = 0;         // whose turn it is for the pool's own threads
  std::vector<char> busy_;  // by slot
  int running_ = 0, callers_ = 0, idle_ = 0;
  bool ending_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace npugrad
#endif
