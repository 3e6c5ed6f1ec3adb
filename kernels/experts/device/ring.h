// A feed's blocks on their way through a ring of places in a GPU's memory: what a sweep asks for once for each group of blocks.
// Owns the streams and events of the copies, and the leases of what is being copied; the memory, the feed and the kernels that
// read the ring are others'. Used by one host thread. Where the "GPU's memory" is the host's (tests, Triton's interpreter) there
// is no driver, and a copy has ended when it returns.
//
// The ring has groups of places, which take turns. Of each group:
//
//   next()  waits until the last copies into it have ended: their leases are given back, their tables may be written anew
//           takes blocks from the feed: leased, so that their slots stay as they are
//           copies      lanes wait for used() of the group's last blocks; table and blocks; then the caller's stream waits
//   caller  queues what reads the group
//   used()  is recorded behind that
//
// What a guessed feed has may be copied ahead(), as much as there are groups: next() then has these first, and what the feed has
// learnt is not named of them is in no table. Only the table is copied then, which does not wait for blocks of other groups.
//
// What orders what
//   copy -> read    the caller's stream waits for an event behind the copies of every lane.
//   read -> copy    the lanes wait for the event of used(), which next() of the same group, a whole turn later, finds recorded.
//   copy -> reuse of a slot    a lease goes back only once the host has seen the events behind the copies, or the lanes empty.
//   table           lies in page-locked memory and is copied by a lane that has nothing else, so that it is not behind the blocks
//                   that were copied ahead; its event is one of the group's.
#pragma once

#include <string>
#include <vector>

#include "kernels/experts/device/cuda_driver.h"
#include "kernels/experts/host/cache.h"

namespace thimble {

struct RingMemory {
  CudaDriver::Address blocks;        // [groups * group] blocks
  int32_t* tables;                   // [groups][2 * group][FIELDS], page-locked
  CudaDriver::Address device_tables;  // the same on the GPU
};

struct RingShape {
  int groups, group;
  int64_t most_rows;  // lookups that the caller computes at once
};

// Lookups of a group's experts that are computed together: so many items of the tables from `first` on.
struct Pass {
  int first, items;
  int64_t most_rows;  // of one of its items
};

class Ring {
 public:
  static constexpr int FIELDS = 5;  // of an item: expert, place in the ring, row of h, first lookup, lookups

  // `driver` null: everything is the host's memory. Throws std::runtime_error.
  Ring(Cache&, const Catalog&, const CudaDriver* driver, CudaDriver::Handle context, const RingMemory&, const RingShape&);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Of the open feed, which is guessed, as many blocks as there is room for are on their way when this returns: how many.
  // Throws std::runtime_error if the GPU fails.
  int ahead();
  // The next group of the open feed's blocks, at least one that is named: they are on their way when this returns, `stream`
  // waits for them. counts[experts]: lookups of each. 0: there are no more. -1: one cannot be had, *error says why. *copied: how
  // many blocks this call copied. Throws std::runtime_error if the GPU fails.
  int next(const int32_t* counts, int64_t timeout_ns, CudaDriver::Handle stream, std::vector<Pass>* passes, int* copied,
           std::string* error);
  // All that reads the group of the last next() is queued on `stream`.
  void used(CudaDriver::Handle stream);
  // Waits until no copy is under way; every lease is given back. Never fails: of a GPU that does, nothing is under way.
  void drain();

 private:
  struct Group {
    std::vector<int32_t> experts;  // in its places
    std::vector<int64_t> leased;   // what the feed wants back
    CudaDriver::Handle used = nullptr;
    std::vector<CudaDriver::Handle> copied;  // of each lane, the tables' last
  };

  void destroy();
  void release(Group&);
  int take(Group&, int64_t timeout_ns, std::string* error);
  void copy_blocks(int number);
  int copy_table(int number, const int32_t* counts, std::vector<Pass>* passes);
  void copy(CudaDriver::Address to, const void* from, size_t bytes, size_t lane);
  void wait_for_copies(const Group&, CudaDriver::Handle stream);
  void check(CudaDriver::Status status, const char* call) const { driver_->check(status, call); }

  Cache& cache_;
  const Catalog& catalog_;
  const CudaDriver* const driver_;
  const CudaDriver::Handle context_;
  const RingMemory memory_;
  const RingShape shape_;
  std::vector<CudaDriver::Handle> lanes_;
  std::vector<Group> groups_;
  std::vector<Feed::Block> taken_;
  int turn_ = 0;    // the group that is filled next
  int ahead_ = 0;   // filled ahead, and not given out: those before turn_
  int given_ = 0;   // the last that next() gave out
};

// Writes a table of the blocks' lookups, the first of them being in `place`, and says how they are computed in passes of at most
// `most_rows`. Returns its items: no more than there are blocks and passes, less one.
int fill_table(const int32_t* experts, int count, int place, const int32_t* counts, int64_t most_rows, int32_t* table,
               std::vector<Pass>* passes);

}  // namespace thimble
