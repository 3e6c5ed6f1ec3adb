#include "kernels/experts/host/arena.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <new>

namespace thimble {

Arena::Arena(int64_t slots, int64_t block_bytes, bool lock, std::string* notice)
    : block_bytes_(block_bytes), bytes_(slots * block_bytes) {
  void* got = mmap(nullptr, size_t(bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) throw std::bad_alloc();
  start_ = static_cast<uint8_t*>(got);
#ifdef MADV_HUGEPAGE
  madvise(start_, size_t(bytes_), MADV_HUGEPAGE);  // a hint: fewer address translations, the same memory
#endif
  if (lock && mlock(start_, size_t(bytes_)))
    *notice = "the system will not lock " + std::to_string(bytes_ / 1000000) + " MB of expert blocks in RAM (" +
              std::strerror(errno) + "); they may be swapped out. Raise the memory lock limit (ulimit -l), or lower the "
              "expert cache";
}

Arena::~Arena() { munmap(start_, size_t(bytes_)); }

}  // namespace thimble
