// What a machine may do to a process, loaded in front of its C library (LD_PRELOAD): the wall clock jumps, the disk is
// slow or full. Owns these three; how much of them is read, at every call, from the file that TROUBLE_FILE names, so that it
// may change while the process runs (trouble.py).
//
// A wait for a moment of the wall clock is not shifted: after a jump it would last too long or too short, and be seen.

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace {

struct Trouble {
  volatile long clock_ahead_s;
  volatile long read_us;  // that each read at an offset takes longer
  volatile long full;     // no file takes a byte more once this process has written so many; 0: all do
};

const Trouble* look() {
  static const Trouble* found = [] {
    static const Trouble none = {0, 0, 0};
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

bool no_space(int file, size_t bytes) {
  static std::atomic<long> written{0};
  struct stat what;
  if (fstat(file, &what) || !S_ISREG(what.st_mode)) return false;
  if (!look()->full || (written += long(bytes)) < look()->full) return false;
  errno = ENOSPC;
  return true;
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

ssize_t write(int file, const void* from, size_t bytes) {
  static const auto next = real<ssize_t (*)(int, const void*, size_t)>("write");
  return no_space(file, bytes) ? -1 : next(file, from, bytes);
}

ssize_t writev(int file, const iovec* from, int count) {
  static const auto next = real<ssize_t (*)(int, const iovec*, int)>("writev");
  return no_space(file, 1) ? -1 : next(file, from, count);
}

ssize_t pwrite(int file, const void* from, size_t bytes, off_t offset) {
  static const auto next = real<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  return no_space(file, bytes) ? -1 : next(file, from, bytes, offset);
}

ssize_t pwrite64(int file, const void* from, size_t bytes, off64_t offset) {
  static const auto next = real<ssize_t (*)(int, const void*, size_t, off64_t)>("pwrite64");
  return no_space(file, bytes) ? -1 : next(file, from, bytes, offset);
}

}  // extern "C"
