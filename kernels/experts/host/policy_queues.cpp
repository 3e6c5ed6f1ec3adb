// Queues in which a use only leaves a mark: S3-FIFO (Yang et al., SOSP 2023) and SIEVE (Zhang et al., NSDI 2024).
//
// New blocks of S3-FIFO stand in a small queue, those used again there or remembered from lately in the main one. So what a
// sweep brings, or a wrong guess, passes through the small queue. Two changes of ours: one use is enough to be kept, since
// experts come back within a few tokens or not for long; and a sweep in need of room takes its own newest block, because it
// will come through the layers again with the next piece of the prompt and meet the oldest first, and waits rather than
// taking the main queue's.

#include <algorithm>
#include <deque>

#include "kernels/experts/host/policies.h"
#include "kernels/experts/host/slot_list.h"

namespace thimble {
namespace {

class S3Fifo : public Policy {
 public:
  explicit S3Fifo(PolicySizes sizes)
      : small_most_(std::max(sizes.slots / 10, std::max(1, std::min(16, sizes.slots / 2)))), ghosts_most_(size_t(sizes.slots)),
        queues_(sizes.slots, 2),
        uses_(size_t(sizes.slots)), key_(size_t(sizes.slots)), ghost_(size_t(sizes.keys())) {}

  void loaded(int slot, Key key, Why) override {
    queues_.append(ghost_[size_t(key)] ? MAIN : SMALL, slot);
    uses_[size_t(slot)] = 0;
    key_[size_t(slot)] = key;
  }
  void used(int slot, Why) override { uses_[size_t(slot)] = std::min(MOST_USES, uses_[size_t(slot)] + 1); }
  void left(int slot) override {
    if (queues_.list_of(slot) == SMALL) remember(key_[size_t(slot)]);
    queues_.remove(slot);
  }

  int victim(const Evictable& slots, Key, Why why) override {
    if (queues_.size(SMALL) >= small_most_) {
      if (why == Why::sweep) {
        const int newest = queues_.newest(SMALL, slots);
        if (newest < 0 || uses_[size_t(newest)] == 0) return newest;
      }
      const int oldest = of_small(slots);
      if (oldest >= 0) return oldest;
    }
    const int proven = of_main(slots);
    return proven >= 0 ? proven : of_small(slots);
  }

 private:
  static constexpr int SMALL = 0, MAIN = 1, MOST_USES = 3;

  int of_small(const Evictable& slots) {
    for (int slot = queues_.after(queues_.end(SMALL)), next; slot != queues_.end(SMALL); slot = next) {
      next = queues_.after(slot);
      if (uses_[size_t(slot)] > 0) {
        queues_.remove(slot);
        queues_.append(MAIN, slot);
        uses_[size_t(slot)] = 0;
      } else if (slots.evictable(slot)) {
        return slot;
      }
    }
    return -1;
  }
  // Each round takes a use from every block that it passes, so the last one finds whatever may be had.
  int of_main(const Evictable& slots) {
    for (int64_t left = int64_t(queues_.size(MAIN)) * (MOST_USES + 1); left > 0; left--) {
      const int slot = queues_.after(queues_.end(MAIN));
      if (uses_[size_t(slot)] == 0 && slots.evictable(slot)) return slot;
      uses_[size_t(slot)] = std::max(0, uses_[size_t(slot)] - 1);
      queues_.remove(slot);
      queues_.append(MAIN, slot);
    }
    return -1;
  }
  void remember(Key key) {
    ghosts_.push_back(key);
    ghost_[size_t(key)]++;
    if (ghosts_.size() <= ghosts_most_) return;
    ghost_[size_t(ghosts_.front())]--;
    ghosts_.pop_front();
  }

  const int small_most_;
  const size_t ghosts_most_;
  SlotLists queues_;
  std::vector<int> uses_;
  std::vector<Key> key_;
  std::vector<int> ghost_;  // of a key: how often it is among ghosts_
  std::deque<Key> ghosts_;
};

// One queue; a hand goes from old to new, forgives a used block once and empties the first that was not used.
class Sieve : public Policy {
 public:
  explicit Sieve(int slots) : queue_(slots, 1), used_(size_t(slots)), hand_(queue_.end(0)) {}

  void loaded(int slot, Key, Why) override {
    queue_.append(0, slot);
    used_[size_t(slot)] = false;
  }
  void used(int slot, Why) override { used_[size_t(slot)] = true; }
  void left(int slot) override {
    if (hand_ == slot) hand_ = queue_.before(slot);
    queue_.remove(slot);
  }
  int victim(const Evictable& slots, Key, Why) override {
    for (int64_t left = int64_t(queue_.size(0)) * 2 + 2; left > 0; left--) {
      hand_ = queue_.after(hand_);
      if (hand_ == queue_.end(0)) continue;
      if (!used_[size_t(hand_)] && slots.evictable(hand_)) return hand_;
      used_[size_t(hand_)] = false;
    }
    return -1;
  }

 private:
  SlotLists queue_;
  std::vector<bool> used_;
  int hand_;  // the last slot passed
};

}  // namespace

std::unique_ptr<Policy> make_s3fifo(PolicySizes sizes) { return std::make_unique<S3Fifo>(sizes); }
std::unique_ptr<Policy> make_sieve(PolicySizes sizes) { return std::make_unique<Sieve>(sizes.slots); }

}  // namespace thimble
