// A layer's blocks for whoever reads a prompt on another device (a sweep): each expert that the piece names is handed out once,
// leased, those in RAM first in the order of the file, the others as they arrive. This is the list of what is where; it owns no
// thread, lock or memory. The cache holds its lock around every call, its readers take from here what to read, and its
// functions for a feed are in cache_feed.cpp.
//
//   resident (in RAM, not leased) --------------------------------> out (leased to the caller) --> returned
//        | evicted by a step                                         ^
//        v                                                           |
//   missing (in the order of the file) --> coming (leased) --> arrived (leased)
//
// Before it is known what the piece names, a feed may be guessed: it hands out those that are in RAM, of all experts. begin() of
// the same layer then says what is named; what is out stays out, and nothing is handed out twice.
//
// Few slots are enough: no more than `most` blocks are leased at once, coming and arrived ones included, and half of that may
// be read ones, so that neither kind keeps the other out. Of the residents none is leased before its turn; the table spares
// them (slots.h), and what a step needs so badly that it takes one all the same is read again.
//
// A feed and steps. A feed is no step, and stays open over any number of them: steps of other sequences run between two calls
// of take(), on the same thread, whatever is leased, read and handed out then.
//   slots      the feed leaves half of the slots to steps, and a step lends no more to its partner than is left. So a step
//              has a slot whatever the feed holds, and the feed has one whatever a partner keeps.
//   disk       a block that a step demands is read before all that the feed waits for. A read for the feed is not begun
//              while a step asks for its blocks, waits for room, or one of its blocks waits or is read. After the feed come
//              hints, expected blocks, warm ones.
//   one block  wanted by both is read once.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "kernels/experts/host/slots.h"
#include "kernels/experts/host/sweep.h"

namespace thimble {

class Feed {
 public:
  struct Block {
    Key key;
    Lease lease;
    int64_t number;  // what the caller gives back; never used twice
  };

  bool open() const { return open_; }
  int most() const { return open_ ? most_ : 0; }
  const std::string& error() const { return error_; }

  // All experts of a layer that are in RAM may be named: they are handed out, and nothing is read.
  void guess(SlotTable&, Key first, int experts, int most);
  bool guessed() const { return guessed_; }
  Key first() const { return first_; }
  // counts[experts]: how many of so many tokens name each. After a guess, its blocks that are out count: *hits of them are
  // named. Returns how many blocks are not in RAM.
  int begin(SlotTable&, Key first, int experts, const int32_t* counts, int64_t tokens, int most, int* hits);
  // Ends what is leased; blocks on their way may arrive.
  void end(SlotTable&);

  // For the readers: whether the block missing() is to be had now, and what came of it.
  bool may_start() const {
    return open_ && !stuck_ && error_.empty() && !missing_.empty() && read_ < most_read() && held() < most_;
  }
  Key missing() const { return missing_.front(); }
  Why why_missing() const { return why(missing_.front()); }
  // Nothing else may be waited for: it must get a slot if any can be had.
  bool missing_alone() const { return resident_.empty() && coming_.empty() && arrived_.empty(); }
  void started(SlotTable&, const Lease&, bool ready);
  // A block that a step has brought meanwhile, which needs none, comes first then.
  void found_no_slot(const SlotTable&);
  bool stuck() const { return stuck_; }
  void try_again() { stuck_ = false; }
  // A read has ended. Whether it was for the feed; if it failed, its lease is no more.
  bool arrived(const Lease&, Key, const std::string& error);

  // For the caller: leases and gives out up to `most` blocks. *hits and *lost: of the residents, and of those evicted since.
  int take(SlotTable&, Block* out, int most, int* hits, int* lost);
  bool over() const { return resident_.empty() && missing_.empty() && coming_.empty() && arrived_.empty(); }
  Key awaited(const SlotTable&) const;  // if it is not over, what it waits for
  // Nothing more can come before the caller returns something.
  bool waits_for_return() const;
  bool give_back(SlotTable&, int64_t number);

 private:
  struct Out {
    Lease lease;
    Key key;
    bool read, returned;
  };

  Why why(Key key) const { return why_named(counts_[size_t(key - first_)], tokens_); }
  int held() const { return read_ + resident_out_; }
  int most_read() const { return most_ > 1 ? most_ / 2 : 1; }
  int most_resident() const { return most_ > 1 ? most_ - most_read() : 1; }
  void hand_out(Block* to, Key, const Lease&, bool read);

  bool open_ = false, guessed_ = false, stuck_ = false;
  std::string error_;
  Key first_ = 0;
  int64_t tokens_ = 0;
  std::vector<int32_t> counts_;
  int most_ = 0;
  std::deque<Key> resident_, missing_;
  std::vector<Lease> coming_;
  std::deque<Block> arrived_;
  std::vector<Out> out_;
  int64_t first_number_ = 1;  // of out_
  int read_ = 0, resident_out_ = 0;  // leased blocks that were read for the feed, and the others
};

}  // namespace thimble
