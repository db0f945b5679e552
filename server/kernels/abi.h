// The C interface of the CPU kernels: what the loader binds with ctypes. Plain C, no Python, no OpenMP.
//
// One library holds one variant of all operators. Sizes and strides are 64-bit and count elements.
#ifndef NPUGRAD_ABI_H
#define NPUGRAD_ABI_H

#include <stdint.h>

#define NPUGRAD_ABI_VERSION 2
#define NPUGRAD_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// Element types, by the numbers of aclDataType.
enum {
  NPUGRAD_FLOAT32 = 0,
  NPUGRAD_FLOAT16 = 1,
  NPUGRAD_INT8 = 2,
  NPUGRAD_INT32 = 3,
  NPUGRAD_UINT8 = 4,
  NPUGRAD_INT16 = 6,
  NPUGRAD_UINT16 = 7,
  NPUGRAD_UINT32 = 8,
  NPUGRAD_INT64 = 9,
  NPUGRAD_UINT64 = 10,
  NPUGRAD_FLOAT64 = 11,
  NPUGRAD_BOOL = 12,
  NPUGRAD_BFLOAT16 = 27,
};

enum {
  NPUGRAD_OK = 0,
  NPUGRAD_CANCELLED = 1,    // `poll` said so; outputs hold anything
  NPUGRAD_UNSUPPORTED = 2,  // the kernel does not compute such a call; nothing was written
  NPUGRAD_INVALID = 3,      // sizes contradict each other; nothing was written
  NPUGRAD_NO_MEMORY = 4,    // no scratch memory; outputs hold anything
  NPUGRAD_INTERNAL = 5,     // a bug
};

typedef struct {
  void* data;              // of the first element, at a multiple of its size; null only when the tensor is empty
  int32_t dtype;           // number of aclDataType
  int32_t rank;
  const int64_t* shape;    // `rank` sizes, each 0 or more
  const int64_t* strides;  // `rank` steps in elements, each 0 or more
} npugrad_tensor;

typedef struct {
  // Tensors in the order of the operator's record, inputs and outputs; null: null or not wanted.
  // Outputs are contiguous, and every element of them is written.
  const npugrad_tensor* const* tensors;
  // Attributes in the order of the record, each kind for itself; a bool array is that many bools.
  const int64_t* integers;
  const double* reals;
  const uint8_t* bools;
  int32_t tensor_count, integer_count, real_count, bool_count;
  // Asked by the calling thread alone, between tasks, a hundred times a second at most; not 0: give up. May be null.
  int32_t (*poll)(void* user);
  void* user;
} npugrad_call;

// Threads and scratch memory. Calls from several threads at once share them; after a fork the child gets its own.
typedef struct npugrad_context npugrad_context;

typedef struct {
  const char* name;  // of the record
  int32_t (*run)(npugrad_context* context, const npugrad_call* call);
  uint64_t strided;  // bit i: tensor i of the record may have any strides; others come contiguous
} npugrad_operator;

NPUGRAD_API int32_t npugrad_abi_version(void);
NPUGRAD_API const char* npugrad_variant(void);   // "avx512", "avx2", "baseline" or "neon"
NPUGRAD_API const char* npugrad_compiler(void);  // what built it
NPUGRAD_API const npugrad_operator* npugrad_operators(int32_t* count);

// threads: how many may compute at once, callers included; at least 1. scratch_bytes: how much unused scratch memory
// is kept. float64_coordinates: 0 to take coordinates of float32 and narrower operands in float32, as PyTorch's and
// mmcv's kernels do; else in float64. Null when there is no memory.
NPUGRAD_API npugrad_context* npugrad_open(int32_t threads, int64_t scratch_bytes, int32_t float64_coordinates);
// No call may run or follow; joins all threads.
NPUGRAD_API void npugrad_close(npugrad_context* context);
NPUGRAD_API int32_t npugrad_threads(npugrad_context* context);
NPUGRAD_API int64_t npugrad_kept_bytes(npugrad_context* context);

// ---- probes, for tests and benchmarks

// Converts through float32 vectors: source and target dtype are float32, float16 or bfloat16.
NPUGRAD_API int32_t npugrad_probe_convert(
    const void* source, int32_t source_dtype, void* target, int32_t target_dtype, int64_t count);
// Runs `tasks` tasks that call `body(user, task, slot)`; the result is a status.
NPUGRAD_API int32_t npugrad_probe_tasks(
    npugrad_context* context, const npugrad_call* call, int64_t tasks,
    void (*body)(void* user, int64_t task, int32_t slot), void* user);
// a[i] = b[i] + 3 c[i] over float32, by all threads, with non-temporal stores if `stream`.
NPUGRAD_API int32_t npugrad_probe_triad(
    npugrad_context* context, float* a, const float* b, const float* c, int64_t count, int32_t stream);
// Independent multiply-adds on registers, by all threads: `repeats` times 2^20 vectors a thread; returns the flops.
NPUGRAD_API double npugrad_probe_fma(npugrad_context* context, int64_t repeats);
// Takes and gives back blocks of scratch memory; 0 when each was aligned and free of overlap.
NPUGRAD_API int32_t npugrad_probe_scratch(npugrad_context* context, int64_t bytes, int32_t blocks);

#ifdef __cplusplus
}
#endif
#endif
