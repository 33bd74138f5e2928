// Looks at other processes for threads that must not wait for them.
//
// What /proc tells of a process may wait for what that process holds (see fatal_signal.h). So looks
// are made in a thread of their own, one after the other, and one that takes longer than the limit
// is given up: it is answered with nothing, and so is what is asked until it ends.
//
// Threads: ask() from any. An answer is given in the inspector's thread; nothing in the thread that
//   calls give_up_late(), or in the one that asks while a look is late.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

namespace fpfs {

class ProcessInspector {
 public:
  using Look = std::function<std::optional<int>()>;
  using Answer = std::function<void(std::optional<int>)>;

  // The thread runs at a priority as setpriority(2) has it, if it may.
  ProcessInspector(const std::string& thread_name, int priority, std::chrono::milliseconds limit);
  ~ProcessInspector();
  ProcessInspector(const ProcessInspector&) = delete;
  ProcessInspector& operator=(const ProcessInspector&) = delete;

  void ask(Look look, Answer answer);
  // Readable when a look may be late: then somebody has to call give_up_late().
  int late_fd() const;
  bool give_up_late();  // whether one was
  // What has not been answered never is. A look that is late goes on by itself.
  void stop();

 private:
  struct State;
  static void run(State& state, int priority);

  const std::shared_ptr<State> state_;  // outlives this where a look does
  std::thread thread_;
};

}  // namespace fpfs
