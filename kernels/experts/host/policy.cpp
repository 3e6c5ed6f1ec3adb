#include "kernels/experts/host/policy.h"

#include <cstring>

#include "kernels/experts/host/policies.h"
#include "kernels/experts/host/slot_list.h"

namespace thimble {
namespace {

class Lru : public Policy {
 public:
  explicit Lru(int slots) : order_(slots, 1) {}

  void loaded(int slot, Key, Why) override { order_.append(0, slot); }
  void used(int slot, Why) override {
    order_.remove(slot);
    order_.append(0, slot);
  }
  void left(int slot) override { order_.remove(slot); }
  int victim(const Evictable& slots, Key, Why) override { return order_.oldest(0, slots); }

 private:
  SlotLists order_;
};

}  // namespace

std::unique_ptr<Policy> make_policy(const char* name, PolicySizes sizes) {
  if (!std::strcmp(name, "shipped")) name = SHIPPED_POLICY;
  if (!std::strcmp(name, "lru")) return std::make_unique<Lru>(sizes.slots);
  if (!std::strcmp(name, "lfu")) return make_decay(sizes, 64);
  if (!std::strcmp(name, "lrfu")) return make_decay(sizes, 1);
  if (!std::strcmp(name, "layered")) return make_layered(sizes);
  if (!std::strcmp(name, "s3fifo")) return make_s3fifo(sizes);
  if (!std::strcmp(name, "sieve")) return make_sieve(sizes);
  if (!std::strcmp(name, "quota")) return make_quota(sizes);
  return nullptr;
}

}  // namespace thimble
