// Recency and frequency in one number (LRFU: Lee et al., IEEE Transactions on Computers 50(12), 2001): every use adds one to
// a block's value, and values halve in a fixed number of lookups. A long half-life counts uses (LFU with decay), a short one
// knows the last use only (LRU). There are few keys, so the values of evicted blocks are kept too.

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "kernels/experts/host/policies.h"

namespace thimble {
namespace {

class Decay : public Policy {
 public:
  Decay(PolicySizes sizes, double half_life)
      : rate_(1 / std::max(1.0, half_life)), value_(size_t(sizes.keys()), -INFINITY), key_(size_t(sizes.slots), NO_KEY) {}

  void loaded(int slot, Key key, Why why) override {
    key_[size_t(slot)] = key;
    if (!is_guess(why)) count(key);
    order_.emplace(value_[size_t(key)], slot);
  }
  void used(int slot, Why) override {
    const Key key = key_[size_t(slot)];
    order_.erase({value_[size_t(key)], slot});
    count(key);
    order_.emplace(value_[size_t(key)], slot);
  }
  void left(int slot) override { order_.erase({value_[size_t(key_[size_t(slot)])], slot}); }
  int victim(const Evictable& slots, Key, Why) override {
    for (const auto& [value, slot] : order_)
      if (slots.evictable(slot)) return slot;
    return -1;
  }

 private:
  // The logarithm of what the value would be at the first lookup had it grown instead of halving: it orders blocks the same
  // and changes only when its own block is used.
  void count(Key key) {
    double& value = value_[size_t(key)];
    const double now = rate_ * double(++lookups_);
    const double past = value - now;  // log2 of the value by now
    value = now + std::log2(1 + (past < -60 ? 0 : std::exp2(past)));
  }

  const double rate_;
  int64_t lookups_ = 0;
  std::vector<double> value_;  // of a key
  std::vector<Key> key_;       // of a slot
  std::set<std::pair<double, int>> order_;
};

}  // namespace

std::unique_ptr<Policy> make_decay(PolicySizes sizes, double lookups_per_slot) {
  return std::make_unique<Decay>(sizes, lookups_per_slot * sizes.slots);
}

}  // namespace thimble
