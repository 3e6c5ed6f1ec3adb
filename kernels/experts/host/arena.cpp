#include "kernels/experts/host/arena.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

namespace thimble {
namespace {

constexpr int64_t HUGE_PAGE_BYTES = 2 << 20;
constexpr int64_t MOST_PIECE_BYTES = 256 << 20;  // locked at once: a refusal costs at most so much
constexpr int PIECES = 64;                       // and no more than this part of the whole
constexpr int LEAST_SHARE = 4;              // less than a quarter of what was asked for is no use locked

std::string megabytes(int64_t bytes) { return std::to_string(bytes / 1000000) + " MB"; }

// A process may raise its own limit as far as the hard one.
void raise_lock_limit() {
  rlimit limit;
  if (getrlimit(RLIMIT_MEMLOCK, &limit) || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_MEMLOCK, &limit);
}

}  // namespace

Arena::Arena(int slots, int64_t block_bytes, bool lock, std::string* notice) : slots_(slots), block_bytes_(block_bytes) {
  const int64_t bytes = slots * block_bytes;
  mapped_bytes_ = bytes + HUGE_PAGE_BYTES;
  void* got = mmap(nullptr, size_t(mapped_bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) throw std::bad_alloc();
  mapped_ = static_cast<uint8_t*>(got);
  start_ = mapped_ + (HUGE_PAGE_BYTES - reinterpret_cast<uintptr_t>(mapped_) % HUGE_PAGE_BYTES) % HUGE_PAGE_BYTES;
#ifdef MADV_HUGEPAGE
  madvise(start_, size_t(bytes), MADV_HUGEPAGE);  // a hint: fewer address translations, the same memory
#endif
  if (!lock) return;
  raise_lock_limit();
  const int in_piece = int(std::max<int64_t>(1, std::min(MOST_PIECE_BYTES, bytes / PIECES) / block_bytes));
  int locked = 0;
  while (locked < slots) {
    const int more = std::min(in_piece, slots - locked);
    if (mlock(slot(locked), size_t(more * block_bytes))) break;
    locked += more;
  }
  if (locked == slots) return;
  const std::string why = std::strerror(errno);
  const std::string raise = "Raise the memory lock limit (ulimit -l, or memlock in the container's ulimits)";
  if (locked < slots / LEAST_SHARE || locked == 0) {
    munlock(start_, size_t(locked * block_bytes));
    *notice = "the system will not lock " + megabytes(bytes) + " of expert blocks in RAM (" + why +
              "); they may be swapped out. " + raise + ", or lower the expert cache";
    return;
  }
  shrink(locked);
  *notice = "the system locked only " + megabytes(locked * block_bytes) + " of the " + megabytes(bytes) +
            " asked for expert blocks in RAM (" + why + "); the cache is as large as that. " + raise + " for more";
}

Arena::~Arena() { munmap(mapped_, size_t(mapped_bytes_)); }

void Arena::shrink(int slots) {
  const int64_t kept_bytes = slot(slots) - mapped_;
  munmap(slot(slots), size_t(mapped_bytes_ - kept_bytes));
  mapped_bytes_ = kept_bytes;
  slots_ = slots;
}

}  // namespace thimble
