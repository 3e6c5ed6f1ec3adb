#include "kernels/experts/host/replay.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <set>
#include <string>
#include <vector>

#include "kernels/experts/host/hints.h"
#include "kernels/experts/host/slots.h"
#include "kernels/experts/host/sweep.h"
#include "kernels/experts/host/trial.h"
#include "kernels/workers/abi.h"

namespace thimble {
namespace {

// Each key once, in the order of first appearance (of ids row by row, as steps do; of guesses rank by rank), and how often.
class Distinct {
 public:
  explicit Distinct(int keys) : seen_(size_t(keys)), times_(size_t(keys)) {}

  void begin() {
    keys.clear();
    mark_++;
  }
  void add(Key key) {
    if (seen_[size_t(key)] != mark_) {
      seen_[size_t(key)] = mark_;
      times_[size_t(key)] = 0;
      keys.push_back(key);
    }
    times_[size_t(key)]++;
  }
  int times(Key key) const { return times_[size_t(key)]; }

  std::vector<Key> keys;

 private:
  std::vector<int64_t> seen_;
  std::vector<int> times_;
  int64_t mark_ = 0;
};

void distinct_of_step(const ReplayTrace& trace, int64_t step, Distinct& found) {
  found.begin();
  for (int64_t i = trace.first[step] * trace.top_k; i < trace.first[step + 1] * trace.top_k; i++)
    found.add(trace.layer[step] * trace.experts + trace.ids[i]);
}

// Belady's optimum: the block leaves whose next use is farthest. It is told that use before each of its uses.
class Belady : public Policy {
 public:
  explicit Belady(PolicySizes sizes) : next_(size_t(sizes.keys())), key_(size_t(sizes.slots)) {}

  void will_be_used(Key key, int64_t step) { coming_[0] = key, coming_[1] = step; }
  void loaded(int slot, Key key, Why) override {
    key_[size_t(slot)] = key;
    enter(slot);
  }
  void used(int slot, Why) override {
    left(slot);
    enter(slot);
  }
  void left(int slot) override { order_.erase({-next_[size_t(key_[size_t(slot)])], slot}); }
  int victim(const Evictable& slots, Key, Why) override {
    for (const auto& [next, slot] : order_)
      if (slots.evictable(slot)) return slot;
    return -1;
  }

 private:
  void enter(int slot) {
    const Key key = key_[size_t(slot)];
    if (coming_[0] == key) next_[size_t(key)] = coming_[1];
    order_.emplace(-next_[size_t(key)], slot);
  }

  int64_t coming_[2] = {NO_KEY, 0};
  std::vector<int64_t> next_;
  std::vector<Key> key_;
  std::set<std::pair<int64_t, int>> order_;
};

// Of every lookup, in the order of the replay: the step in which the same block is looked up next.
std::vector<int64_t> next_uses(const ReplayTrace& trace) {
  Distinct found(trace.layers * trace.experts);
  std::vector<std::pair<Key, int64_t>> lookups;
  for (int64_t step = 0; step < trace.steps; step++) {
    distinct_of_step(trace, step, found);
    for (const Key key : found.keys) lookups.emplace_back(key, step);
  }
  std::vector<int64_t> next(lookups.size()), of_key(size_t(trace.layers) * size_t(trace.experts), trace.steps);
  for (size_t at = lookups.size(); at-- > 0;) {
    next[at] = of_key[size_t(lookups[at].first)];
    of_key[size_t(lookups[at].first)] = lookups[at].second;
  }
  return next;
}

class Replay {
 public:
  Replay(const ReplayTrace& trace, const ReplayOptions& options, int slots, std::unique_ptr<Policy> policy, Belady* belady)
      : trace_(trace), options_(options), table_(slots, trace.layers * trace.experts, std::move(policy)), belady_(belady),
        hints_(trace.layers), trial_(Prefetching(options.prefetch)), distinct_(trace.layers * trace.experts),
        arrives_(size_t(slots)) {
    if (belady) next_ = next_uses(trace);
  }

  ReplayCounts run() {
    for (int64_t step = 0; step < trace_.steps; step++) {
      prefetch_until(now_ + options_.gap_ns);
      guess(step);
      run_step(step);
    }
    const SlotCounts& slots = table_.counts();
    counts_.prefetch_issued = slots.prefetch_issued;
    counts_.prefetch_useful = slots.prefetch_useful;
    counts_.prefetch_wasted = slots.prefetch_wasted;
    counts_.evictions = slots.evictions;
    return counts_;
  }

