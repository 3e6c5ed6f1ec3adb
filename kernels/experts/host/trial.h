// Whether prefetching pays, found by doing it and leaving it: with, without, without, with, so that what merely changes with
// time (a cache that fills, another subject) counts for both, and how long steps waited for the disk in each. Then it stays
// with the better way for a while, and tries again. Owns a score and no clock.
#pragma once

#include <cstdint>

namespace thimble {

enum class Prefetching : int { off, on, automatic };

class Trial {
 public:
  explicit Trial(Prefetching mode) : mode_(mode) {}

  bool on() const {
    if (mode_ != Prefetching::automatic) return mode_ == Prefetching::on;
    return window_ < TRIED ? tries() : score_ > 0;
  }

  // A step of decode is over, having waited that long for the disk.
  void step(int64_t waited_ns) {
    if (window_ < TRIED) (tries() ? with_ns_ : without_ns_) += double(waited_ns);
    if (++steps_ < WINDOW) return;
    steps_ = 0;
    if (++window_ == TRIED) judge();
    if (window_ == (trials_ < AT_FIRST ? TRIED : CYCLE)) window_ = 0;
  }

 private:
  static constexpr int WINDOW = 200;   // steps: five tokens of forty layers
  static constexpr int TRIED = 4;      // windows of a trial
  static constexpr int CYCLE = 32;     // windows from one trial to the next
  static constexpr int AT_FIRST = 3;   // trials without a pause: the first ones see the cache fill
  static constexpr double WEIGHT = 0.5;  // of the latest trial

  bool tries() const { return window_ == 0 || window_ == TRIED - 1; }

  void judge() {
    const double sum_ns = with_ns_ + without_ns_;
    const double gain = sum_ns > 0 ? (without_ns_ - with_ns_) / sum_ns : 0;
    score_ += (gain - score_) * WEIGHT;
    with_ns_ = without_ns_ = 0;
    trials_++;
  }

  const Prefetching mode_;
  double with_ns_ = 0, without_ns_ = 0, score_ = 0;
  int steps_ = 0, window_ = 0, trials_ = 0;
};

}  // namespace thimble
