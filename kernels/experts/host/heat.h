// How often decode has named each block of late. One thread counts; any may read, and sees some recent number.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/experts/host/policy.h"

namespace thimble {

class Heat {
 public:
  static constexpr uint32_t NAMED = 16;  // that a use adds, so that halving leaves something of it

  Heat(int layers, int experts) : counts_(size_t(layers) * size_t(experts)), half_life_(int64_t(layers) * HALF_LIFE_TOKENS) {}

  uint32_t of(Key key) const { return counts_[size_t(key)].load(std::memory_order_relaxed); }
  void set(Key key, uint32_t count) { counts_[size_t(key)].store(count, std::memory_order_relaxed); }
  int keys() const { return int(counts_.size()); }

  void named(Key key) { set(key, of(key) + NAMED); }
  // Some layer's turn of a token is over.
  void step() {
    if (++steps_ % half_life_) return;
    for (Key key = 0; key < keys(); key++) set(key, of(key) / 2);
  }

 private:
  static constexpr int HALF_LIFE_TOKENS = 1000;  // some answers: what is hot in one is often not in the next

  std::vector<std::atomic<uint32_t>> counts_;
  const int64_t half_life_;
  int64_t steps_ = 0;
};

}  // namespace thimble