 private:
  struct Missing {
    Key key;
    int64_t next;
  };

  void guess(int64_t step) {
    if (!trial_.on()) return;
    for (int ahead = 0; ahead < options_.ahead; ahead++) {
      const int layer = trace_.layer[step] + 1 + ahead;
      if (!trace_.guesses[ahead] || layer >= trace_.layers) continue;
      distinct_.begin();
      for (int rank = 0; rank < options_.ranks; rank++)
        for (int64_t row = trace_.first[step]; row < trace_.first[step + 1]; row++)
          if (const int id = trace_.guesses[ahead][row * trace_.top_k + rank]; id >= 0)
            distinct_.add(layer * trace_.experts + id);
      hints_.set(layer, distinct_.keys.data(), distinct_.keys.size());
    }
  }

  // What an idle disk reads ahead up to that time.
  void prefetch_until(double until) {
    while (trial_.on() && !hints_.empty()) {
      while (!on_their_way_.empty() && arrives_[size_t(on_their_way_.front().slot)] <= idle_from_) arrive_first();
      double begin = idle_from_;
      if (int(on_their_way_.size()) >= options_.in_flight)
        begin = std::max(begin, arrives_[size_t(on_their_way_.front().slot)]);
      if (begin >= until) break;
      idle_from_ = begin;
      while (!on_their_way_.empty() && arrives_[size_t(on_their_way_.front().slot)] <= begin) arrive_first();
      const Key key = hints_.front();
      if (table_.find(key)) {
        hints_.pop();
        continue;
      }
      Lease lease;
      bool evicted;
      if (!table_.load(key, Why::prefetch, &lease, &evicted)) {
        if (on_their_way_.empty()) break;
        idle_from_ = arrives_[size_t(on_their_way_.front().slot)];
        continue;
      }
      hints_.pop();
      read(lease, begin);
      on_their_way_.push_back(lease);
    }
    now_ = until;
    while (!on_their_way_.empty() && arrives_[size_t(on_their_way_.front().slot)] <= now_) arrive_first();
  }

  void run_step(int64_t step) {
    distinct_of_step(trace_, step, distinct_);
    const int64_t rows = trace_.first[step + 1] - trace_.first[step];
    hints_.begin_step(trace_.layer[step]);
    idle_from_ = std::max(idle_from_, now_);
    leased_.clear();
    missing_.clear();
    for (const Key key : distinct_.keys) {
      const int64_t next = belady_ ? next_[lookup_++] : 0;
      const Slot* slot = table_.find(key);
      if (slot && slot->state == State::ready)
        take(key, why_named(distinct_.times(key), rows), next);
      else
        missing_.push_back({key, next});
    }
    const int64_t lookups = int64_t(distinct_.keys.size()), hits = lookups - int64_t(missing_.size());
    std::sort(missing_.begin(), missing_.end(), [](const Missing& a, const Missing& b) { return a.key < b.key; });
    int64_t reads = 0;
    double last = 0;
    const double owed = std::max(0.0, disk_free_ - now_ - options_.ahead_ns);
    disk_free_ -= owed;
    const auto behind = on_their_way_;
    for (const Missing& missing : missing_)
      reads += demand(missing, why_named(distinct_.times(missing.key), rows), &last);
    gave_way(behind, owed, double(reads) * options_.read_ns);
    idle_from_ = std::max(idle_from_, options_.beside ? last - options_.late_ns : last);
    const double computing = double(lookups) * options_.expert_ns;
    double end = now_ + computing;
    if (!missing_.empty() && options_.overlapped) end = std::max(end, last + options_.expert_ns);
    if (!missing_.empty() && !options_.overlapped) end = std::max(now_, last) + computing;
    const double waited = end - now_ - computing;
    now_ = end;
    while (!on_their_way_.empty() && arrives_[size_t(on_their_way_.front().slot)] <= now_) arrive_first();
    for (const Lease& lease : leased_) table_.release(lease);
    const double whole = computing + waited + options_.gap_ns;
    if (is_sweep(rows)) {
      counts_.sweep_lookups += lookups;
      counts_.sweep_hits += hits;
      counts_.sweep_reads += reads;
      counts_.sweep_ns += int64_t(whole);
    } else {
      counts_.decode_lookups += lookups;
      counts_.decode_hits += hits;
      counts_.decode_reads += reads;
      counts_.decode_ns += int64_t(whole);
      counts_.decode_waited_ns += int64_t(waited);
      trial_.step(int64_t(waited));
    }
  }

