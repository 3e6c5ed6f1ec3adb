#include "kernels/experts/host/policy.h"

#include <cstring>
#include <vector>

namespace thimble {
namespace {

// Least recently used first. A ring of slots through `next_` and `before_`, with one more place as head and tail.
class Lru : public Policy {
 public:
  explicit Lru(int slots) : end_(slots), next_(size_t(slots) + 1), before_(size_t(slots) + 1) {
    next_[size_t(end_)] = before_[size_t(end_)] = end_;
  }

  void loaded(int slot, Key, Why) override { append(slot); }
  void used(int slot) override {
    left(slot);
    append(slot);
  }
  void left(int slot) override {
    next_[size_t(before_[size_t(slot)])] = next_[size_t(slot)];
    before_[size_t(next_[size_t(slot)])] = before_[size_t(slot)];
  }
  int victim(const Evictable& slots) override {
    for (int slot = next_[size_t(end_)]; slot != end_; slot = next_[size_t(slot)])
      if (slots.evictable(slot)) return slot;
    return -1;
  }

 private:
  void append(int slot) {
    const int last = before_[size_t(end_)];
    next_[size_t(last)] = before_[size_t(end_)] = slot;
    before_[size_t(slot)] = last;
    next_[size_t(slot)] = end_;
  }

  const int end_;
  std::vector<int> next_, before_;
};

}  // namespace

std::unique_ptr<Policy> make_policy(const char* name, int slots) {
  if (!std::strcmp(name, "lru")) return std::make_unique<Lru>(slots);
  return nullptr;
}

}  // namespace thimble
