// How functions of the interface begin: the plan has its say; then they need a context, or a stream of it.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include "../model/api.h"
#include "../model/context.h"
#include "../model/stream.h"
#include "acl_types.h"

namespace cann_sim {

// What an action returns; success, if that is nothing.
template <typename Act, typename... Arguments>
aclError result_of(Act act, Arguments&&... arguments) {
  if constexpr (std::is_void_v<std::invoke_result_t<Act, Arguments...>>) {
    act(std::forward<Arguments>(arguments)...);
    return acl::kSuccess;
  } else {
    return act(std::forward<Arguments>(arguments)...);
  }
}

template <typename Act>
aclError call(const char* user, Act act, int device = -1) {
  const int code = enter(user, device);
  return code ? code : result_of(act);
}

template <typename Act>
aclError with_context(const char* user, Act act, const char* alias = "") {
  if (const int code = enter(user, -1, alias)) return code;
  const auto context = current_context(user);
  return context ? result_of(act, *context) : this_thread().last_error;
}

// The same for what begins new work, which a context that failed does not take.
template <typename Act>
aclError with_working_context(const char* user, Act act, const char* alias = "") {
  const auto unless_failed = [&](Context& context) {
    const int code = check_failure(context, user, true);
    return code ? code : result_of(act, context);
  };
  return with_context(user, unless_failed, alias);
}

template <typename Act>
aclError with_stream(const char* user, aclrtStream handle, Act act) {
  int code = enter(user);
  if (code) return code;
  const auto stream = find_stream(handle, user, &code);
  return stream ? result_of(act, stream) : code;
}

}  // namespace cann_sim
