// Helpers: processes that CANN forks when it opens a device, and that keep the device.
#pragma once

namespace cann_sim {

constexpr int kDeviceTaken = 507033;  // what aclrtSetDevice answers while another process has the device

// With helpers=1: takes a device for this process and for two helpers that it forks, one of them in a
// session of its own. Nobody else can take it while one of the three lives. False: somebody else has it.
bool take_with_helpers(int device);

}  // namespace cann_sim
