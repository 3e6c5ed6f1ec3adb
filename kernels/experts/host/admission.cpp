// Who gets to stay: around any policy, keeps blocks that a decode step has named apart from those that only a sweep or a hint
// brought. The policy sees the first kind alone, and the other kinds leave first.
//
//   kept     named by a decode step: the policy's. A sweep neither refreshes nor evicts it, beyond the sweep's own share
//   swept    brought by a sweep. A sweep in need of room takes its own newest: it comes through the layers again with the next
//            piece of the prompt, and the oldest are what it will meet first
//   hinted   brought by a prefetch and not named since: leaves first in, first out, once there are more than a share

#include <algorithm>

#include "kernels/experts/host/policies.h"
#include "kernels/experts/host/slot_list.h"

namespace thimble {
namespace {

class Guard : public Policy {
 public:
  Guard(std::unique_ptr<Policy> inner, int slots)
      : inner_(std::move(inner)), most_swept_(std::max(slots / 32, std::min(32, slots / 2))),
        most_hinted_(std::max(slots / 64, std::min(16, slots / 4))), apart_(slots, 2), key_(size_t(slots)) {}

  void loaded(int slot, Key key, Why why) override {
    key_[size_t(slot)] = key;
    if (why == Why::demand)
      inner_->loaded(slot, key, why);
    else
      apart_.append(why == Why::sweep ? SWEPT : HINTED, slot);
  }
  void used(int slot, Why why) override {
    const int list = apart_.list_of(slot);
    if (why == Why::sweep) {
      if (list != HINTED) return;
      apart_.remove(slot);
      apart_.append(SWEPT, slot);
    } else if (list == SlotLists::NONE) {
      inner_->used(slot, why);
    } else {
      apart_.remove(slot);
      inner_->loaded(slot, key_[size_t(slot)], why);
    }
  }
  void left(int slot) override {
    if (apart_.list_of(slot) == SlotLists::NONE)
      inner_->left(slot);
    else
      apart_.remove(slot);
  }

  int victim(const Evictable& slots, Key key, Why why) override {
    int slot = -1;
    if (apart_.size(HINTED) > most_hinted_ || (why == Why::prefetch && apart_.size(HINTED) == most_hinted_))
      slot = apart_.oldest(HINTED, slots);
    if (slot < 0) slot = why == Why::sweep ? apart_.newest(SWEPT, slots) : apart_.oldest(SWEPT, slots);
    if (slot >= 0) return slot;
    if (why == Why::sweep && apart_.size(SWEPT) >= most_swept_) return -1;  // one of its own will be free soon
    slot = inner_->victim(slots, key, why);
    return slot >= 0 || why == Why::prefetch ? slot : apart_.oldest(HINTED, slots);
  }

 private:
  static constexpr int SWEPT = 0, HINTED = 1;

  const std::unique_ptr<Policy> inner_;
  const int most_swept_, most_hinted_;
  SlotLists apart_;
  std::vector<Key> key_;
};

}  // namespace

std::unique_ptr<Policy> make_guard(std::unique_ptr<Policy> inner, PolicySizes sizes) {
  return std::make_unique<Guard>(std::move(inner), sizes.slots);
}

}  // namespace thimble
