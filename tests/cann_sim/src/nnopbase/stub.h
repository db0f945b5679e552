// Operators that no source here knows: stubs.py generates their two phases from the vendor's page.
//
// Phase 1 checks what the page's tables say. Phase 2 has a process of its own do the arithmetic, which
// CANN_SIM_ARITHMETIC names by its socket.
#pragma once

#include <initializer_list>

#include "launch.h"

namespace cann_sim {

// What a page's table says of a tensor; nothing where it is silent.
struct Table {
  bool optional;
  std::vector<int> dtypes[3];  // by product
  int64_t min_rank, max_rank;
};

// The deterministic option, as the page has it.
enum class Determinism { Always, Option, Never };

class Stub : public PhaseOne {
 public:
  Stub(const char* op, std::initializer_list<Product> products, Determinism determinism);

  void operand(const char* name, const aclTensor* handle, const Table& table);
  void result(const char* name, const aclTensor* handle, const Table& table);
  // A pointer that must not be null.
  void given(const char* name, const void* object);
  // Which results are wanted; without one all are.
  void masks(const std::vector<bool>* mask);

  int finish(uint64_t* workspace_size, aclOpExecutor** executor);

 private:
  struct Checked {
    const char* name;
    const Tensor* tensor;
    Table table;
    bool is_result;
  };

  bool is_wanted(const char* result) const;
  bool check() const;
  void check_pointers() const;

  const char* op_;
  std::vector<Product> products_;
  Determinism determinism_;
  std::vector<Checked> tensors_;
  std::vector<std::pair<const char*, const void*>> given_;
  bool has_mask_ = false;
  const std::vector<bool>* mask_ = nullptr;
};

}  // namespace cann_sim
