// Blocks that may be needed soon, in the order in which reading them is worth most: the nearest layer first, in it as they
// were given, which is by score. Owns no thread and no lock.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "kernels/experts/host/policy.h"

namespace thimble {

class Hints {
 public:
  explicit Hints(int layers) : of_layer_(size_t(layers)) {}

  // A later guess at a layer is a better one: it takes the place of what was hinted before.
  void set(int layer, const Key* keys, size_t count) {
    auto& hints = of_layer_[size_t(layer)];
    size_ += count - hints.size();
    hints.assign(keys, keys + count);
  }
  // The layer's turn has come: what was hinted of it is demanded now, or was wrong.
  void begin_step(int layer) {
    set(layer, nullptr, 0);
    now_ = layer;
  }
  bool empty() const { return size_ == 0; }
  Key front() const { return of_layer_[nearest()].front(); }
  void pop() {
    of_layer_[nearest()].pop_front();
    size_--;
  }

 private:
  size_t nearest() const {
    size_t layer = size_t(now_);
    do layer = (layer + 1) % of_layer_.size();
    while (of_layer_[layer].empty());
    return layer;
  }

  std::vector<std::deque<Key>> of_layer_;
  size_t size_ = 0;
  int now_ = 0;
};

}  // namespace thimble
