// What a machine may do to a process, loaded in front of its C library (LD_PRELOAD): the wall clock jumps, the disk is
// slow. Owns these two; how much of them is read, at every call, from the file that TROUBLE_FILE names, so that it
// may change while the process runs (trouble.py).
//
// A wait for a moment of the wall clock is not shifted: after a jump it would last too long or too short, and be seen.

#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

namespace {

struct Trouble {
  volatile long clock_ahead_s;
  volatile long read_us;  // that each read at an offset takes longer
};

const Trouble* look() {
  static const Trouble* found = [] {
    static const Trouble none = {0, 0};
    const char* path = getenv("TROUBLE_FILE");
    const int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return &none;
    void* mapped = mmap(nullptr, sizeof(Trouble), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    return mapped == MAP_FAILED ? &none : static_cast<const Trouble*>(mapped);
  }();
  return found;
}

template <typename Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

void wait_for_disk() {
  if (look()->read_us > 0) usleep(useconds_t(look()->read_us));
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* now) noexcept {
  const long failed = syscall(SYS_clock_gettime, clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += look()->clock_ahead_s;
  return int(failed);
}

int gettimeofday(timeval* now, void*) noexcept {
  timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* at) noexcept {
  timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (at) *at = exact.tv_sec;
  return exact.tv_sec;
}

ssize_t pread(int file, void* to, size_t bytes, off_t offset) {
  wait_for_disk();
  static const auto next = real<ssize_t (*)(int, void*, size_t, off_t)>("pread");
  return next(file, to, bytes, offset);
}

ssize_t pread64(int file, void* to, size_t bytes, off64_t offset) {
  wait_for_disk();
  static const auto next = real<ssize_t (*)(int, void*, size_t, off64_t)>("pread64");
  return next(file, to, bytes, offset);
}

}  // extern "C"
