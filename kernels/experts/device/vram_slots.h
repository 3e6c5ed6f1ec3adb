// Which blocks a GPU has in its own memory, and which it should have: those that decode names most often of late (heat.h) among
// the ones in RAM. Owns the table, not the memory, and copies nothing: whoever does that asks begin() what to copy, copies, and
// says end(). One thread's, the one that serves turns; and only between two graphs, when nothing is read there.
//
// A block that is held is not looked up in RAM any more, where it grows cold and leaves; but a step of several rows that names
// more of them than it has places for looks the rest up there.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/experts/device/cuda_driver.h"
#include "kernels/experts/host/step.h"

namespace thimble {

class VramSlots {
 public:
  struct Move {
    int slot;             // to write
    const uint8_t* from;  // in RAM, leased until end()
  };

  // `slots` blocks at `memory`, none of which holds anything yet.
  VramSlots(Step&, Cache&, const Catalog&, CudaDriver::Address memory, int slots);

  // Null if it is not held.
  const uint8_t* find(Key key) const { return reinterpret_cast<const uint8_t*>(address_of_key_[size_t(key)]); }
  int used() const;

  // At most `most` blocks to copy, the hottest first; what they replace is not held from now on. Nothing is replaced by what is
  // less than twice as hot: a copy costs as much as leaving a block where it is for a token.
  std::vector<Move> begin(int most);
  void end();

  // Those held, the coldest first.
  std::vector<Key> held() const;

 private:
  struct Pending {
    Key key;
    int slot;
    Lease lease;
  };

  Step& step_;
  Cache& cache_;
  const Catalog& catalog_;
  const CudaDriver::Address memory_;
  std::vector<CudaDriver::Address> address_of_key_;  // or 0
  std::vector<Key> key_;                             // of a slot, or NO_KEY
  std::vector<Pending> pending_;
};

}  // namespace thimble
