// How bytes reach a peer: posted sends and receives.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace zipccl {

// A posted operation. The memory that it reads or writes must outlive it.
class Posted {
 public:
  virtual ~Posted() = default;
  // Returns when the operation is done; throws when it failed or took longer than `timeout`.
  virtual void wait(std::chrono::milliseconds timeout) = 0;
};

// Between two ranks, operations with the same tag match in the order in which they were posted, and a receive has
// exactly the size of its send. Several threads may post and wait at once, each for a peer of its own.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::unique_ptr<Posted> send(int peer, int tag, const void* data, uint64_t bytes) = 0;
  virtual std::unique_ptr<Posted> receive(int peer, int tag, void* data, uint64_t bytes) = 0;
  // Makes the wait that is going on, and all later ones, fail. From any thread.
  virtual void abort() = 0;
};

// The connection to a peer failed or timed out. What the peer was to receive or send is lost, so the transport cannot
// be used any more.
class TransportError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace zipccl
