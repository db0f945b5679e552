// Scratch memory that calls share: blocks are kept when given back, up to a bound.
//
// Fresh memory costs a page fault for each 4 KiB, about ten times a copy into memory that is there. Blocks begin on
// cache lines, at staggered offsets in their pages: rows of several blocks would otherwise compete for the same sets
// of the cache.
#ifndef NPUGRAD_SCRATCH_H
#define NPUGRAD_SCRATCH_H

#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <new>
#include <utility>

namespace npugrad {

class Scratch {
 public:
  explicit Scratch(int64_t keep_bytes) : keep_bytes_(keep_bytes) {}
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  struct Chunk {
    void* memory;
    size_t bytes;
  };
  // Memory of at least so many bytes, with what an earlier call left in it; throws std::bad_alloc.
  Chunk take(size_t bytes);
  void give(Chunk chunk) noexcept;
  int64_t kept_bytes();

 private:
  const int64_t keep_bytes_;
  std::mutex mutex_;
  std::list<Chunk> kept_;  // the one given back last first
  int64_t kept_bytes_ = 0;
  size_t stagger_ = 0;
};

// `count` elements of scratch memory, aligned to 64 bytes, for as long as this lives.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Scratch& scratch, int64_t count) : scratch_(&scratch) {
    size_t bytes;
    if (count < 0 || __builtin_mul_overflow(static_cast<size_t>(count), sizeof(T), &bytes)) throw std::bad_alloc();
    chunk_ = scratch.take(bytes);
  }
  ~Buffer() {
    if (scratch_) scratch_->give(chunk_);
  }
  Buffer(Buffer&& other) noexcept : scratch_(other.scratch_), chunk_(other.chunk_) { other.scratch_ = nullptr; }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(scratch_, other.scratch_);
    std::swap(chunk_, other.chunk_);
    return *this;
  }
  T* get() const { return static_cast<T*>(chunk_.memory); }
  T& operator[](int64_t i) const { return get()[i]; }

 private:
  Scratch* scratch_ = nullptr;
  Scratch::Chunk chunk_{nullptr, 0};
};

}  // namespace npugrad
#endif
