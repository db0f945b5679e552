#include "stub.h"

#include <algorithm>

#include "../model/violation.h"
#include "arithmetic.h"

namespace cann_sim {
namespace {

void require(bool holds, const char* name, const char* text, int code = aclnn::kInvalid) {
  if (!holds) throw Refusal{code, std::string(name) + text};
}

}  // namespace

Stub::Stub(const char* op, std::initializer_list<Product> products, Determinism determinism)
    : PhaseOne(op), op_(op), products_(products), determinism_(determinism) {
  if (determinism == Determinism::Option) can_be_deterministic();
}

void Stub::operand(const char* name, const aclTensor* handle, const Table& table) {
  tensors_.push_back({name, input(name, handle), table, false});
}

void Stub::result(const char* name, const aclTensor* handle, const Table& table) {
  tensors_.push_back({name, output(name, handle), table, true});
}

void Stub::given(const char* name, const void* object) { given_.emplace_back(name, object); }

void Stub::masks(const std::vector<bool>* mask) {
  has_mask_ = true;
  mask_ = mask;
}

bool Stub::is_wanted(const char* result) const {
  for (const Argument& argument : arguments()) {
    if (argument.name == result) return !argument.is_unwritten;
  }
  return false;
}

void Stub::check_pointers() const {
  for (const auto& [name, object] : given_) require(object, name, " is null", aclnn::kNullptr);
  for (const Checked& each : tensors_) {
    const bool may_lack = each.table.optional || (each.is_result && !is_wanted(each.name));
    require(each.tensor || may_lack, each.name, " is null", aclnn::kNullptr);
  }
}

bool Stub::check() const {
  check_pointers();
  const auto supports = std::find(products_.begin(), products_.end(), product());
  require(supports != products_.end(), op_, " has no kernel for this product", aclnn::kFindKernel);
  std::vector<const Checked*> given;
  for (const Checked& each : tensors_) {
    if (each.tensor && (!each.is_result || is_wanted(each.name))) given.push_back(&each);
  }
  for (const Checked* each : given) {
    const auto& dtypes = each->table.dtypes[static_cast<size_t>(product())];
    const auto found = std::find(dtypes.begin(), dtypes.end(), each->tensor->dtype);
    require(dtypes.empty() || found != dtypes.end(), each->name, ": the dtype is not in the page's table");
  }
  for (const Checked* each : given) {
    const int64_t rank = each->tensor->rank();
    require(each->table.min_rank <= rank && rank <= each->table.max_rank, each->name,
            ": the rank is not in the page's table");
  }
  return std::all_of(given.begin(), given.end(),
                     [](const Checked* each) { return !each->is_result || each->tensor->is_empty(); });
}

int Stub::finish(uint64_t* workspace_size, aclOpExecutor** executor) {
  given("workspaceSize", workspace_size);
  given("executor", executor);
  std::vector<const char*> results;
  for (const Checked& each : tensors_) {
    if (each.is_result) results.push_back(each.name);
  }
  if (has_mask_) wants(mask_, results);
  uint64_t scratch = 0;  // results as FLOAT
  ArithmeticCall call{op_, json_of(arguments()), determinism_ == Determinism::Always, {}, {}};
  for (const Checked& each : tensors_) {
    if (!each.tensor) continue;
    if (!each.is_result) call.operands.push_back(each.name);
    if (!each.is_result || !is_wanted(each.name)) continue;
    call.results.push_back(each.name);
    scratch += 4 * static_cast<uint64_t>(each.tensor->elements());
  }
  return PhaseOne::finish([this] { return check(); }, kSystemWorkspace + scratch,
                          [call](KernelRun& run) { compute_elsewhere(run, call); }, workspace_size, executor);
}

}  // namespace cann_sim
