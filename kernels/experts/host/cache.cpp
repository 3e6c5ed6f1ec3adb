#include "kernels/experts/host/cache.h"

#include <signal.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace thimble {
namespace {

// A hint often comes just before the step whose own blocks are read first; if no step follows, it is taken up after this.
constexpr auto HINT_WAITS = std::chrono::milliseconds(100);
constexpr int POISON = 0xAB;

std::unique_ptr<Policy> policy_named(const std::string& name, PolicySizes sizes) {
  auto policy = make_policy(name.c_str(), sizes);
  if (!policy) throw std::runtime_error("there is no cache policy \"" + name + "\"");
  return policy;
}

}  // namespace

Cache::Cache(const Catalog& catalog, const CacheOptions& options)
    : catalog_(catalog),
      options_(options),
      arena_(options.slots, catalog.shape.block_bytes, options.lock_memory, &notice_),
      blocks_(catalog, options.drives),
      table_(arena_.slots(), catalog.keys(),
             policy_named(options.policy, {arena_.slots(), catalog.layers, catalog.experts})),
      hints_(catalog.layers),
      trial_(options.prefetch),
      answers_(size_t(arena_.slots())) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the business of the thread that started us
  std::string refused;
  try {
    for (int i = 0; i < options.readers; i++) readers_.emplace_back([this] { read_forever(); });
  } catch (const std::system_error& error) {
    refused = "the system refused a reader thread: " + std::string(error.what());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (refused.empty()) return;
  stop();
  throw std::runtime_error(refused);
}

Cache::~Cache() { stop(); }

void Cache::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (auto& reader : readers_) reader.join();
}

void Cache::begin_step(int layer, int rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  in_step_ = demanding_ = true;
  sweep_ = is_sweep(rows);
  hints_.begin_step(layer);
}

bool Cache::look_up(Key key, Why why, Lease* lease) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Slot* slot = table_.find(key);
  if (!slot || slot->state != State::ready) {
    counts_.misses++;
    return false;
  }
  counts_.hits++;
  return table_.lease(key, lease, why);
}

Cache::Found Cache::demand(Key key, Why why, bool alone, Waiter* waiter, int tag, Lease* lease) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    room_waiter_ = nullptr;
    if (const Slot* slot = table_.find(key)) {
      table_.lease(key, lease, why);
      if (slot->state == State::ready) return Found::ready;
    } else if (load(key, alone ? Why::demand : why, lease)) {
      demands_.push_back({key, *lease, Source::step});
    } else {
      room_waiter_ = waiter;
      return Found::no_room;
    }
    assert(!answers_[size_t(lease->slot)].waiter);
    answers_[size_t(lease->slot)] = {waiter, tag};
  }
  work_.notify_one();
  return Found::coming;
}

void Cache::demands_made() {
  bool more;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    demanding_ = false;
    hints_from_ = Clock::time_point::min();
    more = may_read_more();
  }
  if (more) work_.notify_all();  // readers that wake for nothing take a core from a worker in the middle of a step
}

void Cache::end_step(int64_t waited_ns) {
  bool more;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    in_step_ = demanding_ = false;
    room_waiter_ = nullptr;
    unstick();
    if (!sweep_) trial_.step(waited_ns);
    more = may_read_more();
  }
  if (more) work_.notify_all();
}

void Cache::release(const Lease& lease) {
  bool unstuck;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool released = table_.release(lease);
    assert(released);
    (void)released;
    unstuck = hints_stuck_ || expected_stuck_ || feed_.stuck();
    unstick();
  }
  if (unstuck) work_.notify_one();
}

void Cache::prefetch(int layer, const Key* keys, size_t count) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!trial_.on()) return;
    hints_.set(layer, keys, count);
    if (!in_step_ || demanding_) hints_from_ = Clock::now() + HINT_WAITS;
  }
  work_.notify_all();
}

// Under the lock, as all of the following. One reader is left for what may be demanded next.
bool Cache::a_reader_stays_free() const {
  return reading(Source::hint) + reading(Source::expected) + reading(Source::warm) < std::max(1, options_.readers - 1);
}

bool Cache::may_prefetch() const {
  return !hints_.empty() && !hints_stuck_ && step_needs_nothing() && reading(Source::feed) == 0 && a_reader_stays_free();
}

// Not while a feed reads either: the last of its blocks would come later.
bool Cache::may_warm() const {
  return !warm_.empty() && step_needs_nothing() && reading(Source::feed) == 0 && a_reader_stays_free();
}

// A slot may be had again.
void Cache::unstick() {
  hints_stuck_ = expected_stuck_ = false;
  feed_.try_again();
}

std::vector<Key> Cache::resident() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return table_.resident();
}

void Cache::warm(const Key* keys, size_t count) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t most = std::min(count, size_t(table_.size()));
    warm_order_.assign(keys + (count - most), keys + count);
    warm_.assign(warm_order_.begin(), warm_order_.end());
    std::sort(warm_.begin(), warm_.end());
  }
  work_.notify_all();
}

