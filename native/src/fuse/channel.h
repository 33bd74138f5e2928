// The FUSE channel: /dev/fuse on one side, pyfuse3's socket on the other, file contents in between.
//
//   kernel ── /dev/fuse ──► channel threads ── WRITE, READ, FALLOCATE, LSEEK, ... answered here
//                                │
//                                └── everything else ──► seqpacket socket ──► pyfuse3
//                                 ◄── its replies ◄──
//
// A channel thread receives with readv: 80 bytes of headers, then the payload where the running
// stream's next bytes belong (leased part of the open slot, then a spare slot), then a landing
// buffer. When the guess was right, the kernel's copy was the only one.
//
// The replies of pyfuse3 are passed on by the channel threads, too: whoever got one asks again at
// once, and then one thread is awake that takes both ways. When all of them wait for landing
// buffers, the relay thread does it.
//
// Ownership: the channel owns both descriptors. Requests that wait own a landing buffer each; when
//   those run out the threads stop receiving, so memory is bounded.
// Threads: `threads` channel threads, one relay thread, two notifiers, one inspector of other
//   processes. complete_write from any. None but the last reads another process's /proc.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/cpu_latency.h"
#include "base/duration_histogram.h"
#include "base/file_descriptor.h"
#include "base/thread_annotations.h"
#include "base/worker.h"
#include "engine/engine.h"
#include "file/read_ahead.h"
#include "fuse/fuse_request.h"
#include "fuse/known_directories.h"
#include "fuse/process_inspector.h"

namespace fpfs {

// Page-aligned buffers of one largest payload each.
class LandingPool {
 public:
  explicit LandingPool(size_t limit) : limit_(limit) {}
  ~LandingPool();
  // Waits, after calling `before_wait`; null after stop().
  char* take(const std::function<void()>& before_wait) EXCLUDES(mutex_);
  void give(char* buffer) EXCLUDES(mutex_);
  void stop() EXCLUDES(mutex_);

 private:
  const size_t limit_;
  Mutex mutex_;
  CondVar given_;
  std::vector<char*> free_ GUARDED_BY(mutex_);
  size_t made_ GUARDED_BY(mutex_) = 0;
  bool stopped_ GUARDED_BY(mutex_) = false;
};

struct ChannelStatistics {
  std::atomic<uint64_t> received{0};  // requests that are answered, whoever does it
  std::atomic<uint64_t> writes{0};
  std::atomic<uint64_t> write_bytes{0};
  std::atomic<uint64_t> writes_in_place{0};  // received where they belong
  std::atomic<uint64_t> writes_parked{0};    // had to wait for staging or space
  std::atomic<uint64_t> reads{0};
  std::atomic<uint64_t> read_bytes{0};
  std::atomic<uint64_t> reads_ahead{0};  // answered with what was read ahead
  std::atomic<uint64_t> relayed{0};      // requests that went to pyfuse3
  std::atomic<uint64_t> parked_now{0};
  DurationHistogram write_to_ack;  // from a WRITE's receipt to its answer, waits included
};

// A connection that is to be served: a new one, or one that another process served, which was
// ended, or ended by a fault of its own.
enum class Connection { New, Left, LeftByFault };

class Channel final : public KernelSide {
 public:
  Channel(Engine& engine, int fuse_fd, std::shared_ptr<KnownDirectories> directories);
  ~Channel() override;

  // Makes the channel of an engine, which owns it from then on, and starts it; the descriptor that
  // pyfuse3 is to read. `directories`: what the channel may say of them by itself. A connection
  // that another process served is known to the arena.
  static Result<int> serve(Engine& engine, int fuse_fd,
                           std::shared_ptr<KnownDirectories> directories, Connection connection);
  // An engine's channel; null where it has none.
  static Channel* of(Engine& engine) { return static_cast<Channel*>(engine.kernel_side()); }

  // A connection that another process served.
  struct Resumed {
    fuse_init_in init{};
    bool after_fault = false;          // that process died of what it did
    std::vector<uint64_t> unanswered;  // uniques of what it had taken, and not answered
    std::vector<uint64_t> condemned;   // uniques of requests that are not to be tried again
  };
  // Starts the threads; the descriptor that pyfuse3 is to read. Of a connection that is resumed
  // pyfuse3 gets the INIT again, and the kernel is asked for what nobody has answered.
  Result<int> start(uint32_t threads, std::optional<Resumed> resumed);
  void stop() override;
  void complete_write(uint64_t ticket, int error) override EXCLUDES(sync_mutex_);
  void invalidate(uint64_t ino, int64_t offset, int64_t length,
                  std::function<void()> then) override;
  void invalidate_attributes(uint64_t ino) override EXCLUDES(reply_mutex_);
  void find_out(uint64_t ino, std::function<void(bool known)> then) override;
  void invalidate_name(uint64_t directory, std::string name) override;
  void after_names(std::function<void()> then) override;
  const ChannelStatistics& statistics() const { return statistics_; }
  // Whether the engine has been told of every RELEASE that the kernel was asked for before now, or
  // so many requests have come that they must be among these.
  bool has_received(uint64_t requests) EXCLUDES(relay_mutex_);

