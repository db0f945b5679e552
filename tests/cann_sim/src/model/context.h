// Devices, contexts and what each thread knows.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <string>

namespace cann_sim {

struct Stream;

// A context of a device. Guarded by model_mutex().
struct Context {
  int number = 0;
  int device = 0;
  bool alive = true;
  bool stop_on_failure = false;      // asked for by one stream, it holds for all of them
  int failure = 0;                   // sticky: a task failed and the context stops on failure
  std::string failure_text;          // what the task had to say
  std::atomic<int> determinism{-1};  // ACL_OPT_DETERMINISTIC of the context; -1: as the process has it
  int open_executors = 0;            // between phase 1 and phase 2
  void* handle = nullptr;
  void* default_stream = nullptr;
  std::set<std::shared_ptr<Stream>> streams;
};

// ACL_OPT_DETERMINISTIC as a context tells it: 0, or a level of determinism.
int determinism_of(const Context& context);

// Whether the kernels of a launch that is planned now are the deterministic ones. From 9.0 phase 1 reads the
// option of the process, and nothing else. Before, it is the context's when the process loaded its first
// kernel, whatever was set since.
bool plans_deterministic(const Context& context);
// A kernel is loaded.
void load_kernel(const Context& context);

// Sets the option of a context, or of the process (null). A violation under unfinished work: nobody outside
// CANN knows when that looks at the option.
void set_determinism(Context* context, int level, const char* user);

// What belongs to one thread.
struct Thread {
  std::shared_ptr<Context> context;  // null until aclrtSetDevice or aclrtSetCurrentContext
  std::string messages;              // not fetched yet, oldest first
  std::string fetched;               // what aclGetRecentErrMsg returned last: valid until its next call
  int last_error = 0;
  std::set<int> told;  // contexts whose failure this thread has been told
};

Thread& this_thread();

// The context of this thread; null, with 107002 reported, if it has none.
std::shared_ptr<Context> current_context(const char* user);

// Adds a message to the thread's queue, in the manner of CANN's own.
void add_message(const char* user, const std::string& text);

// Reports an error of the runtime: message and last error of the thread. Returns the code.
int report(const char* user, int code, const std::string& text);

// Binds the thread to the primary context of a device, made on first use.
int set_device(int device, const char* user);
int reset_device(int device, const char* user);
std::shared_ptr<Context> create_context(int device);
void destroy_context(void* handle);
std::shared_ptr<Context> find_context(const void* handle, const char* user);

}  // namespace cann_sim
