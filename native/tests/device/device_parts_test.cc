// Parts of a device that need no device: results of transfers, queues, the worker.
#include <doctest/doctest.h>

#include <cerrno>
#include <thread>
#include <vector>

#include "base/worker.h"
#include "device/device_backend.h"
#include "device/device_transfer.h"
#include "support/device_fixture.h"

namespace fpfs {
namespace {

using testing::AlignedBuffer;
using testing::WaitedRequest;

constexpr uint64_t kBlock = kIoAlignment;

WaitedRequest* with(WaitedRequest* request, IoOp op, AlignedBuffer* buffer) {
  request->op = op;
  request->length = buffer->size();
  request->buffer = buffer->data();
  return request;
}

TEST_CASE("transfer: a short write goes on at the block that is not whole") {
  AlignedBuffer buffer(4 * kBlock);
  WaitedRequest storage;
  WaitedRequest* request = with(&storage, IoOp::Write, &buffer);
  CHECK(transfer_advance(request, 2 * kBlock + 100).step == TransferStep::Again);
  CHECK(transfer_start(*request) == 2 * kBlock);
  CHECK(transfer_advance(request, -EINTR).step == TransferStep::Again);
  CHECK(transfer_start(*request) == 2 * kBlock);
  const TransferAdvance last = transfer_advance(request, 2 * kBlock);
  CHECK(last.step == TransferStep::Finished);
  CHECK(last.result == 0);
}

TEST_CASE("transfer: a write that makes no progress is an error, not a loop") {
  AlignedBuffer buffer(4 * kBlock);
  WaitedRequest storage;
  WaitedRequest* request = with(&storage, IoOp::Write, &buffer);
  CHECK(transfer_advance(request, 100).step == TransferStep::Again);
  CHECK(transfer_advance(request, 100).result == -EIO);
}

TEST_CASE("transfer: errors end a transfer, even a half done one") {
  AlignedBuffer buffer(4 * kBlock);
  WaitedRequest storage;
  WaitedRequest* request = with(&storage, IoOp::Write, &buffer);
  CHECK(transfer_advance(request, kBlock).step == TransferStep::Again);
  const TransferAdvance full = transfer_advance(request, -ENOSPC);
  CHECK(full.step == TransferStep::Finished);
  CHECK(full.result == -ENOSPC);
  CHECK(transfer_advance(request, -EAGAIN).step == TransferStep::Blocked);
}

TEST_CASE("transfer: a read that stops within a block looks once more, then fills with zeros") {
  AlignedBuffer buffer(4 * kBlock);
  buffer.fill(1);
  WaitedRequest storage;
  WaitedRequest* request = with(&storage, IoOp::Read, &buffer);
  CHECK(transfer_advance(request, kBlock + 10).step == TransferStep::Again);
  CHECK(transfer_start(*request) == kBlock);
  const char last = buffer.data()[kBlock + 9];
  CHECK(transfer_advance(request, 10).step == TransferStep::Finished);
  CHECK(buffer.data()[kBlock + 9] == last);
  CHECK(std::all_of(buffer.data() + kBlock + 10, buffer.data() + buffer.size(),
                    [](char c) { return c == 0; }));
}

TEST_CASE("transfer queue: reads overtake writes, but not for ever") {
  TransferQueue queue;
  std::vector<WaitedRequest> reads(20);
  std::vector<WaitedRequest> writes(3);
  for (auto& write : writes) {
    write.op = IoOp::Write;
    queue.push(&write);
  }
  for (auto& read : reads) queue.push(&read);
  std::vector<IoRequest*> order;
  while (IoRequest* request = queue.pop()) order.push_back(request);
  REQUIRE(order.size() == 23);
  CHECK(order[0] == &reads[0]);
  CHECK(order[7] == &reads[7]);
  CHECK(order[8] == &writes[0]);
  CHECK(order[9] == &reads[8]);
  CHECK(order[17] == &writes[1]);
  CHECK(order[22] == &writes[2]);
  CHECK(queue.pop() == nullptr);
  queue.push(&writes[0]);
  CHECK(queue.pop() == &writes[0]);
}

TEST_CASE("worker: tasks run in order, and stop waits for all, later ones included") {
  std::vector<int> order;
  {
    Worker worker("test-worker");
    for (int i = 0; i < 100; ++i) {
      worker.post([&order, &worker, i] {
        order.push_back(i);
        if (i == 99) worker.post([&order] { order.push_back(100); });
      });
    }
  }
  REQUIRE(order.size() == 101);
  for (int i = 0; i <= 100; ++i) CHECK(order[static_cast<size_t>(i)] == i);
}

TEST_CASE("worker: a stop from elsewhere finds a sleeping thread") {
  for (int round = 0; round < 100; ++round) {
    Worker worker("test-worker");
    worker.stop();
  }
}

}  // namespace
}  // namespace fpfs
