#include "scratch.h"

#include <sys/mman.h>

#include <cstdlib>

namespace npugrad {

namespace {

constexpr size_t kLine = 64, kPage = 4096, kHuge = size_t{1} << 21;
// Offsets in a page: 16 steps of 4 lines, and room for them in every block.
constexpr size_t kSteps = 16, kStep = 4 * kLine;

void release(Scratch::Chunk chunk) {
  std::free(reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(chunk.memory) & ~(kPage - 1)));
}

}  // namespace

Scratch::~Scratch() {
  for (auto& chunk : kept_) release(chunk);
}

Scratch::Chunk Scratch::take(size_t bytes) {
  // Whole pages: small blocks are all alike, and any of them does.
  size_t total;
  if (__builtin_add_overflow(bytes, 2 * kPage - 1, &total)) throw std::bad_alloc();
  total &= ~(kPage - 1);
  if (total == kPage) total += kPage;
  bytes = total - kPage;
  size_t offset;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto best = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it) {
      // Not one that is far too large, which a larger call would then have to do without.
      if (it->bytes >= bytes && it->bytes / 2 <= bytes && (best == kept_.end() || it->bytes < best->bytes)) best = it;
    }
    if (best != kept_.end()) {
      const Chunk found = *best;
      kept_.erase(best);
      kept_bytes_ -= static_cast<int64_t>(found.bytes);
      return found;
    }
    offset = stagger_++ % kSteps * kStep;
  }
  void* memory = nullptr;
  const size_t alignment = total >= 2 * kHuge ? kHuge : kPage;
  if (posix_memalign(&memory, alignment, total)) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (total >= 2 * kHuge) madvise(memory, total & ~(kHuge - 1), MADV_HUGEPAGE);
#endif
  return {static_cast<char*>(memory) + offset, total - kPage};
}

void Scratch::give(Chunk chunk) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    kept_.push_front(chunk);
  } catch (...) {
    release(chunk);
    return;
  }
  kept_bytes_ += static_cast<int64_t>(chunk.bytes);
  while (kept_bytes_ > keep_bytes_) {
    kept_bytes_ -= static_cast<int64_t>(kept_.back().bytes);
    release(kept_.back());
    kept_.pop_back();
  }
}

int64_t Scratch::kept_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return kept_bytes_;
}

}  // namespace npugrad
