#include "fuse/process_inspector.h"

#include <sys/resource.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <deque>
#include <utility>

#include "base/file_descriptor.h"
#include "base/thread_annotations.h"
#include "base/worker.h"

namespace fpfs {

using std::chrono::steady_clock;

namespace {

// A look is late when the timer has run out so often in it. Once may be that this process was
// stopped for longer than the limit.
constexpr int kTicksOfLimit = 4;

}  // namespace

struct ProcessInspector::State {
  struct Question {
    Look look;
    Answer answer;
  };

  explicit State(std::chrono::milliseconds limit_given)
      : limit(limit_given), late(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {}

  void arm() REQUIRES(mutex);
  std::deque<Question> give_up() REQUIRES(mutex);

  const std::chrono::milliseconds limit;
  const FileDescriptor late;
  Mutex mutex;
  CondVar changed;  // there is something to look at, or the end of a look
  std::deque<Question> questions GUARDED_BY(mutex);
  Answer answer GUARDED_BY(mutex);  // to the look under way; null: it was given up
  bool looking GUARDED_BY(mutex) = false;
  bool given_up GUARDED_BY(mutex) = false;  // the look under way is
  bool armed GUARDED_BY(mutex) = false;
  bool stopped GUARDED_BY(mutex) = false;
  int ticks GUARDED_BY(mutex) = 0;  // of the look under way
};

// One timer for all looks, which begin and end within microseconds: it is not set anew for each.
void ProcessInspector::State::arm() {
  if (armed) return;
  armed = true;
  const int64_t tick_ns = std::chrono::nanoseconds(limit).count() / kTicksOfLimit;
  itimerspec soon{};
  soon.it_value.tv_sec = tick_ns / 1'000'000'000;
  soon.it_value.tv_nsec = tick_ns % 1'000'000'000;
  (void)timerfd_settime(late.get(), 0, &soon, nullptr);  // descriptor and time are right
}

// The look under way is late. What waits behind it would wait as long.
std::deque<ProcessInspector::State::Question> ProcessInspector::State::give_up() {
  given_up = true;
  std::deque<Question> late_ones = std::exchange(questions, {});
  late_ones.push_front({nullptr, std::exchange(answer, nullptr)});
  return late_ones;
}

ProcessInspector::ProcessInspector(const std::string& thread_name, int priority,
                                   std::chrono::milliseconds limit)
    : state_(std::make_shared<State>(limit)),
      thread_(start_thread(thread_name, [state = state_, priority] { run(*state, priority); })) {}

ProcessInspector::~ProcessInspector() { stop(); }

void ProcessInspector::ask(Look look, Answer answer) {
  {
    const MutexLock lock(state_->mutex);
    if (state_->stopped) return;
    if (!state_->given_up) {
      state_->questions.push_back({std::move(look), std::move(answer)});
      state_->changed.notify_all();
      return;
    }
  }
  answer(std::nullopt);
}

int ProcessInspector::late_fd() const { return state_->late.get(); }

bool ProcessInspector::give_up_late() {
  std::deque<State::Question> late;
  {
    const MutexLock lock(state_->mutex);
    uint64_t times = 0;
    if (::read(state_->late.get(), &times, sizeof times) < 0) return false;
    state_->armed = false;
    if (!state_->looking || state_->given_up) return false;
    if (++state_->ticks < kTicksOfLimit) {
      state_->arm();
      return false;
    }
    late = state_->give_up();
  }
  for (const State::Question& question : late) question.answer(std::nullopt);
  return true;
}

void ProcessInspector::stop() {
  if (!thread_.joinable()) return;
  bool ends = false;
  {
    const MutexLock lock(state_->mutex);
    state_->stopped = true;
    state_->questions.clear();
    state_->changed.notify_all();
    const auto until = steady_clock::now() + state_->limit;
    while (state_->looking && !state_->given_up && steady_clock::now() < until) {
      (void)state_->changed.wait_until(state_->mutex, until);
    }
    if (state_->looking) state_->answer = nullptr;
    ends = !state_->looking;
  }
  if (ends) {
    thread_.join();
  } else {
    thread_.detach();  // it touches nothing but its state any more
  }
}

void ProcessInspector::run(State& state, int priority) {
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), priority);
  MutexLock lock(state.mutex);
  for (;;) {
    while (state.questions.empty() && !state.stopped) state.changed.wait(state.mutex);
    if (state.stopped) return;
    const Look look = std::move(state.questions.front().look);
    state.answer = std::move(state.questions.front().answer);
    state.questions.pop_front();
    state.looking = true;
    state.ticks = 0;
    state.arm();
    lock.unlock();
    const std::optional<int> found = look();
    lock.lock();
    Answer answer = std::exchange(state.answer, nullptr);
    state.looking = false;
    state.given_up = false;
    state.changed.notify_all();
    lock.unlock();
    if (answer) answer(found);
    answer = nullptr;  // what it holds goes without the lock
    lock.lock();
  }
}

}  // namespace fpfs
