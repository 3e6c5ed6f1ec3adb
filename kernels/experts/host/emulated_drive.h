// Memory that behaves like a disk of a given speed, for benchmarks on machines whose own disk is slow. No setting of the
// engine leads here: only a benchmark or a test makes one (EmulatedDrive in drives.py) and gives it to a host.
//
// The model. At most `depth` reads are served at once, the others wait in the order they came. A read that is served has its
// first byte after `latency` and is then carried at no more than `lane_bytes_per_s`; all reads together leave through one
// token bucket without burst, `bytes_per_s`. A read is handed over when its last byte is due. The bytes are copied by the
// reader's own thread while it waits, so a measurement leaves it a core; if that takes longer than the drive would have, the
// difference is counted as late, and a figure measured with much lateness is one of this machine's memory, not of the drive.
//
// The memory is the caller's and may be shared by drives. Offsets may repeat in a catalog: a few blocks in memory then stand
// for every expert of a large model.
#pragma once

#include <condition_variable>
#include <mutex>

#include "kernels/experts/host/drive.h"

namespace thimble {

struct DriveModel {
  double bytes_per_s, lane_bytes_per_s;
  int64_t latency_ns;
  int depth;
};

class EmulatedDrive : public Drive {
 public:
  EmulatedDrive(const uint8_t* memory, int64_t bytes, const DriveModel& model)
      : memory_(memory), bytes_(bytes), model_(model) {}

  std::string read(int64_t offset, int64_t bytes, uint8_t* to) override;
  std::string name() const override { return "emulated drive"; }

  struct Counts {
    int64_t reads = 0, read_bytes = 0, busy_ns = 0, late_ns = 0;  // busy: some read is being served
  };
  Counts counts() const;

 private:
  const uint8_t* const memory_;
  const int64_t bytes_;
  const DriveModel model_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable served_;
  uint64_t next_ticket_ = 0, next_served_ = 0;
  int serving_ = 0;
  int64_t free_at_ns_ = 0;  // when the bucket has let through all that was accepted
  int64_t busy_since_ns_ = 0;
  Counts counts_;
};

}  // namespace thimble
