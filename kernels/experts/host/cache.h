// Expert blocks in RAM: slots, their memory, and the threads that fill them from disk. Owns all three and the one lock
// that guards them; whoever holds a lease may read the slot's bytes without it.
//
// Threads: the step's (owner and workers) call demand and release; one feeds a sweep, between steps or beside them (feed.h says
// what comes first); anyone calls prefetch; readers run here.
//
// What orders what
//   read -> use       a reader writes a slot only while it is loading, then turns it ready under the lock. Whoever leases it
//                     takes the lock after that, or is told by arrived(), which the reader calls after it.
//   use -> reuse      a slot is written again only after a load() that found no lease, and a lease is given back under the
//                     lock after the last read of the bytes.
//   demand, prefetch  readers take pieces of blocks (blocks.h), a demanded block's first, always: what was begun ahead waits
//                     meanwhile, and a block that is demanded while it waits is hurried. A prefetch hint is not begun before
//                     the last piece of what is demanded is on its way, nor between begin_step and demands_made, when the
//                     hits of the step are not leased yet, nor while a step waits for room. Of hinted blocks only few
//                     pieces are under way at once, so that the next demand does not wait for more, and one reader is kept
//                     free of it (if there are two).
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <string>
#include <thread>
#include <vector>

#include "kernels/experts/host/arena.h"
#include "kernels/experts/host/blocks.h"
#include "kernels/experts/host/feed.h"
#include "kernels/experts/host/hints.h"
#include "kernels/experts/host/slots.h"
#include "kernels/experts/host/sweep.h"
#include "kernels/experts/host/trial.h"

namespace thimble {

// Told by readers, without the lock, at most once for each question that was answered "later". Must outlive the cache.
class Waiter {
 public:
  virtual void arrived(int tag, const std::string& error) = 0;  // empty: the leased slot is ready
  virtual void room() = 0;                                      // a demand that found no room may be tried again

 protected:
  ~Waiter() = default;
};

struct CacheOptions {
  std::vector<Drive*> drives;  // must outlive the cache
  std::string policy;
  Prefetching prefetch;
  int slots, readers;
  bool lock_memory;
  bool poison;        // overwrite what is evicted, so that a use after eviction shows; for tests
  int read_delay_us;  // make every read take this much longer; for tests
  int64_t piece_bytes;  // Blocks::PIECE_BYTES, but for tests and comparisons
};

struct CacheCounts {
  int64_t hits = 0, misses = 0, demand_read_bytes = 0, prefetch_read_bytes = 0;
  int64_t sweep_blocks = 0, sweep_wait_ns = 0;  // handed out by feeds and named, and how long these were waited for
};

class Cache {
 public:
  enum class Found { ready, coming, no_room };

  // Throws std::runtime_error or std::bad_alloc.
  Cache(const Catalog&, const CacheOptions&);
  ~Cache();

  const uint8_t* memory(const Lease& lease) const { return arena_.slot(lease.slot); }

  // A step of the given layer begins: hints for that layer are stale now. `rows` tokens; many make it a sweep.
  void begin_step(int layer, int rows);
  // Leases the block if it is ready. Counts a hit or a miss.
  bool look_up(Key, Why, Lease*);
  // Leases the block; unless it is ready, it is read. If coming: waiter->arrived(tag) later. If no_room: nothing was done,
  // and waiter->room() is called when it is worth trying again. `alone`: nothing else of the step is under way, so that
  // waiting for the step's own blocks to leave would be for ever.
  Found demand(Key, Why, bool alone, Waiter*, int tag, Lease*);
  void demands_made();
  void release(const Lease&);
  // Leases a block for who only looks at it: no hit, no miss, and no use. False if it is not there.
  bool lease_if_ready(Key, Lease*);
  // No lease is out but a partner's; nothing demanded is on its way. The step waited for the disk that long.
  void end_step(int64_t waited_ns);

  // A feed of one layer's blocks begins (feed.h); no other is open. At most `ahead` blocks are leased to it at once, fewer if
  // slots are few. False, and nothing is begun, if there is no slot for it beside a step's. counts null: it is guessed, until a
  // second call.
  bool begin_feed(int layer, const int32_t* counts, int64_t tokens, int ahead);
  // Up to `most` blocks, at least one, as soon as there is one. 0: none is left, or some must be given back before another
  // can come (feed_over() says which). -1: one could not be had, *error says which.
  int take(int64_t timeout_ns, int most, Feed::Block* out, std::string* error);
  bool feed_over() const;
  bool give_back(const int64_t* numbers, int count);  // false if one is not out
  // Whatever is out is given back. If blocks were left, nothing is expected any more.
  void end_feed();
  // The sweep will need these blocks of one layer next. Read while no demanded block waits, into free slots and such as hold
  // nothing but what a sweep has done with. They take the place of those expected before.
  void expect(const Key* keys, size_t count);

