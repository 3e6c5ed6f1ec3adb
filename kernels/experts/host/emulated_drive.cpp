#include "kernels/experts/host/emulated_drive.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace thimble {
namespace {

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

void sleep_until(int64_t due_ns) {
  // The kernel may otherwise add 50 us to every sleep, a good part of a read.
  thread_local const bool punctual = prctl(PR_SET_TIMERSLACK, 1UL) == 0;
  (void)punctual;
  const timespec due{time_t(due_ns / 1000000000), long(due_ns % 1000000000)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, nullptr) == EINTR) {
  }
}

}  // namespace

std::string EmulatedDrive::read(int64_t offset, int64_t bytes, uint8_t* to) {
  if (offset < 0 || bytes < 0 || offset > bytes_ - bytes) return "the block is not in the emulated drive's memory";
  int64_t due_ns;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t ticket = next_ticket_++;
    served_.wait(lock, [&] { return ticket == next_served_ && serving_ < model_.depth; });
    next_served_++;
    const int64_t begun_ns = now_ns();
    if (serving_++ == 0) busy_since_ns_ = begun_ns;
    const int64_t first_ns = begun_ns + model_.latency_ns;
    free_at_ns_ = std::max(free_at_ns_, first_ns) + int64_t(double(bytes) / model_.bytes_per_s * 1e9);
    due_ns = std::max(free_at_ns_, first_ns + int64_t(double(bytes) / model_.lane_bytes_per_s * 1e9));
  }
  served_.notify_all();
  std::memcpy(to, memory_ + offset, size_t(bytes));
  const int64_t late_ns = std::max<int64_t>(0, now_ns() - due_ns);  // waking up late is the system's doing, not memory's
  if (late_ns == 0) sleep_until(due_ns);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--serving_ == 0) counts_.busy_ns += now_ns() - busy_since_ns_;
    counts_.reads++;
    counts_.read_bytes += bytes;
    counts_.late_ns += late_ns;
  }
  served_.notify_all();
  return "";
}

EmulatedDrive::Counts EmulatedDrive::counts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

}  // namespace thimble
