// aclnnFusedFloydAttentionGrad. Sizes N, M, K and D, for each batch and head:
//
//   S[n,m,k] = scale * query[n,m,:] . (key1[n,k,:] + key2[k,m,:])        -FLT_MAX where the mask says so
//   P        = exp(S - softmax_max) / softmax_sum
//   dS       = P * (dy[n,m,:] . (value1[n,k,:] + value2[k,m,:]) - dy[n,m,:] . attention_in[n,m,:])
//   dq[n,m]  = scale * sum over k of dS * (key1[n,k,:] + key2[k,m,:])
//   dk1[n,k] = scale * sum over m of dS * query[n,m,:]      dk2[k,m] = scale * sum over n of dS * query[n,m,:]
//   dv1[n,k] = sum over m of P * dy[n,m,:]                  dv2[k,m] = sum over n of P * dy[n,m,:]
//
// The limit is the multipliers: 20 N M K D operations on operands of N M D. P and dS exist for one tile of n, m and k
// at a time, 32 of each. A task is a range of n and one of k, with all of m; dk1 and dv1 are complete in it. dq is
// summed over the tasks of a range of n, dk2 and dv2 over those of a range of k, in float32 beside the outputs and in
// an order that shapes alone fix (`floyd_schedule.h`). Elements are computed in float32, whatever they come as.
//
// n and m mean the same to the formulas but for the names of operands: where N < M they are exchanged, so that there
// are enough ranges and no task is long.
#include <array>
#include <vector>

#include "floyd_schedule.h"
#include "floyd_task.h"
#include "floyd_tile.h"
#include "runtime.h"

namespace npugrad {
namespace {

using floyd::Carver;
using floyd::Grid;
using floyd::kBlock;
using floyd::kRange;
using floyd::Task;
using floyd::Tile;
using floyd::Visit;
using floyd::Work;

enum {
  kQuery, kKey1, kValue1, kKey2, kValue2, kDy, kMask, kMax, kSum, kAttention, kDq, kDk1, kDv1, kDk2, kDv2, kTensors
};

// Operands with n the longer one of n and m.
template <typename T>
Work<T> work_of(Call& call, int64_t heads, int64_t n, int64_t m, int64_t k, int64_t d) {
  Work<T> work{};
  const bool exchanged = n < m;
  work.exchanged = exchanged, work.heads = heads, work.k = k, work.d = d, work.chunks = ceil_div(d, kBlock);
  work.n = exchanged ? m : n, work.m = exchanged ? n : m;
  work.scale = static_cast<float>(call.real(0));
  const auto grid = [&](int index) { return Grid<T>(call.tensor(index), exchanged); };
  const int swap = exchanged ? kKey2 - kKey1 : 0;
  work.query = grid(kQuery), work.dy = grid(kDy), work.attention = grid(kAttention), work.dq = grid(kDq);
  work.key1 = grid(kKey1 + swap), work.value1 = grid(kValue1 + swap), work.key2 = grid(kKey2 - swap);
  work.value2 = grid(kValue2 - swap);
  work.dk1 = grid(kDk1 + swap), work.dv1 = grid(kDv1 + swap), work.dk2 = grid(kDk2 - swap);
  work.dv2 = grid(kDv2 - swap);
  work.max = Grid<float>(call.tensor(kMax), exchanged), work.sum = Grid<float>(call.tensor(kSum), exchanged);
  work.mask = Grid<uint8_t>(call.tensor(kMask), false);
  return work;
}

template <typename T>
class Floyd {
 public:
  Floyd(Call& call, int64_t pairs, const Work<T>& work)
      : call_(call), work_(work),
        schedule_(pairs, ceil_div(work.n, kRange), ceil_div(work.k, kBlock), call.threads()), progress_(schedule_) {}

  // All that may be refused, memory above all, comes before the first task: tasks wait for each other.
  void run() {
    Carver count(nullptr);
    lay_out(count);
    // In one block: the system has large pages for large ones.
    memory_ = call_.scratch<float>(count.used());
    tiles_.clear();
    Carver memory(memory_.get());
    lay_out(memory);
    call_.parallel(schedule_.tasks(), [&](int64_t, int slot) {
      const Visit visit = schedule_.visit(progress_.begin());
      const auto turn = progress_.take_turn(visit);
      Task<T>(work_, tiles_[static_cast<size_t>(slot)], visit).run();
    });
  }

 private:
  // Padded to whole blocks: what is added there is never read.
  void lay_out(Carver& memory) {
    const int64_t rows = product({schedule_.n_places(), kRange, work_.m});
    const int64_t blocks = product({schedule_.k_places(), work_.m, work_.chunks, kBlock * kBlock});
    work_.dq_sums = memory.take(product({rows, work_.chunks, kBlock}));
    work_.dk2_sums = memory.take(blocks);
    work_.dv2_sums = memory.take(blocks);
    work_.rows = memory.take(product({rows, 3}));
    for (int i = 0; i < call_.threads(); ++i) tiles_.emplace_back(memory, work_.chunks);
  }

  Call& call_;
  Work<T> work_;
  const floyd::Schedule schedule_;
  floyd::Progress progress_;
  Buffer<float> memory_;
  std::vector<Tile> tiles_;
};

// Checks what memory safety rests on.
void check(const Tensor& tensor, const std::array<int64_t, 5>& shape, int32_t dtype, bool output) {
  if (!tensor.given()) {
    require(output);
    return;
  }
  require(tensor.rank() == 5);
  for (int i = 0; i < 5; ++i) require(tensor.shape(i) == shape[static_cast<size_t>(i)]);
  require(!output || tensor.contiguous());
  if (tensor.dtype() != dtype) throw Unsupported();
}

}  // namespace

void fused_floyd_attention_grad(Call& call) {
  const Tensor query = call.tensor(kQuery), key1 = call.tensor(kKey1);
  require(query.given() && key1.given() && query.rank() == 5 && key1.rank() == 5);
  const int64_t b = key1.shape(0), h = key1.shape(1), n = key1.shape(2), m = query.shape(3), k = key1.shape(3),
                d = key1.shape(4);
  const int32_t dtype = query.dtype();
  if (!is_float(dtype)) throw Unsupported();
  for (int index : {kQuery, kDy, kAttention, kDq}) check(call.tensor(index), {b, h, n, m, d}, dtype, index == kDq);
  for (int index : {kKey1, kValue1, kDk1, kDv1}) check(call.tensor(index), {b, h, n, k, d}, dtype, index >= kDq);
  for (int index : {kKey2, kValue2, kDk2, kDv2}) check(call.tensor(index), {b, h, k, m, d}, dtype, index >= kDq);
  for (int index : {kMax, kSum}) check(call.tensor(index), {b, h, n, m, 8}, NPUGRAD_FLOAT32, false);
  const Tensor mask = call.tensor(kMask);
  if (mask.given()) check(mask, {b, 1, n, 1, k}, mask.dtype() == NPUGRAD_BOOL ? NPUGRAD_BOOL : NPUGRAD_UINT8, false);
  if (!product({b, h, n, m, k, d})) {
    for (int index = kDq; index < kTensors; ++index)
      if (call.tensor(index).given()) call.tensor(index).zero();
    return;
  }
  with_float_type(dtype, [&](auto type) {
    using T = decltype(type);
    Floyd<T>(call, b * h, work_of<T>(call, h, n, m, k, d)).run();
  });
}

}  // namespace npugrad
