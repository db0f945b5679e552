// Which tasks Floyd attention is cut into, in what order they run and what they wait for.
#ifndef NPUGRAD_FLOYD_SCHEDULE_H
#define NPUGRAD_FLOYD_SCHEDULE_H

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "runtime.h"

namespace npugrad {
namespace floyd {

// A task: its batch and head, its ranges, and where their sums are.
struct Visit {
  int64_t pair, n_range, k_range;
  int64_t n_place, k_place;  // among the ranges whose sums are in memory
  int64_t n_before, k_before;  // tasks that come before it in the places
  bool n_first, n_last, k_first, k_last;
};

// The order of tasks. Range i of n meets the ranges of k in their order, and likewise the other way around: any order
// that keeps to this gives the same bits. Here every thread stays with a range of k, so that its operands and sums
// stay in the cache, and is one range of n behind the thread before it.
class Schedule {
 public:
  Schedule(int64_t pairs, int64_t n_ranges, int64_t k_ranges, int threads)
      : pairs_(pairs), n_ranges_(n_ranges), k_ranges_(k_ranges), width_(std::min<int64_t>(threads, k_ranges)),
        together_(std::min(pairs, ceil_div(2 * static_cast<int64_t>(threads) - 1, std::min(n_ranges, k_ranges)))) {
    order_.reserve(static_cast<size_t>(product({n_ranges, k_ranges})));
    for (int64_t k = 0; k < k_ranges; k += width_)
      for (int64_t step = 0; step < n_ranges + width_; ++step)
        for (int64_t j = k; j < std::min(k + width_, k_ranges); ++j) {
          const int64_t i = step - (j - k);
          if (i >= 0 && i < n_ranges) order_.emplace_back(i, j);
        }
  }

  // How many ranges of each kind have their sums in memory at once.
  int64_t n_places() const { return together_ * n_ranges_; }
  int64_t k_places() const { return together_ * (width_ + 1); }
  int64_t tasks() const { return product({pairs_, n_ranges_, k_ranges_}); }

  Visit visit(int64_t task) const {
    const int64_t each = n_ranges_ * k_ranges_, round = task / (together_ * each), first = round * together_;
    const int64_t rest = task - first * each, abreast = std::min(together_, pairs_ - first);
    const int64_t slot = rest % abreast;
    const auto [i, j] = order_[static_cast<size_t>(rest / abreast)];
    const int64_t column = round * k_ranges_ + j, columns = width_ + 1;
    return {first + slot, i, j, slot * n_ranges_ + i, slot * columns + column % columns,
            column, column / columns * n_ranges_ + i, j == 0, j == k_ranges_ - 1, i == 0, i == n_ranges_ - 1};
  }

 private:
  const int64_t pairs_, n_ranges_, k_ranges_, width_, together_;
  std::vector<std::pair<int64_t, int64_t>> order_;  // of one batch and head
};

// How many tasks the places have seen. A task waits for those before it, which other threads have begun already.
class Progress {
  using Count = std::atomic<int64_t>;

 public:
  explicit Progress(const Schedule& schedule)
      : n_(static_cast<size_t>(schedule.n_places())), k_(static_cast<size_t>(schedule.k_places())) {}

  // While it lives, its task runs; however that ends, others no longer wait for it.
  class Turn {
   public:
    Turn(Count& n, Count& k) : n_(n), k_(k) {}
    ~Turn() {
      n_.fetch_add(1, std::memory_order_release);
      k_.fetch_add(1, std::memory_order_release);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Count &n_, &k_;
  };

  Turn take_turn(const Visit& visit) {
    Count &n = n_[static_cast<size_t>(visit.n_place)], &k = k_[static_cast<size_t>(visit.k_place)];
    wait_for(n, visit.n_before);
    wait_for(k, visit.k_before);
    return Turn(n, k);
  }

 private:
  static void wait_for(const Count& count, int64_t least) {
    while (count.load(std::memory_order_acquire) < least) std::this_thread::yield();
  }

  std::vector<Count> n_, k_;
};

}  // namespace floyd
}  // namespace npugrad
#endif