  void take(Key key, Why why, int64_t next) {
    if (belady_) belady_->will_be_used(key, next);
    Lease lease;
    table_.lease(key, &lease, why);
    leased_.push_back(lease);
  }

  // 1 if it is read now, 0 if a prefetch has begun to. *last becomes the time at which the latest block arrives.
  int demand(const Missing& missing, Why why, double* last) {
    if (const Slot* slot = table_.find(missing.key)) {  // on its way
      const double arrives = arrives_[size_t(slot - &table_.at(0))];
      *last = std::max(*last, arrives);
      take(missing.key, why, missing.next);
      return 0;
    }
    if (belady_) belady_->will_be_used(missing.key, missing.next);
    Lease lease;
    bool evicted;
    // More experts than room: those that came first have been computed, as in a step.
    while (!table_.load(missing.key, why, &lease, &evicted)) {
      if (!leased_.empty()) {
        table_.release(leased_.front());
        leased_.pop_front();
      } else if (!on_their_way_.empty()) {
        arrive_first();
      } else {
        why = Why::demand;
      }
    }
    read(lease, now_);
    table_.arrived(lease, true);
    leased_.push_back(lease);
    *last = std::max(*last, arrives_[size_t(lease.slot)]);
    return 1;
  }

  void read(const Lease& lease, double from) {
    disk_free_ = std::max(disk_free_, from) + options_.read_ns;
    arrives_[size_t(lease.slot)] = disk_free_ + options_.late_ns;
  }
  // What was begun ahead comes that much later, but for what was under way when the demands came.
  void gave_way(const std::deque<Lease>& behind, double owed, double by) {
    disk_free_ += owed;
    const double spared = now_ + options_.ahead_ns + options_.late_ns;
    for (const Lease& lease : behind)
      if (double& arrives = arrives_[size_t(lease.slot)]; arrives > spared && table_.at(lease.slot).leases == 0) arrives += by;
  }
  void arrive_first() {
    table_.arrived(on_their_way_.front(), true);
    on_their_way_.pop_front();
  }

  const ReplayTrace& trace_;
  const ReplayOptions& options_;
  SlotTable table_;
  Belady* const belady_;
  Hints hints_;
  Trial trial_;
  Distinct distinct_;
  std::vector<double> arrives_;     // of a slot's read
  std::deque<Lease> on_their_way_;  // prefetches, the first to arrive first
  std::deque<Lease> leased_;
  std::vector<Missing> missing_;
  std::vector<int64_t> next_;
  size_t lookup_ = 0;
  double now_ = 0, disk_free_ = 0;
  double idle_from_ = 0;  // since when a prefetch may begin: no demanded read is under way, and hints are there
  ReplayCounts counts_{};
};

}  // namespace

bool replay(const ReplayTrace& trace, const ReplayOptions& options, const char* policy, int slots, ReplayCounts* counts) {
  const PolicySizes sizes{slots, trace.layers, trace.experts};
  Belady* belady = nullptr;
  std::unique_ptr<Policy> made;
  if (!std::strcmp(policy, "belady")) {
    made.reset(belady = new Belady(sizes));
  } else {
    made = make_policy(policy, sizes);
  }
  if (!made) return false;
  *counts = Replay(trace, options, slots, std::move(made), belady).run();
  return true;
}

}  // namespace thimble

// Replays for each of `sizes` numbers of slots; counts[sizes]. 0 if there is no such policy ("belady" is one here).
THIMBLE_API int thimble_replay(const thimble::ReplayTrace* trace, const thimble::ReplayOptions* options, const char* policy,
                               int sizes, const int* slots, thimble::ReplayCounts* counts) {
  for (int at = 0; at < sizes; at++)
    if (!thimble::replay(*trace, *options, policy, slots[at], counts + at)) return 0;
  return 1;
}
