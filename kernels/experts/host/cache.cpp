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
// Pieces of hinted blocks that are under way at once, and hints that are begun beside blocks that somebody waits for: enough to
// keep a drive busy, few enough for the next layer's blocks not to wait for long.
constexpr int AHEAD = 5, BESIDE = 2;

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
      blocks_(catalog, options.drives, options.piece_bytes),
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
      hurry(lease->slot, Source::step);
    } else if (load(key, alone ? Why::demand : why, lease)) {
      begin(key, *lease, Source::step);
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

bool Cache::lease_if_ready(Key key, Lease* lease) {
  std::lock_guard<std::mutex> lock(mutex_);
  return table_.hold(key, lease);
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
  return under_way(Source::hint) + under_way(Source::expected) + under_way(Source::warm) < std::max(1, options_.readers - 1);
}

bool Cache::may_prefetch() const {
  if (hints_.empty() || hints_stuck_ || reading(Source::feed) || under_way(Source::hint) >= AHEAD || !a_reader_stays_free())
    return false;
  const bool all_begun = !demanding_ && !room_waiter_ && waiting_[size_t(Source::step)].empty();
  return step_needs_nothing() || (all_begun && reading(Source::hint) < BESIDE);
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
  int loading = 0;
  for (int slot = 0; slot < table_.size(); slot++) loading += table_.at(slot).state == State::loading;
  if (wrong.empty() && loading != int(reads_.size()))
    wrong = std::to_string(loading) + " slots are loading, but " + std::to_string(reads_.size()) + " reads wait or are under way";
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
  while (Read* read = next_read(lock)) read_piece(*read, lock);
}

// Waits for a block with a piece to read. Null when the cache is closing; blocks still demanded then have nobody who waits for
// them.
Cache::Read* Cache::next_read(std::unique_lock<std::mutex>& lock) {
  while (!stopping_) {
    if (Read* read = next_waiting()) return read;
    if (begin_something()) continue;
    idle_++;
    if (may_prefetch())
      work_.wait_until(lock, hints_from_);
    else
      work_.wait(lock);
    idle_--;
  }
  return nullptr;
}

Cache::Read* Cache::next_waiting() const {
  for (size_t urgency = 0; urgency < SOURCES; urgency++) {
    if (waiting_[urgency].empty()) continue;
    const bool ahead = Source(urgency) > Source::feed;
    if (ahead && may_feed()) return nullptr;  // whose blocks are yet to be begun
    if (Source(urgency) == Source::hint && under_way(Source::hint) >= AHEAD) continue;
    return !ahead || a_reader_stays_free() ? waiting_[urgency].front() : nullptr;
  }
  return nullptr;
}

// False if there is nothing to begin now. True says only that it is worth looking again.
bool Cache::begin_something() {
  if (may_feed())
    take_missing();
  else if (may_prefetch() && hints_from_ <= Clock::now())
    take_hint();
  else if (may_expect())
    take_expected();
  else if (may_warm())
    take_warm();
  else
    return false;
  return true;
}

void Cache::begin(Key key, const Lease& lease, Source source) {
  Read& read = reads_.emplace_back(key, lease, source);
  reading_[size_t(source)]++;
  waiting(source).push_back(&read);
}

// A block on its way, for somebody who needs it more than whoever it was begun for.
void Cache::hurry(int slot, Source urgency) {
  const auto read = std::find_if(reads_.begin(), reads_.end(), [&](const Read& each) { return each.lease.slot == slot; });
  assert(read != reads_.end());
  if (read->urgency <= urgency) return;
  auto& before = waiting(read->urgency);
  if (const auto at = std::find(before.begin(), before.end(), &*read); at != before.end()) {
    before.erase(at);
    waiting(urgency).push_back(&*read);
  }
  reading_[size_t(read->urgency)]--;
  reading_[size_t(urgency)]++;
  read->urgency = urgency;
}

// Turns the first hint into a read, unless the block is here by now. If no slot can be had for it, hints wait for one.
void Cache::take_hint() {
  const Key key = hints_.front();
  Lease lease;
  if (!table_.find(key)) {
    hints_stuck_ = !load(key, Why::prefetch, &lease);
    if (hints_stuck_) return;
    begin(key, lease, Source::hint);
  }
  hints_.pop();
}

// The lease is the cache's own, until the block is there. When slots run out the rest is left where it is.
void Cache::take_warm() {
  if (!table_.free()) {
    warm_.clear();
    if (!reading_warm_) table_.used_before(std::exchange(warm_order_, {}));
    return;
  }
  const Key key = warm_.front();
  warm_.pop_front();
  Lease lease;
  if (table_.find(key) || !load(key, Why::warm, &lease)) return;
  reading_warm_++;
  begin(key, lease, Source::warm);
}

// Called and left with the lock, which is open while the disk is read.
void Cache::read_piece(Read& read, std::unique_lock<std::mutex>& lock) {
  const int piece = read.begun++;
  if (piece == 0) blocks_.begin(read.key, arena_.slot(read.lease.slot), &read.arrival);
  if (read.begun == blocks_.pieces()) {
    auto& line = waiting(read.urgency);
    line.erase(std::find(line.begin(), line.end(), &read));
  }
  const size_t source = size_t(read.source);
  pieces_[source]++;
  if (idle_ && (next_waiting() || may_read_more())) work_.notify_one();  // who takes the next piece wakes the next reader
  lock.unlock();
  std::string error;
  const bool over = blocks_.read_piece(read.arrival, piece, &error);
  if (over && options_.read_delay_us) std::this_thread::sleep_for(std::chrono::microseconds(options_.read_delay_us));
  lock.lock();
  pieces_[source]--;
  if (over) arrived(read, error, lock);
}

// The same; the lock is open while waiters are told. The read is no more after it.
void Cache::arrived(Read& read, const std::string& error, std::unique_lock<std::mutex>& lock) {
  const Key key = read.key;
  const Lease lease = read.lease;
  const bool demanded = read.urgency <= Source::feed, warm = read.source == Source::warm;
  (read.source <= Source::feed ? counts_.demand_read_bytes : counts_.prefetch_read_bytes) += catalog_.shape.block_bytes;
  reading_[size_t(read.urgency)]--;
  reads_.remove_if([&](const Read& each) { return &each == &read; });
  unstick();
  const bool expected = table_.arrived(lease, error.empty());
  assert(expected);
  (void)expected;
  if (warm && error.empty()) table_.release(lease);
  reading_warm_ -= warm;
  if (warm && warm_.empty() && !reading_warm_) table_.used_before(std::exchange(warm_order_, {}));
  const Answer answer = std::exchange(answers_[size_t(lease.slot)], Answer{});
  const bool fed = feed_.arrived(lease, key, error);
  // Room can have come about only if nobody leases what arrived.
  Waiter* const waits_for_room = (answer.waiter || fed) && error.empty() ? nullptr : std::exchange(room_waiter_, nullptr);
  const bool more = demanded && may_read_more();
  lock.unlock();
  if (more) work_.notify_all();
  if (fed) fed_.notify_one();
  if (answer.waiter) answer.waiter->arrived(answer.tag, error);
  if (waits_for_room) waits_for_room->room();
  lock.lock();
}

}  // namespace thimble
