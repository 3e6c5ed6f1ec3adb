// One block of page-aligned memory for all slots. Owns it; who may write a slot is the cache's business.
#pragma once

#include <cstdint>
#include <string>

namespace thimble {

class Arena {
 public:
  // Throws std::bad_alloc if the address space is refused. With `lock`, asks the system to keep it in RAM; a refusal is
  // described in *notice and the memory used as it is. Pages are taken when they are first written.
  Arena(int64_t slots, int64_t block_bytes, bool lock, std::string* notice);
  ~Arena();
  Arena(const Arena&) = delete;

  uint8_t* slot(int at) const { return start_ + int64_t(at) * block_bytes_; }

 private:
  uint8_t* start_;
  int64_t block_bytes_, bytes_;
};

}  // namespace thimble
