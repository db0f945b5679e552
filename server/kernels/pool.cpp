#include "pool.h"

#include <algorithm>
#include <system_error>

namespace npugrad {

bool Poll::cancelled() {
  if (cancelled_ || !ask_) return cancelled_;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return false;
  cancelled_ = ask_(user_) != 0;
  next_ = std::chrono::steady_clock::now() + kInterval;
  return cancelled_;
}

Pool::Pool(int threads) : threads_(std::max(threads, 1)), busy_(static_cast<size_t>(threads_), 0) {
  for (int i = 1; i < threads_; ++i) {
    try {
      workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      break;  // no more threads to be had: the callers compute, and nothing else depends on their number
    }
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  work_.notify_all();
  for (auto& worker : workers_) worker.join();
}

// The slot this thread had last, whose scratch memory is in its cache, or any.
int Pool::take_slot(int wanted) {
  if (wanted < 0 || busy_[static_cast<size_t>(wanted)])
    wanted = static_cast<int>(std::find(busy_.begin(), busy_.end(), 0) - busy_.begin());
  busy_[static_cast<size_t>(wanted)] = 1;
  return wanted;
}

Pool::Job* Pool::next_job() {
  return jobs_.empty() ? nullptr : jobs_[turn_++ % jobs_.size()];
}

// Runs the job's next task without the lock. There must be one, and a free slot. True if it was its last to be done.
bool Pool::execute(Job& job, std::unique_lock<std::mutex>& lock, int& slot) {
  const int64_t task = job.next++;
  if (!job.open()) jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
  ++job.running;
  ++running_;
  slot = take_slot(slot);
  lock.unlock();
  std::exception_ptr error;
  try {
    (*job.body)(task, slot);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  busy_[static_cast<size_t>(slot)] = 0;
  --running_;
  --job.running;
  if (error) {
    if (!job.error) job.error = error;
    if (job.open()) {
      job.next = job.tasks;
      jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
    }
  }
  if (callers_) done_.notify_all();  // a caller waits for a slot, or for the end of its tasks
  return !job.open() && !job.running;
}

void Pool::wake() {
  if (!jobs_.empty() && idle_) work_.notify_all();
}

void Pool::work() {
  int slot = -1;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (Job* job = running_ < threads_ ? next_job() : nullptr) {
      execute(*job, lock, slot);
      continue;
    }
    if (ending_) return;
    ++idle_;
    work_.wait(lock);
    --idle_;
  }
}

void Pool::run(int64_t tasks, Poll& poll, const std::function<void(int64_t, int)>& body) {
  if (tasks <= 0) return;
  Job job{tasks, 0, 0, &body, nullptr};
  int slot = -1;
  std::unique_lock<std::mutex> lock(mutex_);
  jobs_.push_back(&job);
  if (tasks > 1) wake();
  bool cancelled = false;
  while (job.open() || job.running) {
    lock.unlock();
    cancelled = poll.cancelled();
    lock.lock();
    if (cancelled && job.open()) {
      job.next = job.tasks;
      jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
    }
    if (job.open() && running_ < threads_) {
      execute(job, lock, slot);
    } else if (job.open() || job.running) {
      if (running_ < threads_) wake();  // the slot this caller leaves is free for other calls
      ++callers_;
      done_.wait_for(lock, Poll::kInterval);
      --callers_;
    }
  }
  wake();  // threads that found all slots taken
  lock.unlock();
  if (job.error) std::rethrow_exception(job.error);
  if (cancelled) throw Cancelled();
}

}  // namespace npugrad
