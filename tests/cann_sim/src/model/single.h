// What there is one of: made at its first use and never destroyed, as threads outlive main.
#pragma once

#include <pthread.h>

#include <atomic>
#include <mutex>

namespace cann_sim {

template <typename T>
T& single() {
  static T* const made = new T;
  return *made;
}

// One for each process, also for one that was forked: of what has its number, or follows from its
// environment.
template <typename T>
T& single_of_process() {
  static std::mutex making;
  static std::atomic<T*> made{nullptr};
  [[maybe_unused]] static const int watched = pthread_atfork(nullptr, nullptr, [] { made = nullptr; });
  if (T* const found = made) return *found;
  const std::lock_guard<std::mutex> lock(making);
  if (!made) made = new T;
  return *made;
}

}  // namespace cann_sim