void Cache::shrink(int slots) {
  std::lock_guard<std::mutex> lock(mutex_);
  assert(slots > 0 && slots <= table_.size() && table_.free() == table_.size());
  arena_.shrink(slots);
  table_ = SlotTable(slots, catalog_.keys(), policy_named(options_.policy, {slots, catalog_.layers, catalog_.experts}));
  answers_.resize(size_t(slots));
}

bool Cache::prefetching() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return trial_.on();
}

CacheCounts Cache::counts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

SlotCounts Cache::slot_counts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return table_.counts();
}

int Cache::slots_for_steps() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return table_.size() - feed_.most();
}

int Cache::slots_used() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return table_.used();
}

std::string Cache::check() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string wrong = table_.check();
  int loading = 0, reading = 0;
  for (const int reads : reading_) reading += reads;
  for (int slot = 0; slot < table_.size(); slot++) loading += table_.at(slot).state == State::loading;
  if (wrong.empty() && loading != reading + int(demands_.size()))
    wrong = std::to_string(loading) + " slots are loading, but " + std::to_string(reading) + " reads are under way and " +
            std::to_string(demands_.size()) + " wait";
  return wrong;
}

std::string Cache::take_notice() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!notice_.empty()) return std::exchange(notice_, "");
  }
  return blocks_.take_notice();
}

// Under the lock. The evicted block's last lease was given back under the lock too, so nobody reads it while it is poisoned.
bool Cache::load(Key key, Why why, Lease* lease, bool for_feed) {
  bool evicted;
  if (!table_.load(key, why, lease, &evicted, for_feed)) return false;
  if (evicted && options_.poison) std::memset(arena_.slot(lease->slot), POISON, size_t(catalog_.shape.block_bytes));
  return true;
}

void Cache::read_forever() {
  std::unique_lock<std::mutex> lock(mutex_);
  Read read;
  while (next_read(lock, &read)) fill(read, lock);
}

// Waits for something to read. False when the cache is closing; blocks still demanded then have nobody who waits for them.
bool Cache::next_read(std::unique_lock<std::mutex>& lock, Read* read) {
  while (!stopping_) {
    if (!demands_.empty()) {
      *read = demands_.front();
      demands_.pop_front();
      return true;
    }
    const bool hinted = may_prefetch();
    if (may_feed()) {
      if (take_missing(read)) return true;
    } else if (hinted && hints_from_ <= Clock::now()) {
      if (take_hint(read)) return true;
    } else if (may_expect()) {
      if (take_expected(read)) return true;
    } else if (may_warm()) {
      if (take_warm(read)) return true;
    } else if (hinted) {
      work_.wait_until(lock, hints_from_);
    } else {
      work_.wait(lock);
    }
  }
  return false;
}

// Turns the first hint into a read, unless the block is here by now. If no slot can be had for it, hints wait for one.
bool Cache::take_hint(Read* read) {
  const Key key = hints_.front();
  if (table_.find(key)) {
    hints_.pop();
    return false;
  }
  *read = {key, {}, Source::hint};
  hints_stuck_ = !load(key, Why::prefetch, &read->lease);
  if (!hints_stuck_) hints_.pop();
  return !hints_stuck_;
}

// The lease is the cache's own, until the block is there. When slots run out the rest is left where it is.
bool Cache::take_warm(Read* read) {
  if (!table_.free()) {
    warm_.clear();
    if (!reading(Source::warm)) table_.used_before(std::exchange(warm_order_, {}));
    return false;
  }
  const Key key = warm_.front();
  warm_.pop_front();
  if (table_.find(key)) return false;
  *read = {key, {}, Source::warm};
  return load(key, Why::warm, &read->lease);
}

// Called and left with the lock, which is open while the disk is read and while waiters are told.
void Cache::fill(const Read& read, std::unique_lock<std::mutex>& lock) {
  reading_[size_t(read.source)]++;
  lock.unlock();
  const std::string error = blocks_.read(read.key, arena_.slot(read.lease.slot));
  if (options_.read_delay_us) std::this_thread::sleep_for(std::chrono::microseconds(options_.read_delay_us));
  lock.lock();
  reading_[size_t(read.source)]--;
  unstick();
  (read.demanded() ? counts_.demand_read_bytes : counts_.prefetch_read_bytes) += catalog_.shape.block_bytes;
  const bool expected = table_.arrived(read.lease, error.empty());
  assert(expected);
  (void)expected;
  const bool warm = read.source == Source::warm;
  if (warm && error.empty()) table_.release(read.lease);
  if (warm && warm_.empty() && !reading(Source::warm)) table_.used_before(std::exchange(warm_order_, {}));
  const Answer answer = std::exchange(answers_[size_t(read.lease.slot)], Answer{});
  const bool fed = feed_.arrived(read.lease, read.key, error);
  // Room can have come about only if nobody leases what arrived.
  Waiter* const waits_for_room = (answer.waiter || fed) && error.empty() ? nullptr : std::exchange(room_waiter_, nullptr);
  const bool more = read.demanded() && may_read_more();
  lock.unlock();
  if (more) work_.notify_all();
  if (fed) fed_.notify_one();
  if (answer.waiter) answer.waiter->arrived(answer.tag, error);
  if (waits_for_room) waits_for_room->room();
  lock.lock();
}

}  // namespace thimble
