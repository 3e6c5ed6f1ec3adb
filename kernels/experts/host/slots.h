// The slot table: which block is where, in what state, and who still needs it. Bookkeeping only: it owns no memory, reads
// nothing and is not thread-safe; the cache holds one lock around every call. tests/kernels/test_host_slots.py walks
// through all of its reachable states.
//
//   free ----load----> loading ----arrived(ok)----> ready ----load of another key, only without leases----> loading
//     ^                   |                            ^  |
//     +---arrived(fail)---+                            +--+ lease, release
//
// A lease is what keeps a block in place from the moment its use is certain until every device has retired that use. A
// loading slot may be leased; a failed load ends its leases. Each load gives the slot a new generation, and a lease of an
// older one is refused by every call, so a late message cannot touch a slot's next life.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/experts/host/policy.h"

namespace thimble {

enum class State : int { free, loading, ready };

// Whether a sweep will still lease a block, in this layer or in its next one: it is spared while other room may be had.
enum class Wanted : uint8_t { no, next, now };

struct Slot {
  State state = State::free;
  Key key = NO_KEY;
  uint32_t generation = 0;
  int leases = 0;
  bool unproven = false;  // loaded by prefetch and not named by the router since
  uint64_t used_at = 0;   // on the table's clock of leases; 0: not since it was loaded
};

struct Lease {
  int slot = -1;
  uint32_t generation = 0;
};

struct SlotCounts {
  int64_t evictions = 0, prefetch_issued = 0, prefetch_useful = 0, prefetch_wasted = 0;
};

class SlotTable final : private Evictable {
 public:
  SlotTable(int slots, int keys, std::unique_ptr<Policy>);

  const Slot* find(Key) const;  // null if the block is neither here nor on its way
  const Slot& at(int slot) const { return slots_[size_t(slot)]; }
  int size() const { return int(slots_.size()); }
  int used() const;
  int free() const { return int(free_.size()); }
  const SlotCounts& counts() const { return counts_; }

  // Takes a lease of a block that is here or on its way. False if it is neither.
  bool lease(Key, Lease*, Why = Why::demand);
  // Takes a lease of a block that is here, which is no use of it: it stays as old as it was. False if it is not here.
  bool hold(Key, Lease*);
  // Gives a block that is neither a slot to load into: a free one, else one whose block is ready and not leased, which is
  // thereby evicted (*evicted says so). Unless for a guess, with a lease. False, and nothing changed, if there is no such
  // slot, or the policy would rather wait. A guess never takes a wanted block's slot, a feed (feed.h) that of one wanted next
  // at most, a step any, but none of these before what a sweep has done with.
  bool load(Key, Why, Lease*, bool* evicted, bool for_feed = false);
  void want(Key key, Wanted wanted) { wanted_[size_t(key)] = wanted; }
  // The read has ended. False if the lease is not of a load under way.
  bool arrived(const Lease&, bool ok);
  // False if the lease is not of this life of the slot, or none is out.
  bool release(const Lease&);

  // The ready blocks, the longest unused first.
  std::vector<Key> resident() const;
  // These ready blocks, given the longest unused first, count as used before all that were used since they were loaded.
  void used_before(const std::vector<Key>&);

  // What is wrong with the table, empty if nothing is: every invariant that the comment above promises.
  std::string check() const;

 private:
  bool evictable(int slot) const override {
    const Slot& s = at(slot);
    return s.state == State::ready && s.leases == 0 && wanted_[size_t(s.key)] <= most_wanted_;
  }
  Slot* current(const Lease&);
  void empty(int slot);
  int victim(Key, Why, Wanted most);
  int victim(Key, Why, bool for_feed);

  std::vector<Slot> slots_;
  std::vector<int> of_key_;  // slot of a key, or -1
  std::vector<int> free_;
  std::vector<Wanted> wanted_;       // of a key
  Wanted most_wanted_ = Wanted::now;  // of what the load in hand may evict
  std::unique_ptr<Policy> policy_;
  SlotCounts counts_;
  uint64_t clock_ = 0;
};

}  // namespace thimble
