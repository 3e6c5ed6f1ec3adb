// What the engine runs. As LRFU (policy_decay.cpp) a block has one value, to which a use adds one and which halves in a fixed
// number of lookups, but time is a layer's own: it passes for a layer's blocks when that layer's turn has come. A token goes
// through the layers in order, so a block of the layer that was just left will be needed later than one, as long unused, of
// the layer that comes next; on one clock the former looks the younger, and the block that is needed soonest is evicted.
//
// A sweep names most of a layer at once, which says little of each (of those that many of its tokens name, it says more: they
// come here as demanded, see sweep.h). It raises a block to half a use at most, and no time passes in it, so it evicts nothing
// that decode has named within the last half-life, however long the prompt. It may take some room of more value, lest it read
// one block at a time; when it has that, it waits for its own to be done. What it expects of its next layer counts as swept, and
// takes a free slot or one of no more value.
//
// A hinted block stays out of it until its layer's turn has passed; if it was not named then, it has what its past is worth,
// mostly nothing, and leaves first. Hints wait when they have an eighth of the slots.

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "kernels/experts/host/policies.h"

namespace thimble {
namespace {

class Layered : public Policy {
 public:
  explicit Layered(PolicySizes sizes)
      : experts_(sizes.experts), rate_(1.0 / sizes.slots),
        most_swept_(std::max(sizes.slots / 32, std::min(16, sizes.slots / 2))),
        most_hinted_(std::max(1, sizes.slots / 8)), value_(size_t(sizes.keys()), -INFINITY), clock_(size_t(sizes.layers)),
        orders_(size_t(sizes.layers)),
        hinted_(size_t(sizes.layers)), key_(size_t(sizes.slots), NO_KEY), swept_(size_t(sizes.slots)),
        is_hinted_(size_t(sizes.slots)) {}

  void loaded(int slot, Key key, Why why) override {
    key_[size_t(slot)] = key;
    if (why == Why::prefetch) {
      hinted_[size_t(key / experts_)].push_back(slot);
      is_hinted_[size_t(slot)] = 1;
      hinted_slots_++;
      return;
    }
    set_swept(slot, why == Why::sweep || why == Why::expected);
    count(key, why);
    order(key).emplace(value_[size_t(key)], slot);
  }
  void used(int slot, Why why) override {
    const Key key = key_[size_t(slot)];
    if (is_hinted_[size_t(slot)])
      set_swept(slot, why == Why::sweep);
    else if (why == Why::demand)
      set_swept(slot, false);
    take_out(slot);
    count(key, why);
    order(key).emplace(value_[size_t(key)], slot);
  }
  void left(int slot) override {
    take_out(slot);
    set_swept(slot, false);
  }

  int victim(const Evictable& slots, Key key, Why why) override {
    if (why == Why::demand || why == Why::sweep) turn(key);
    if (why == Why::prefetch && hinted_slots_ >= most_hinted_) return -1;
    int found = -1;
    const bool of_its_own = why == Why::expected || (why == Why::sweep && swept_slots_ >= most_swept_);
    double least = of_its_own ? HALF + 1e-9 : INFINITY;
    for (size_t layer = 0; layer < orders_.size(); layer++) {
      for (const auto& [value, slot] : orders_[layer]) {
        const double now = value - rate_ * clock_[layer];
        if (now >= least) break;
        if (!slots.evictable(slot)) continue;
        found = slot;
        least = now;
        break;
      }
    }
    for (size_t layer = 0; layer < hinted_.size() && found < 0 && why == Why::demand; layer++)
      for (const int slot : hinted_[layer])
        if (slots.evictable(slot)) found = slot;
    return found;
  }

 private:
  static constexpr double HALF = -1;  // log2 of the value that a sweep gives

  std::set<std::pair<double, int>>& order(Key key) { return orders_[size_t(key / experts_)]; }
  void set_swept(int slot, bool swept) {
    swept_slots_ += swept - swept_[size_t(slot)];
    swept_[size_t(slot)] = swept;
  }

  void take_out(int slot) {
    const Key key = key_[size_t(slot)];
    if (!is_hinted_[size_t(slot)]) {
      order(key).erase({value_[size_t(key)], slot});
      return;
    }
    auto& hinted = hinted_[size_t(key / experts_)];
    hinted.erase(std::find(hinted.begin(), hinted.end(), slot));
    is_hinted_[size_t(slot)] = 0;
    hinted_slots_--;
  }

  void turn(Key key) {
    const int layer = key / experts_;
    if (layer == layer_ && orders_.size() > 1) return;
    if (layer_ >= 0) {
      for (const int slot : hinted_[size_t(layer_)]) {
        is_hinted_[size_t(slot)] = 0;
        order(key_[size_t(slot)]).emplace(value_[size_t(key_[size_t(slot)])], slot);
      }
      hinted_slots_ -= int(hinted_[size_t(layer_)].size());
      hinted_[size_t(layer_)].clear();
    }
    clock_[size_t(layer)] = double(lookups_);
    layer_ = layer;
  }

  // As in policy_decay.cpp, the logarithm of what the value would be at time 0 had it grown instead of halving.
  void count(Key key, Why why) {
    double& value = value_[size_t(key)];
    if (why == Why::warm || why == Why::expected) {
      value = std::max(value, HALF + rate_ * clock_[size_t(key / experts_)]);
      return;
    }
    turn(key);
    const double now = rate_ * clock_[size_t(layer_)];
    if (why == Why::sweep) {
      value = std::max(value, HALF + now);
      return;
    }
    lookups_++;
    const double past = value - now;
    value = now + std::log2(1 + (past < -60 ? 0 : std::exp2(past)));
  }

  const int experts_;
  const double rate_;
  const int most_swept_, most_hinted_;
  int layer_ = -1;  // whose turn it is
  int64_t lookups_ = 0;
  std::vector<double> value_;  // of a key, in RAM or not
  std::vector<double> clock_;  // of a layer: lookups when its turn began
  std::vector<std::set<std::pair<double, int>>> orders_;  // of a layer: its blocks, the least value first
  std::vector<std::vector<int>> hinted_;                  // of a layer: slots with blocks that were only hinted
  std::vector<Key> key_;       // of a slot
  std::vector<int> swept_;     // of a slot: a sweep brought its block, and decode has not named it since
  std::vector<int> is_hinted_;
  int swept_slots_ = 0, hinted_slots_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_layered(PolicySizes sizes) { return std::make_unique<Layered>(sizes); }

}  // namespace thimble
