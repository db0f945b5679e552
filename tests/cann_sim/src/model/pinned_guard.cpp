#include "pinned_guard.h"

#include <sys/mman.h>

#include <vector>

#include "faults.h"
#include "single.h"

namespace cann_sim {
namespace {

constexpr uintptr_t kPage = 4096;

struct Guard {
  int stream;
  uint64_t sequence;
  Access access;
};

// Guards on one page.
struct Page {
  int reads = 0;
  int writes = 0;
};

struct Board {
  std::vector<Guard> guards;
  std::map<uintptr_t, Page> pages;
};

Board& board() { return single<Board>(); }

int protection_of(const Page& page) {
  if (page.writes) return PROT_NONE;
  return page.reads ? PROT_READ : PROT_READ | PROT_WRITE;
}

void protect(uintptr_t begin, uintptr_t end, int protection) {
  if (begin < end) mprotect(reinterpret_cast<void*>(begin), end - begin, protection);
}

void change(const Access& access, int amount) {
  const uintptr_t first = access.begin / kPage * kPage, end = access.begin + access.bytes;
  uintptr_t run = first;  // pages that get the same protection, in one call
  int protection = -1;
  for (uintptr_t begin = first; begin < end; begin += kPage) {
    Page& page = board().pages[begin];
    (access.write ? page.writes : page.reads) += amount;
    const int wanted = protection_of(page);
    if (!page.reads && !page.writes) board().pages.erase(begin);
    if (wanted == protection) continue;
    if (protection >= 0) protect(run, begin, protection);
    run = begin;
    protection = wanted;
  }
  if (protection >= 0) protect(run, (end + kPage - 1) / kPage * kPage, protection);
}

template <typename Ends>
void remove(Ends ends) {
  std::vector<Guard> kept;
  for (Guard& guard : board().guards) {
    if (ends(guard)) {
      change(guard.access, -1);
    } else {
      kept.push_back(std::move(guard));
    }
  }
  board().guards = std::move(kept);
}

}  // namespace

void guard(int stream, uint64_t sequence, const Access& access) {
  if (access.allocation->space != Space::Pinned || !settings()->strict_pinned) return;
  board().guards.push_back({stream, sequence, access});
  change(access, 1);
}

void release_guards(const Clock& finished) {
  remove([&](const Guard& guard) {
    const auto known = finished.find(guard.stream);
    return known != finished.end() && guard.sequence <= known->second;
  });
}

void forget_guards(const Allocation& allocation) {
  remove([&](const Guard& guard) { return guard.access.allocation.get() == &allocation; });
}

}  // namespace cann_sim