 private:
  struct Stream {  // a sequence of writes that continue each other
    std::shared_ptr<File> file;
    uint64_t next_offset = 0;
    size_t successor = 0;  // the stream whose write came after this one's last
    uint64_t used = 0;
  };
  struct Receiver {  // a channel thread's state
    size_t thread = 0;
    FileDescriptor ready;  // an epoll of its own: a request wakes one thread, not all
    char* landing = nullptr;
    Slot* spare = nullptr;
    Lease lease;
    Payload payload;
    const File* predicted_file = nullptr;  // only compared; null: no prediction
    uint64_t predicted_offset = 0;
    Stream streams[8];
    size_t last_stream = 0;
    uint64_t clock = 0;
    int64_t received_ns = 0;  // when a write came
    bool expecting = false;   // a request or an answer is likely to come soon
    alignas(8) char head[wire::kWriteHeaderBytes];
  };
  struct Waiting;
  struct ParkedWrite;
  struct Done {  // a request that succeeded, and how much it wrote where the kernel asks
    uint64_t unique = 0;
    std::optional<uint32_t> bytes;
    int64_t received_ns = 0;  // of a write
  };
  struct FuseRead;

  void receive_loop(int thread);
  bool receive(Receiver& r, size_t* received);
  bool wait_readable(Receiver& r);
  void predict(Receiver& r);
  void note_write(Receiver& r, const std::shared_ptr<File>& file, uint64_t next_offset);
  void forget_stream(Receiver& r, uint64_t ino);
  void end_lease(Receiver& r);
  void give_spare(Receiver& r);
  void handle(Receiver& r, size_t received);
  void dispatch(Receiver& r, size_t received);
  bool receive_resent(Receiver& r) EXCLUDES(relay_mutex_);
  void end_given_up();
  void wait_answered(uint64_t unique, std::chrono::steady_clock::time_point until);
  bool refuse_condemned(const FuseRequest& request);
  void trace_request(const FuseRequest& request);

  void handle_write(Receiver& r, const FuseRequest& request);
  static void gather(Receiver& r, size_t bytes);
  void park_write(Receiver& r, std::unique_ptr<ParkedWrite> write);
  Retry attempt(ParkedWrite& write);
  void finish_write(const ParkedWrite& write, const Outcome& outcome);
  void drop_pages(const std::shared_ptr<File>& file, uint64_t overwrite, uint64_t offset,
                  size_t length, std::function<void()> then);
  void finish(const Done& done, uint64_t ino, bool sync) EXCLUDES(sync_mutex_);
  uint64_t keep_unanswered(const Done& done) EXCLUDES(sync_mutex_);
  void note_writer(Handle& handle, uint64_t owner);
  void end_flush(const FuseRequest& request, Handle& handle, int signal, bool wrote);
  void answer_flush(const FuseRequest& request, Handle& handle);
  bool waits_for_changes(const Handle& handle) const;
  void keep_waiting(const std::shared_ptr<Waiting>& waiting) EXCLUDES(parked_mutex_);
  void end_waiting(uint64_t unique) EXCLUDES(parked_mutex_);
  void handle_read(const FuseRequest& request);
  std::shared_ptr<ReadAhead> read_ahead_of(Handle& handle);
  void reply_read(uint64_t unique, const std::vector<ReadAhead::Part>& parts);
  void read_or_park(uint64_t unique, const std::shared_ptr<File>& file, const fuse_read_in& in);
  bool start_read(uint64_t unique, const std::shared_ptr<File>& file, const fuse_read_in& in);
  void handle_flush(const FuseRequest& request);
  void note_end(Handle& handle, int signal);
  void handle_release(Receiver& r, const FuseRequest& request);
  void handle_lseek(const FuseRequest& request);
  void handle_fallocate(const FuseRequest& request);
  bool may_have_room(File& file, uint64_t length) const;
  void allocate_until_done(const std::shared_ptr<Waiting>& waiting,
                           const std::shared_ptr<File>& file, const fuse_fallocate_in& in,
                           bool sync);
  void fail_zeroing(uint64_t unique, const std::shared_ptr<File>& file, const fuse_fallocate_in& in,
                    int error);
  void handle_copy(const FuseRequest& request);
  void copy_range(const std::shared_ptr<Waiting>& waiting, const std::shared_ptr<File>& from,
                  const std::shared_ptr<File>& to, const fuse_copy_file_range_in& in, bool sync);
  void note_truncation(const FuseRequest& request);
  void handle_lookup(const FuseRequest& request);
  void handle_getattr(const FuseRequest& request);
  int look_at_waiting() EXCLUDES(parked_mutex_);

