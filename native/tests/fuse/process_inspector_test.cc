// Looks that end in time, that are late, and that never end.
#include "fuse/process_inspector.h"

#include <doctest/doctest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>
#include <vector>

namespace fpfs::testing {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLimit{20};
constexpr milliseconds kNever{3'600'000};

// A look that lasts until it is let go, and tells that it has begun.
class Held {
 public:
  ProcessInspector::Look look(int found) {
    return [this, found] {
      begun_.set_value();
      released_.get_future().wait();
      return found;
    };
  }
  void wait_begun() { begun_.get_future().wait(); }
  void release() { released_.set_value(); }

 private:
  std::promise<void> begun_;
  std::promise<void> released_;
};

// What a question was answered with.
class Answered {
 public:
  ProcessInspector::Answer answer() {
    return [this](std::optional<int> found) { found_.set_value(found); };
  }
  std::optional<int> wait() { return found_.get_future().get(); }

 private:
  std::promise<std::optional<int>> found_;
};

void wait_late(ProcessInspector& inspector) {
  do {
    pollfd late{inspector.late_fd(), POLLIN, 0};
    REQUIRE(poll(&late, 1, -1) == 1);
  } while (!inspector.give_up_late());
}

}  // namespace

TEST_CASE("process_inspector: looks are made in their order, in one thread of its own") {
  ProcessInspector inspector("test-inspector", 0, kNever);
  std::vector<pid_t> threads;
  std::vector<int> found;
  for (int i = 0; i < 100; ++i) {
    inspector.ask(
        [&threads, i] {
          threads.push_back(gettid());
          return i;
        },
        [&found](std::optional<int> answer) { found.push_back(answer.value()); });
  }
  Answered last;
  inspector.ask([] { return 0; }, last.answer());
  CHECK(last.wait() == 0);
  REQUIRE(found.size() == 100);
  for (int i = 0; i < 100; ++i) CHECK(found[i] == i);
  for (const pid_t thread : threads) {
    CHECK(thread == threads[0]);
    CHECK(thread != gettid());
  }
  CHECK_FALSE(inspector.give_up_late());
}

TEST_CASE("process_inspector: a late look is answered with nothing, and so is what waits for it") {
  Held held;
  Answered late;
  Answered behind;
  Answered meanwhile;
  Answered after;
  ProcessInspector inspector("test-inspector", 0, kLimit);
  inspector.ask(held.look(1), late.answer());
  inspector.ask([] { return 2; }, behind.answer());
  wait_late(inspector);
  CHECK(late.wait() == std::nullopt);
  CHECK(behind.wait() == std::nullopt);
  inspector.ask([] { return 3; }, meanwhile.answer());
  CHECK(meanwhile.wait() == std::nullopt);
  held.release();
  // The inspector's thread takes a moment to see that the look has ended.
  std::optional<int> found;
  while (!found.has_value()) {
    Answered again;
    inspector.ask([] { return 4; }, again.answer());
    found = again.wait();
  }
  CHECK(found == 4);
  CHECK_FALSE(inspector.give_up_late());
}

TEST_CASE("process_inspector: the limit is that of each look, and a stop of all counts once") {
  ProcessInspector inspector("test-inspector", 0, kLimit);
  for (int turn = 0; turn < 3; ++turn) {
    Held held;
    Answered answered;
    inspector.ask(held.look(turn), answered.answer());
    held.wait_begun();
    for (int tick = 0; tick < 3; ++tick) {
      pollfd late{inspector.late_fd(), POLLIN, 0};
      REQUIRE(poll(&late, 1, -1) == 1);
      // However late it is looked at.
      if (turn == 0 && tick == 0) std::this_thread::sleep_for(2 * kLimit);
      REQUIRE_FALSE(inspector.give_up_late());
    }
    held.release();
    CHECK(answered.wait() == turn);
  }
}

TEST_CASE("process_inspector: it stops although a look never ends, and nothing is answered then") {
  const auto held = std::make_shared<Held>();  // the look outlives the inspector
  std::atomic<int> answers{0};
  {
    ProcessInspector inspector("test-inspector", 0, kLimit);
    inspector.ask([held, look = held->look(1)] { return look(); },
                  [&answers](std::optional<int>) { ++answers; });
    inspector.ask([] { return 2; }, [&answers](std::optional<int>) { ++answers; });
    held->wait_begun();
  }
  CHECK(answers == 0);
  const std::weak_ptr<Held> look = held;
  held->release();
  while (look.use_count() > 1) std::this_thread::yield();
  CHECK(answers == 0);
}

}  // namespace fpfs::testing
