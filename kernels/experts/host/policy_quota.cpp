// Least recently used within a layer: every layer keeps an equal share of the slots, as engines with a cache for each layer do.

#include <algorithm>

#include "kernels/experts/host/policies.h"
#include "kernels/experts/host/slot_list.h"

namespace thimble {
namespace {

class Quota : public Policy {
 public:
  explicit Quota(PolicySizes sizes)
      : layers_(sizes.layers), experts_(sizes.experts), share_(std::max(1, sizes.slots / sizes.layers)),
        orders_(sizes.slots, sizes.layers) {}

  void loaded(int slot, Key key, Why) override { orders_.append(key / experts_, slot); }
  void used(int slot, Why) override {
    const int layer = orders_.list_of(slot);
    orders_.remove(slot);
    orders_.append(layer, slot);
  }
  void left(int slot) override { orders_.remove(slot); }

  // From its own layer if that has its share, else from whichever has most; from any if those are all in use.
  int victim(const Evictable& slots, Key key, Why) override {
    const int own = key / experts_;
    int slot = orders_.size(own) >= share_ ? orders_.oldest(own, slots) : -1;
    if (slot >= 0) return slot;
    int largest = 0;
    for (int layer = 1; layer < layers_; layer++)
      if (orders_.size(layer) > orders_.size(largest)) largest = layer;
    slot = orders_.oldest(largest, slots);
    for (int layer = 0; layer < layers_ && slot < 0; layer++) slot = orders_.oldest(layer, slots);
    return slot;
  }

 private:
  const int layers_, experts_, share_;
  SlotLists orders_;
};

}  // namespace

std::unique_ptr<Policy> make_quota(PolicySizes sizes) { return std::make_unique<Quota>(sizes); }

}  // namespace thimble
