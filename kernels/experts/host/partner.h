// A second device that computes some of a step's experts, from the same slots, while the workers compute the others. The
// step decides nothing about it but who is leased; which hits it takes is the partner's choice.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/experts/host/policy.h"

namespace thimble {

class Partner {
 public:
  struct Item {
    Key key;
    const uint8_t* block;  // leased to the partner until Step::retire(), or its own
    bool own;
  };

  // How many experts it can take in one step.
  virtual int room() const = 0;
  // Its own copy of a block, which only it can read and which stays where it is; null: it has none. It takes such experts
  // always, as far as its room goes, and nobody else looks for their blocks.
  virtual const uint8_t* own(Key) const = 0;

  // How many of `ready` experts, whose blocks are in RAM, it takes beside `own`; `waiting` others will be computed by the
  // workers as their blocks arrive.
  virtual int share(int ready, int waiting, int own) = 0;
  // Its experts, its own first, and where each result is to come from: source[row * top_k + rank] is an item number, or -1 - n for
  // vector n of the workers' results. A row of x that is not finite has the sources of a vector of NaN.
  virtual void begin(const std::vector<Item>& items, const std::vector<int32_t>& source) = 0;
  // All blocks of this step are demanded: what is hinted at from now on comes after them.
  virtual void demanded() = 0;

 protected:
  ~Partner() = default;
};

}  // namespace thimble
