// What the cache does for a feed (feed.h), under its lock.

#include <algorithm>
#include <cassert>
#include <utility>

#include "kernels/experts/host/cache.h"

namespace thimble {

bool Cache::begin_feed(int layer, const int32_t* counts, int64_t tokens, int ahead) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    assert(!feed_.open() || (counts && feed_.guessed() && feed_.first() == layer * catalog_.experts));
    if (table_.size() < 2) return false;
    const Key first = layer * catalog_.experts;
    if (!counts) {
      feed_.guess(table_, first, catalog_.experts, std::min(ahead, table_.size() / 2));
      return true;
    }
    if (!expected_marks_.empty() && expected_marks_.front() / catalog_.experts == layer) drop_expected();
    int hits = 0;
    counts_.misses += feed_.begin(table_, first, catalog_.experts, counts, tokens, std::min(ahead, table_.size() / 2), &hits);
    counts_.hits += hits;
    counts_.sweep_blocks += hits;  // of what a guess has handed out
  }
  work_.notify_all();
  return true;
}

int Cache::take(int64_t timeout_ns, int most, Feed::Block* out, std::string* error) {
  std::unique_lock<std::mutex> lock(mutex_);
  assert(feed_.open());
  const Clock::time_point begun = Clock::now(), until = begun + std::chrono::nanoseconds(timeout_ns);
  bool waited = false, late = false;
  int count = 0;
  for (;;) {
    *error = feed_.error();
    if (!error->empty()) break;
    int hits = 0, lost = 0;
    count = feed_.take(table_, out, most, &hits, &lost);
    counts_.hits += hits;
    counts_.misses += lost;
    if (!feed_.guessed()) counts_.sweep_blocks += count;
    if (count || feed_.over() || feed_.waits_for_return()) break;
    if (late) {
      *error = catalog_.name(feed_.awaited(table_)) + ": it has not come in time; the disk may have failed";
      break;
    }
    feed_.try_again();  // this time nothing else of the feed is left to wait for
    if (may_feed()) work_.notify_all();
    waited = true;
    late = fed_.wait_until(lock, until) == std::cv_status::timeout;
  }
  if (waited) counts_.sweep_wait_ns += std::chrono::nanoseconds(Clock::now() - begun).count();
  return error->empty() ? count : -1;
}

bool Cache::feed_over() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return feed_.over();
}

bool Cache::give_back(const int64_t* numbers, int count) {
  std::unique_lock<std::mutex> lock(mutex_);
  bool all = true;
  for (int i = 0; i < count; i++) all &= feed_.give_back(table_, numbers[i]);
  feed_gave_room(lock);
  return all;
}

void Cache::end_feed() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!feed_.over()) drop_expected();
  feed_.end(table_);
  feed_gave_room(lock);
}

// Called with the lock, left without.
void Cache::feed_gave_room(std::unique_lock<std::mutex>& lock) {
  unstick();
  Waiter* const step = std::exchange(room_waiter_, nullptr);
  const bool more = !step && may_read_more();
  lock.unlock();
  if (step) step->room();
  if (more) work_.notify_all();
}

void Cache::expect(const Key* keys, size_t count) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    drop_expected();
    if (options_.prefetch == Prefetching::off) return;
    expected_marks_.assign(keys, keys + count);
    std::sort(expected_marks_.begin(), expected_marks_.end());
    expected_.assign(expected_marks_.begin(), expected_marks_.end());
    for (const Key key : expected_marks_) table_.want(key, Wanted::next);
  }
  work_.notify_all();
}

void Cache::drop_expected() {
  for (const Key key : expected_marks_) table_.want(key, Wanted::no);
  expected_marks_.clear();
  expected_.clear();
}

// Not while a step leases its hits, waits for room, or reads.
bool Cache::step_needs_nothing() const {
  return !demanding_ && !room_waiter_ && reading(Source::step) == 0;
}

bool Cache::may_expect() const {
  return !expected_.empty() && !expected_stuck_ && !feed_.stuck() && step_needs_nothing() && a_reader_stays_free();
}

// Turns the feed's next block into a read, unless it is here by now, or on its way.
void Cache::take_missing() {
  const Key key = feed_.missing();
  const Why why = feed_.why_missing();
  Lease lease;
  if (const Slot* slot = table_.find(key)) {
    const bool ready = slot->state == State::ready;
    table_.lease(key, &lease, why);
    feed_.started(table_, lease, ready);
    if (ready)
      fed_.notify_one();
    else
      hurry(lease.slot, Source::feed);
    return;
  }
  if (!load(key, why, &lease, true) && !(feed_.missing_alone() && load(key, Why::demand, &lease, true))) {
    feed_.found_no_slot(table_);
    return;
  }
  feed_.started(table_, lease, false);
  begin(key, lease, Source::feed);
}

void Cache::take_expected() {
  const Key key = expected_.front();
  Lease lease;
  if (!table_.find(key)) {
    expected_stuck_ = !load(key, Why::expected, &lease);
    if (expected_stuck_) return;
    begin(key, lease, Source::expected);
  }
  expected_.pop_front();
}

}  // namespace thimble
