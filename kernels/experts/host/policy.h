// Which block leaves when room is needed. A policy knows slots and keys, never bytes, threads or leases; the slot table
// asks it and decides. A simulator drives the same code through slots_abi.cpp.
#pragma once

#include <cstdint>
#include <memory>

namespace thimble {

using Key = int32_t;  // layer * experts of a layer + expert
constexpr Key NO_KEY = -1;

enum class Why : int { demand, prefetch };

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
  virtual void used(int slot) = 0;              // the router named the block
  virtual void left(int slot) = 0;              // it was evicted, or its read failed
  // The slot to empty, one for which evictable() holds; -1 if there is none.
  virtual int victim(const Evictable&) = 0;
};

// "lru", or null for a name that there is not.
std::unique_ptr<Policy> make_policy(const char* name, int slots);

}  // namespace thimble
