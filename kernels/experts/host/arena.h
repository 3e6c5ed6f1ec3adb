// One block of page-aligned memory for all slots. Owns it; who may write a slot is the cache's business.
#pragma once

#include <cstdint>
#include <string>

namespace thimble {

class Arena {
 public:
  // Throws std::bad_alloc if the address space is refused. With `lock`, has the system keep it in RAM, a piece after the
  // other; where it refuses, the arena is made smaller, or, if even a quarter is refused, used as it is. Both are said in
  // *notice. Without `lock` pages are taken when they are first written. In huge pages where the system gives them: a disk
  // was seen to fill those twice as fast as small ones, since it is told of fewer places.
  Arena(int slots, int64_t block_bytes, bool lock, std::string* notice);
  ~Arena();
  Arena(const Arena&) = delete;

  uint8_t* slot(int at) const { return start_ + int64_t(at) * block_bytes_; }
  int slots() const { return slots_; }
  void shrink(int slots);  // the last ones go back to the system; nobody may use them

 private:
  uint8_t* mapped_;
  int64_t mapped_bytes_;
  uint8_t* start_;  // in it, at a huge page's border
  int slots_;
  int64_t block_bytes_;
};

}  // namespace thimble
