// Whether prefetching pays, found by doing it and leaving it: windows of steps with and without, and the mean time that a step
// waited for the disk in each. Owns two means and no clock.
#pragma once

#include <cstdint>

namespace thimble {

enum class Prefetching : int { off, on, automatic };

class Trial {
 public:
  explicit Trial(Prefetching mode) : mode_(mode), on_(mode != Prefetching::off) {}

  bool on() const { return on_; }

  // A step of decode is over, having waited that long for the disk.
  void step(int64_t waited_ns) {
    if (mode_ != Prefetching::automatic) return;
    sum_ns_ += double(waited_ns);
    if (++steps_ < WINDOW) return;
    Mean& mean = on_ ? with_ : without_;
    const double found = sum_ns_ / WINDOW;
    mean.ns += (found - mean.ns) * (mean.known ? WEIGHT : 1);
    mean.known = true;
    sum_ns_ = 0;
    steps_ = 0;
    windows_++;
    if (!with_.known || !without_.known)
      on_ = !on_;
    else
      on_ = (with_.ns < without_.ns) != (windows_ % OTHER == 0);
  }

 private:
  static constexpr int WINDOW = 400;  // steps: ten tokens of forty layers
  static constexpr int OTHER = 16;    // one window in so many tries the way that was found worse
  static constexpr double WEIGHT = 0.3;
  struct Mean {
    double ns = 0;
    bool known = false;
  };

  const Prefetching mode_;
  bool on_;
  double sum_ns_ = 0;
  int steps_ = 0, windows_ = 0;
  Mean with_, without_;
};

}  // namespace thimble
