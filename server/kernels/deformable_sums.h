// Sums of what samples give to the keys of a band: in float32 for some samples, then in float64.
#ifndef NPUGRAD_DEFORMABLE_SUMS_H
#define NPUGRAD_DEFORMABLE_SUMS_H

#include <algorithm>
#include <cstring>
#include <vector>

#include "deformable_band.h"

namespace npugrad {

// A sum in float32 is moved on before it has so many terms that it loses digits: those of all keys after some samples
// for each of them, and those around one key as soon as a crowd of samples is seen there.
class KeySums {
 public:
  // A row for each key, of the band's first and then of those that only its samples reach.
  struct Rows {
    float* grad;
    int64_t keys, columns, pitch;
  };

  // Begins with what the rows hold; `carried`: they are not all 0.
  void begin(Call& call, const Rows& rows, int64_t most_keys, int64_t samples, bool carried) {
    rows_ = rows, pending_ = 0, turn_ = 0, begun_ = false;
    crowded_.clear();
    watched_ = samples > kCrowd;
    if (!watched_) return;
    if (!hits_.get()) hits_ = call.scratch<uint8_t>(most_keys);
    forget();
    doubles(call, most_keys * rows.columns);
    // A sum that is there already is large beside each sample to come.
    if (carried) move_all();
  }
  // Samples that are about to be added.
  void count(const Entry* entries, int count) {
    if (!watched_) return;
    for (int i = 0; i < count; i += kStep) {
      const int64_t key = entries[std::min(i + chosen(), count - 1)].key;
      if (++hits_[key] == kCrowd / kStep) crowded_.push_back(key);
    }
  }
  // So many were added.
  void move_on(int count) {
    pending_ += count;
    if (!watched_) return;
    if (pending_ >= kSamplesOf * rows_.keys) {
      move_all();
      forget();
      pending_ = 0;
    } else {
      for (const int64_t key : crowded_) move_around(key);
    }
    crowded_.clear();
  }
  // Leaves the sums in the rows, rounded.
  void end() {
    if (!begun_) return;
    move_all();
    const double* const sums = sums_.get();
    float* const grad = rows_.grad;
    for (int64_t i = 0, count = rows_.keys * rows_.columns; i < count; ++i) grad[i] = static_cast<float>(sums[i]);
  }
  // Scratch memory for so many sums.
  double* doubles(Call& call, int64_t count) {
    if (!sums_.get()) sums_ = call.scratch<double>(count);
    return sums_.get();
  }

 private:
  static constexpr int64_t kSamplesOf = 16;  // samples for each key until all sums are moved
  static constexpr int64_t kCrowd = 64;      // samples of one key until its sum is moved
  static constexpr int kStep = 8;            // one of so many samples is counted

  // Which of them, so that no order of samples keeps to it.
  int chosen() { return static_cast<int>(++turn_ * 2654435769u >> 29); }
  void forget() { std::memset(hits_.get(), 0, static_cast<size_t>(rows_.keys)); }
  void move_all() { move(0, rows_.keys); }
  void move_around(int64_t key) {
    hits_[key] = 0;
    for (const int64_t first : {key, key + rows_.pitch}) move(first, std::min(first + 2, rows_.keys));
  }
  void move(int64_t first, int64_t last) {
    if (first >= last) return;
    double* const sums = sums_.get();
    if (!begun_) std::fill_n(sums, rows_.keys * rows_.columns, 0.0), begun_ = true;
    float* const grad = rows_.grad + first * rows_.columns;
    const int64_t count = (last - first) * rows_.columns;
    double* const to = sums + first * rows_.columns;
    for (int64_t i = 0; i < count; ++i) to[i] += double{grad[i]};
    std::memset(grad, 0, static_cast<size_t>(count) * sizeof(float));
  }

  Rows rows_{};
  Buffer<uint8_t> hits_;
  Buffer<double> sums_;
  std::vector<int64_t> crowded_;
  int64_t pending_ = 0;
  uint32_t turn_ = 0;
  bool watched_ = false, begun_ = false;
};

}  // namespace npugrad
#endif
