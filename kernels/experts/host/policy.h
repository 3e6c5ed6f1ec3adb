// Which block leaves when room is needed. A policy knows slots and keys, never bytes, threads or leases; the slot table
// asks it and decides. A simulator drives the same code through replay.cpp.
#pragma once

#include <cstdint>
#include <memory>

namespace thimble {

using Key = int32_t;  // layer * experts of a layer + expert
constexpr Key NO_KEY = -1;

// A sweep is a step of many tokens, a piece of a prompt: it goes through most of a layer's experts once (sweep.h). Warm: the
// block was in RAM before a restart; it only ever gets a free slot. Expected: a sweep will need it in its next layer.
enum class Why : int { demand, prefetch, sweep, warm, expected };

constexpr bool is_guess(Why why) { return why == Why::prefetch || why == Why::expected; }

class Evictable {
 public:
  virtual bool evictable(int slot) const = 0;

 protected:
  ~Evictable() = default;
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual void loaded(int slot, Key, Why) = 0;  // a block begins to live in the slot
  virtual void used(int slot, Why) = 0;         // the router named the block
  virtual void left(int slot) = 0;              // it was evicted, or its read failed
  // The slot to empty for that block, one for which evictable() holds; -1 if there is none. A sweep's block, a hinted one
  // and an expected one may have to wait although there is; a demanded one never.
  virtual int victim(const Evictable&, Key, Why) = 0;
};

struct PolicySizes {
  int slots, layers, experts;
  int keys() const { return layers * experts; }
};

// By name, null if there is none such:
//   lru        least recently used
//   lfu        least often used, counts halve within 64 lookups a slot and outlive eviction (policy_decay.cpp)
//   lrfu       the same within one lookup a slot: recency and frequency in one number
//   layered    the same on every layer's own clock (policy_layered.cpp)
//   s3fifo     three queues: new, proven, and a ghost of the evicted (policy_queues.cpp)
//   sieve      one queue with a hand and a mark
//   quota      least recently used, but every layer keeps an equal share (policy_quota.cpp)
//   shipped    what the engine runs
std::unique_ptr<Policy> make_policy(const char* name, PolicySizes);

// tests/bench/results/LOG.md says why.
constexpr const char* SHIPPED_POLICY = "layered";

}  // namespace thimble
