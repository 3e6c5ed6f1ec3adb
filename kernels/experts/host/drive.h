// A place that blocks are read from: a file on a disk, or memory that behaves like a disk of a given speed. A drive knows
// offsets and bytes, not keys or checksums. Any thread may read.
#pragma once

#include <cstdint>
#include <string>

namespace thimble {

class Drive {
 public:
  virtual ~Drive() = default;
  // Fills `to` (page aligned) with `bytes` (whole pages) from `offset` (of a page). Empty, or what is wrong.
  virtual std::string read(int64_t offset, int64_t bytes, uint8_t* to) = 0;
  virtual std::string name() const = 0;                  // for people
  virtual std::string take_notice() { return ""; }       // each once, then empty
};

}  // namespace thimble
