// The part of CANN's C interface that is simulated: types and numbers, written down from the public interface
// descriptions. tests/cann_sim/test_abi.py compiles them against the headers that torch_npu ships.
#pragma once

#include <cstddef>
#include <cstdint>

using aclError = int;
using aclrtStream = void*;
using aclrtEvent = void*;
using aclrtContext = void*;

namespace acl {

constexpr aclError kSuccess = 0;
constexpr aclError kInvalidParam = 100000;
constexpr aclError kRepeatInitialize = 100002;
constexpr aclError kRtParamInvalid = 107000;
constexpr aclError kRtInvalidDevice = 107001;
constexpr aclError kRtSysParamOptNotSet = 107021;
constexpr aclError kRtMemoryAllocation = 207001;

enum MemcpyKind { kHostToHost = 0, kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3, kDefault = 4 };
enum MemAttr { kDdr = 0, kHbm = 1 };
enum StreamStatus { kStreamComplete = 0, kStreamNotReady = 1 };
enum EventRecordedStatus { kRecordedNotReady = 0, kRecordedComplete = 1 };
enum EventWaitStatus { kWaitComplete = 0, kWaitNotReady = 1 };
enum SysParamOpt { kDeterministic = 0 };
constexpr uint32_t kEventTimeLine = 8;
constexpr uint64_t kStopOnFailure = 1;

enum PackageName { kPackageDriver = 7 };

struct PackageVersion {
  char version[128];
  char major[64];
  char minor[64];
  char release[64];
  char patch[64];
  char reserved[128];
};

}  // namespace acl