  void relay(const FuseRequest& request);
  void let_releases_pass(uint64_t before = UINT64_MAX) const;
  void relay_forgets(const FuseRequest& request);
  void send(const iovec* parts, size_t count) EXCLUDES(relay_mutex_);
  void relay_loop();
  bool resume();
  bool wait_resumed(bool first) EXCLUDES(relay_mutex_);
  bool is_resuming() EXCLUDES(relay_mutex_);
  void wake_relay();
  bool relay_replies() EXCLUDES(reply_mutex_);
  void flush_backlog() EXCLUDES(relay_mutex_);
  void patch_open_reply(char* message, size_t bytes, size_t open_offset);

  int notify_inode(uint64_t ino, int64_t offset, int64_t length);
  int notify(int code, std::vector<iovec> body);

  void reply(uint64_t unique, int error, const void* body = nullptr, size_t body_bytes = 0);
  void reply_parts(uint64_t unique, int error, std::vector<iovec> body);
  void send_reply(uint64_t unique, int error, iovec* parts, size_t count);
  void reply_done(const Done& done);
  void connection_lost(int error);

  Engine& engine_;
  const int fuse_fd_;
  const std::shared_ptr<KnownDirectories> directories_;
  bool after_fault_ = false;  // written, as the next, before the threads start
  std::vector<uint64_t> condemned_;
  std::unordered_set<uint64_t> expected_;  // of the first thread: what is to be sent again
  int socket_ = -1;
  int stop_fd_ = -1;   // readable from stop() on
  int relay_fd_ = -1;  // wakes the relay thread
  std::atomic<bool> stopping_{false};
  std::atomic<bool> lost_{false};
  LandingPool landing_pool_;
  CpuLatency latency_;
  const bool kernel_tells_who_lives_;
  ProcessInspector inspector_;
  std::atomic<size_t> receivers_waiting_{0};  // channel threads without a landing buffer
  ChannelStatistics statistics_;
  struct Receiving {
    // Odd while the thread may hold a RELEASE that the engine has not been told of.
    std::atomic<uint64_t> turn{0};
    std::atomic<uint64_t> release{0};  // its unique; 0 until it is known
  };
  std::vector<Receiving> receiving_;  // by channel thread
  std::vector<std::thread> threads_;

  // Relayed requests whose reply is looked at: unique -> opcode.
  Mutex relay_mutex_;
  std::unordered_map<uint64_t, uint32_t> watched_ GUARDED_BY(relay_mutex_);
  fuse_init_in kernel_init_ GUARDED_BY(relay_mutex_){};
  bool resuming_ GUARDED_BY(relay_mutex_) = false;      // until pyfuse3 has answered INIT
  bool one_receives_ GUARDED_BY(relay_mutex_) = false;  // the first thread alone: what comes again
  CondVar resumed_ GUARDED_BY(relay_mutex_);
  std::deque<std::string> backlog_ GUARDED_BY(relay_mutex_);

  // Held from a reply's receipt until the kernel has it.
  Mutex reply_mutex_;
  std::vector<char> reply_ GUARDED_BY(reply_mutex_);

  Mutex sync_mutex_;
  // By ticket: changes that are to be durable first, and requests that are to be in the log.
  std::unordered_map<uint64_t, Done> unanswered_ GUARDED_BY(sync_mutex_);

  Mutex parked_mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Waiting>> parked_
      GUARDED_BY(parked_mutex_);                     // by unique
  bool looks_ GUARDED_BY(parked_mutex_) = false;     // the relay thread will look at who waits
  std::chrono::steady_clock::time_point next_look_;  // of the relay thread

  Worker notifier_;       // tells the kernel of changes of contents
  Worker name_notifier_;  // of names: it waits for who works in a directory, nobody waits for it
};

}  // namespace fpfs
