// What tests and benchmarks ask of the runtime alone: conversions, tasks, scratch memory, limits of the machine.
#include <cstring>
#include <algorithm>
#include <vector>

#include "runtime.h"

namespace npugrad {
namespace {

template <typename From, typename To>
void convert(const From* from, To* to, int64_t count) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(to + i, load(from + i));
  if (i < count) store_part(to + i, load_part(from + i, count - i), count - i);
}

constexpr int64_t kTriadTask = 1 << 18;

void triad(float* a, const float* b, const float* c, int64_t count, bool stream_it) {
  int64_t i = 0;
  const int64_t head = stream_it ? std::min(aligned_start(a), count) : 0;
  for (; i < head; ++i) a[i] = b[i] + 3 * c[i];
  for (; i + kWidth <= count; i += kWidth) {
    const Floats v = load(b + i) + 3.0f * load(c + i);
    stream_it ? stream(a + i, v) : store(a + i, v);
  }
  for (; i < count; ++i) a[i] = b[i] + 3 * c[i];
  if (stream_it) stream_fence();
}

// Enough sums side by side to hide the latency of an operation.
constexpr int kChains = 12;

float multiply_add(int64_t vectors) {
  Floats sums[kChains];
  Floats x = splat(0.999999f), y = splat(1e-6f);
  asm volatile("" : "+m"(x), "+m"(y));
  for (int k = 0; k < kChains; ++k) sums[k] = splat(static_cast<float>(k));
  for (int64_t i = 0; i < vectors; i += kChains)
#pragma GCC unroll 12
    for (int k = 0; k < kChains; ++k) sums[k] = sums[k] * x + y;
  float found = 0;
  for (int k = 0; k < kChains; ++k) found += sums[k][0];
  return found;
}

template <typename Body>
int32_t plain(npugrad_context* context, const npugrad_call* given, Body body) {
  // The kernel of a call is a plain function: this one finds its body on its thread.
  static thread_local Body* current;
  current = &body;
  static const npugrad_call none{};
  return guarded(context, given ? given : &none, [](Call& call) { (*current)(call); });
}

}  // namespace
}  // namespace npugrad

using namespace npugrad;

extern "C" {

int32_t npugrad_probe_convert(
    const void* source, int32_t source_dtype, void* target, int32_t target_dtype, int64_t count) {
  if (!is_float(source_dtype) || !is_float(target_dtype)) return NPUGRAD_UNSUPPORTED;
  with_float_type(source_dtype, [&](auto from) {
    with_float_type(target_dtype, [&](auto to) {
      convert(static_cast<const decltype(from)*>(source), static_cast<decltype(to)*>(target), count);
    });
  });
  return NPUGRAD_OK;
}

int32_t npugrad_probe_tasks(
    npugrad_context* context, const npugrad_call* call, int64_t tasks,
    void (*body)(void* user, int64_t task, int32_t slot), void* user) {
  return plain(context, call, [=](Call& one) {
    one.parallel(tasks, [=](int64_t task, int slot) { body(user, task, slot); });
  });
}

int32_t npugrad_probe_triad(
    npugrad_context* context, float* a, const float* b, const float* c, int64_t count, int32_t stream_it) {
  return plain(context, nullptr, [=](Call& call) {
    call.parallel(ceil_div(count, kTriadTask), [=](int64_t task, int) {
      const Span span(task, kTriadTask, count);
      triad(a + span.begin, b + span.begin, c + span.begin, span.size(), stream_it != 0);
    });
  });
}

double npugrad_probe_fma(npugrad_context* context, int64_t repeats) {
  constexpr int64_t kVectors = (1 << 20) / kChains * kChains;
  const int threads = npugrad_threads(context);
  std::vector<float> found(static_cast<size_t>(threads));
  plain(context, nullptr, [&](Call& call) {
    call.parallel(threads * repeats, [&](int64_t, int slot) { found[static_cast<size_t>(slot)] += multiply_add(kVectors); });
  });
  volatile float kept = found[0];
  (void)kept;
  return 2.0 * kWidth * static_cast<double>(kVectors) * static_cast<double>(threads * repeats);
}

int32_t npugrad_probe_scratch(npugrad_context* context, int64_t bytes, int32_t blocks) {
  return plain(context, nullptr, [=](Call& call) {
    std::vector<Buffer<unsigned char>> taken;
    for (int32_t i = 0; i < blocks; ++i) {
      taken.push_back(call.scratch<unsigned char>(bytes));
      require(reinterpret_cast<uintptr_t>(taken.back().get()) % 64 == 0);
      std::memset(taken.back().get(), i, static_cast<size_t>(bytes));
    }
    for (int32_t i = 0; i < blocks; ++i)
      for (int64_t k = 0; k < bytes; k += bytes > 4096 ? 4095 : 1)
        require(taken[static_cast<size_t>(i)][k] == static_cast<unsigned char>(i));
  });
}

}  // extern "C"