  // Blocks of a layer that may be needed soon, the likeliest first.
  void prefetch(int layer, const Key* keys, size_t count);

  // The blocks that are ready, the longest unused first: what an earlier process may leave to a later one's warm(), which
  // reads them into free slots, in the order of the file, while nothing else is to be read. It evicts nothing. In the end
  // they count as used in the order given, before all that was used since.
  std::vector<Key> resident() const;
  void warm(const Key* keys, size_t count);

  // Before anything was loaded: the last slots are given up.
  void shrink(int slots);

  // Whether hints are taken now: they may be switched off, or have been found not to pay.
  bool prefetching() const;

  CacheCounts counts() const;
  SlotCounts slot_counts() const;
  int slots() const { return table_.size(); }
  int slots_for_steps() const;  // whatever a feed does
  int slots_used() const;
  std::string check() const;  // empty, or what is wrong with the bookkeeping
  std::string take_notice();  // once each

 private:
  using Clock = std::chrono::steady_clock;
  enum class Source : int { step, feed, hint, expected, warm };  // the first goes first
  static constexpr size_t SOURCES = 5;
  struct Read {
    Read(Key k, const Lease& l, Source s) : key(k), lease(l), source(s), urgency(s) {}

    const Key key;
    const Lease lease;
    const Source source;  // that began it
    Source urgency;       // of whoever needs it most by now
    Arrival arrival;
    int begun = 0;  // pieces
  };

  void stop();
  void read_forever();
  Read* next_read(std::unique_lock<std::mutex>&);
  bool begin_something();
  Read* next_waiting() const;
  void begin(Key, const Lease&, Source);
  void hurry(int slot, Source);
  std::deque<Read*>& waiting(Source urgency) { return waiting_[size_t(urgency)]; }
  int reading(Source urgency) const { return reading_[size_t(urgency)]; }
  int under_way(Source source) const { return pieces_[size_t(source)]; }
  bool a_reader_stays_free() const;
  bool step_needs_nothing() const;
  bool may_feed() const { return feed_.may_start() && step_needs_nothing(); }
  bool may_prefetch() const;
  bool may_expect() const;
  bool may_warm() const;
  bool may_read_more() const { return may_feed() || may_prefetch() || may_expect() || may_warm(); }
  void unstick();
  void drop_expected();
  void feed_gave_room(std::unique_lock<std::mutex>&);
  void take_missing();
  void take_hint();
  void take_expected();
  void take_warm();
  bool load(Key, Why, Lease*, bool for_feed = false);
  void read_piece(Read&, std::unique_lock<std::mutex>&);
  void arrived(Read&, const std::string& error, std::unique_lock<std::mutex>&);

  const Catalog& catalog_;
  const CacheOptions options_;
  std::string notice_;  // about memory; the drives have their own
  Arena arena_;
  Blocks blocks_;
  SlotTable table_;

  mutable std::mutex mutex_;  // guards everything below, and table_
  std::condition_variable work_, fed_;  // something to read; something for the feed's caller
  std::list<Read> reads_;  // that wait or are under way
  Hints hints_;
  Clock::time_point hints_from_;  // when hints may be taken up
  Trial trial_;
  bool sweep_ = false;  // the step is one
  struct Answer {
    Waiter* waiter = nullptr;
    int tag = 0;
  };
  std::vector<Answer> answers_;  // of each slot: who waits for its load
  Waiter* room_waiter_ = nullptr;
  bool in_step_ = false;
  bool demanding_ = false;  // between begin_step and demands_made
  bool hints_stuck_ = false;  // the first hint found no slot, and none has become free since
  bool stopping_ = false;
  std::array<int, SOURCES> reading_{};  // of each urgency: blocks that wait or are under way
  std::array<std::deque<Read*>, SOURCES> waiting_;  // those with pieces that nobody has taken
  std::array<int, SOURCES> pieces_{};               // of each source: pieces under way
  int idle_ = 0;                                    // readers that sleep
  Feed feed_;
  std::deque<Key> expected_;          // yet to be read, in the order of the file
  std::vector<Key> expected_marks_;   // all of them, which the table spares
  bool expected_stuck_ = false;       // as hints_stuck_
  std::deque<Key> warm_;           // yet to be read, in the order of the file
  std::vector<Key> warm_order_;    // all of them, as they were given
  int reading_warm_ = 0;           // blocks begun for it, and not here yet
  CacheCounts counts_;
  std::vector<std::thread> readers_;
};

}  // namespace thimble
