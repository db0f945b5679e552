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
  int64_t n_place, k_place;    // among the ranges whose sums are in memory
  int64_t n_before, k_before;  // tasks that come before it there
  bool n_first, n_last, k_first, k_last;
};

// The order of tasks. Shapes alone fix in which order the ranges of k meet a range of n, and those of n a range of k:
// whatever keeps to both gives the same bits. Here every thread stays with a range of k, so that its operands and sums
// stay in the cache, and is one range of n behind the thread before it.
//
// With few ranges of n, that delay counts. Then ranges of k go in pairs that begin together: the first with the first
// half of the ranges of n, the second with the second half.
class Schedule {
 public:
  Schedule(int64_t pairs, int64_t n_ranges, int64_t k_ranges, int threads)
      : pairs_(pairs), n_ranges_(n_ranges), k_ranges_(k_ranges), paired_(n_ranges > 1 && n_ranges <= kFew),
        width_(std::min<int64_t>(paired_ ? ceil_div(threads, 2) * 2 : threads, k_ranges)),
        together_(std::min(pairs, ceil_div(2 * static_cast<int64_t>(threads) - 1, std::min(n_ranges, k_ranges)))) {
    order_.reserve(static_cast<size_t>(product({n_ranges, k_ranges})));
    for (int64_t k = 0; k < k_ranges; k += width_) {
      const int64_t end = std::min(k + width_, k_ranges);
      for (int64_t step = 0; step < n_ranges + delay(end - k); ++step)
        for (int64_t j = k; j < end; ++j) {
          const int64_t turn = step - delay(j - k);
          if (turn >= 0 && turn < n_ranges) order_.push_back(meeting(j, turn));
        }
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
    const Meeting& meeting = order_[static_cast<size_t>(rest / abreast)];
    const int64_t column = round * k_ranges_ + meeting.k, columns = width_ + 1;
    Visit found{};
    found.pair = first + slot, found.n_range = meeting.n, found.k_range = meeting.k;
    found.n_place = slot * n_ranges_ + meeting.n, found.k_place = slot * columns + column % columns;
    found.n_before = round * k_ranges_ + meeting.n_turn, found.k_before = column / columns * n_ranges_ + meeting.k_turn;
    found.n_first = meeting.n_turn == 0, found.n_last = meeting.n_turn == k_ranges_ - 1;
    found.k_first = meeting.k_turn == 0, found.k_last = meeting.k_turn == n_ranges_ - 1;
    return found;
  }

 private:
  static constexpr int64_t kFew = 4;
  // Ranges of n and k, and how many each of them has met before.
  struct Meeting {
    int64_t n, k, n_turn, k_turn;
  };

  Meeting meeting(int64_t k, int64_t turn) const {
    if (!paired_ || (k ^ 1) >= k_ranges_) return {turn, k, k, turn};
    const int64_t half = n_ranges_ / 2, n = k % 2 ? (turn + half) % n_ranges_ : turn;
    return {n, k, n < half ? k : k ^ 1, turn};
  }
  // Steps by which a range of k of those side by side begins after the first one.
  int64_t delay(int64_t index) const { return paired_ ? index / 2 * (n_ranges_ - n_ranges_ / 2 + 1) : index; }

  const int64_t pairs_, n_ranges_, k_ranges_;
  const bool paired_;
  const int64_t width_, together_;
  std::vector<Meeting> order_;  // of one batch and head
};

// How many tasks the places have seen. A task waits for those before it in the order, and for no others.
//
// That always ends: threads take tasks from here in their order, so whatever is waited for has been begun, and the
// first of those that run waits for nothing. A call that is given up begins no more tasks; those begun end as ever.
class Progress {
  using Count = std::atomic<int64_t>;

 public:
  explicit Progress(const Schedule& schedule)
      : n_(static_cast<size_t>(schedule.n_places())), k_(static_cast<size_t>(schedule.k_places())) {}

  // The next task. The pool's own numbers would do as long as it gives them out in turn; here that need not be trusted.
  int64_t begin() { return begun_.fetch_add(1, std::memory_order_relaxed); }

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

  Count begun_{0};
  std::vector<Count> n_, k_;
};

}  // namespace floyd
}  // namespace npugrad
#endif
