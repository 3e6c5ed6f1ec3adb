#include "kernels/experts/host/step.h"

#include <algorithm>
#include <chrono>
#include <limits>

namespace thimble {
namespace {

constexpr int MOST_ACTIVE = 32;  // jobs being computed at once: enough to feed many cores, few enough to bound their memory
constexpr int COMBINE_COLUMNS = 256;
static_assert(MOST_ACTIVE < Workers::MOST_OPEN, "every active job needs a place on the board");

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

// The last piece of work of a step: a tile is one token's strip of outputs.
class Step::Combine : public Work {
 public:
  explicit Combine(Step& step) : step_(step) {}

  int strips() const { return (step_.catalog_.shape.latent + COMBINE_COLUMNS - 1) / COMBINE_COLUMNS; }

  void run(int tile) override {
    const int row = tile / strips(), latent = step_.catalog_.shape.latent;
    const int begin = tile % strips() * COMBINE_COLUMNS, count = std::min(COMBINE_COLUMNS, latent - begin);
    float* out = step_.out_ + int64_t(row) * latent + begin;
    if (step_.bad_[size_t(row)].load(std::memory_order_relaxed)) {
      std::fill(out, out + count, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    double total[COMBINE_COLUMNS] = {};
    for (int rank = 0; rank < step_.top_k_; rank++) {
      const size_t at = size_t(row) * size_t(step_.top_k_) + size_t(rank);
      const double weight = step_.weights_[at];
      const float* y = step_.results_[at] + begin;
      for (int j = 0; j < count; j++) total[j] += weight * y[j];
    }
    for (int j = 0; j < count; j++) out[j] = float(total[j]);
  }

  void finish() override {
    step_.done_.store(true);
    step_.workers_.signal();
  }

 private:
  Step& step_;
};

Step::Step(const Catalog& catalog, Cache& cache, Workers& workers, const Kernels& kernels)
    : catalog_(catalog),
      cache_(cache),
      workers_(workers),
      kernels_(kernels),
      heat_(catalog.layers, catalog.experts),
      context_(new Job::Context{catalog, kernels, inputs_, workers, bad_, [this](Job& job) { finished(job); }}),
      job_of_expert_(size_t(catalog.experts), -1),
      combine_(new Combine(*this)) {}

Step::~Step() = default;

std::string Step::run(int layer, int rows, int top_k, const int32_t* ids, const float* weights, const float* x,
                      float* out) {
  partner_ = nullptr;
  weights_ = weights;
  out_ = out;
  return run_call(layer, rows, top_k, ids, x);
}

std::string Step::run_shared(int layer, int rows, int top_k, const int32_t* ids, const float* x, float* y,
                             Partner& partner) {
  partner_ = &partner;
  shared_y_ = y;
  const std::string error = run_call(layer, rows, top_k, ids, x);
  void_bad_rows();
  return error;
}

void Step::retire() {
  for (const Lease& lease : lent_) cache_.release(lease);
  lent_.clear();
}

std::string Step::run_call(int layer, int rows, int top_k, const int32_t* ids, const float* x) {
  const int64_t begun = now_ns();
  workers_.begin();
  layer_ = layer;
  rows_ = rows;
  top_k_ = top_k;
  ids_ = ids;
  x_ = x;
  done_.store(false);
  error_.clear();
  make_jobs();
  cache_.begin_step(layer, rows);
  demand_all();
  cache_.demands_made();
  int64_t waited = 0;
  while (!done_.load()) {
    const uint64_t seen = workers_.signals();
    if (workers_.help() || done_.load()) continue;
    const int64_t idle = now_ns();
    const bool for_disk = computing_.load() == 0;
    workers_.wait(seen);
    if (for_disk) waited += now_ns() - idle;
  }
  workers_.end();
  cache_.end_step(waited);
  times_.disk_wait_ns += waited;
  times_.total_ns += now_ns() - begun;
  return error_;
}

// Quantises every row once and gathers the rows of each expert. Rows that are not finite have no jobs.
void Step::make_jobs() {
  const int latent = catalog_.shape.latent;
  inputs_.resize(rows_, latent);
  if (int(bad_.size()) < rows_) bad_ = std::vector<std::atomic<bool>>(size_t(rows_));
  job_count_ = 0;
  size_t pairs = 0;
  for (int row = 0; row < rows_; row++) {
    const bool finite = inputs_.set(row, x_ + int64_t(row) * latent);
    bad_[size_t(row)].store(!finite, std::memory_order_relaxed);
    if (!finite) continue;
    for (int rank = 0; rank < top_k_; rank++) {
      const int expert = ids_[int64_t(row) * top_k_ + rank];
      int& number = job_of_expert_[size_t(expert)];
      if (number < 0) {
        number = int(job_count_++);
        if (jobs_.size() < job_count_) jobs_.push_back(std::make_unique<Job>(*context_));
        jobs_[size_t(number)]->key = layer_ * catalog_.experts + expert;
        jobs_[size_t(number)]->rows.clear();
      }
      Job& job = *jobs_[size_t(number)];
      if (job.rows.empty() || job.rows.back() != row) {  // an expert named twice by a token is computed once
        job.rows.push_back(row);
        pairs++;
      }
    }
  }
  if (!partner_) y_.resize(std::max(y_.size(), pairs * size_t(latent)));
  float* y = partner_ ? shared_y_ : y_.data();
  for (size_t number = 0; number < job_count_; number++) {
    jobs_[number]->results = y;
    y += jobs_[number]->rows.size() * size_t(latent);
  }
  results_.resize(size_t(rows_) * size_t(top_k_));
  job_of_result_.resize(results_.size());
  for (int row = 0; row < rows_; row++) {
    if (bad_[size_t(row)].load(std::memory_order_relaxed)) continue;
    for (int rank = 0; rank < top_k_; rank++) {
      const size_t at = size_t(row) * size_t(top_k_) + size_t(rank);
      job_of_result_[at] = job_of_expert_[size_t(ids_[at])];
      const Job& job = *jobs_[size_t(job_of_result_[at])];
      const auto found = std::lower_bound(job.rows.begin(), job.rows.end(), row);
      results_[at] = job.results + (found - job.rows.begin()) * latent;
    }
  }
  for (size_t number = 0; number < job_count_; number++)
    job_of_expert_[size_t(jobs_[number]->key % catalog_.experts)] = -1;
}

// Leases all that is in RAM before anything may be evicted, then asks for the rest in the order of the file.
void Step::demand_all() {
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_.clear();
  ready_.clear();
  active_ = 0;
  own_.clear();
  const bool decode = !is_sweep(rows_);
  for (int number = 0; number < int(job_count_); number++) {
    Job& job = *jobs_[size_t(number)];
    if (decode) heat_.named(job.key);
    if (partner_ && int(own_.size()) < partner_->room() && partner_->own(job.key)) {
      own_.push_back(number);
      continue;
    }
    const Why why = why_named(int64_t(job.rows.size()), rows_);
    (cache_.look_up(job.key, why, &job.lease) ? ready_ : waiting_).push_back(number);
  }
  if (decode) heat_.step();
  left_ = int(job_count_ - own_.size());
  std::sort(waiting_.begin(), waiting_.end(), [&](int a, int b) { return jobs_[size_t(a)]->key < jobs_[size_t(b)]->key; });
  if (partner_) lend();
  if (left_ == 0) count_down(0);
  pump();
  if (partner_) partner_->demanded();
  workers_.signal();
}

// Under mutex_: the partner's share of the experts in RAM, and where it finds every result. One slot is never lent, nor one that a
// feed may hold, so that what waits for room gets some.
void Step::lend() {
  const int most = std::min(int(ready_.size()), cache_.slots_for_steps() - 1);
  const int count = std::min(most, partner_->share(int(ready_.size()), int(waiting_.size()), int(own_.size())));
  std::vector<int> item_of_job(job_count_, -1);
  items_.clear();
  for (const int number : own_) {
    const Key key = jobs_[size_t(number)]->key;
    item_of_job[size_t(number)] = int(items_.size());
    items_.push_back({key, partner_->own(key), true});
  }
  for (int taken = 0; taken < count; taken++, left_--) {
    const int number = ready_.back();
    ready_.pop_back();
    const Job& job = *jobs_[size_t(number)];
    item_of_job[size_t(number)] = int(items_.size());
    items_.push_back({job.key, cache_.memory(job.lease), false});
    lent_.push_back(job.lease);
  }
  const int32_t of_nan = -1 - rows_ * top_k_;
  source_.assign(results_.size(), of_nan);
  for (size_t at = 0; at < source_.size(); at++) {
    if (bad_[at / size_t(top_k_)].load(std::memory_order_relaxed)) continue;
    const int item = item_of_job[size_t(job_of_result_[at])];
    source_[at] = item >= 0 ? item : int32_t(-1 - (results_[at] - shared_y_) / catalog_.shape.latent);
  }
  partner_->begin(items_, source_);
}

// A token whose h overflowed in one of the workers' experts: its results say so to the partner.
void Step::void_bad_rows() {
  for (size_t number = 0; number < job_count_; number++) {
    const Job& job = *jobs_[number];
    for (size_t at = 0; at < job.rows.size(); at++) {
      if (!bad_[size_t(job.rows[at])].load(std::memory_order_relaxed)) continue;
      float* y = job.results + at * size_t(catalog_.shape.latent);
      std::fill(y, y + catalog_.shape.latent, std::numeric_limits<float>::quiet_NaN());
    }
  }
}

// Under mutex_: asks for blocks as long as there is room, and starts what is ready.
void Step::pump() {
  while (!waiting_.empty()) {
    const int number = waiting_.front();
    Job& job = *jobs_[size_t(number)];
    const int coming = left_ - active_ - int(waiting_.size() + ready_.size());
    const bool alone = active_ + coming == 0 && ready_.empty();
    const Why why = why_named(int64_t(job.rows.size()), rows_);
    const Cache::Found found = cache_.demand(job.key, why, alone, this, number, &job.lease);
    if (found == Cache::Found::no_room) break;
    waiting_.pop_front();
    if (found == Cache::Found::ready) ready_.push_back(number);
  }
  for (; !ready_.empty() && active_ < MOST_ACTIVE; active_++) {
    Job& job = *jobs_[size_t(ready_.front())];
    ready_.pop_front();
    computing_.fetch_add(1);
    job.start(cache_.memory(job.lease));
  }
}

void Step::finished(Job& job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    cache_.release(job.lease);
    active_--;
    computing_.fetch_sub(1);
    count_down(1);
    pump();
  }
  workers_.signal();
}

// Under mutex_: after the last job, adds up; or, if a block could not be had, only ends.
void Step::count_down(int jobs) {
  left_ -= jobs;
  if (left_ > 0) return;
  if (!error_.empty() || rows_ == 0 || partner_) {
    done_.store(true);
  } else {
    combine_->prepare(rows_ * combine_->strips());
    workers_.publish(*combine_, true);
  }
}

void Step::arrived(int tag, const std::string& error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error.empty()) {
      ready_.push_back(tag);
    } else {
      if (error_.empty()) error_ = error;
      const int dropped = int(waiting_.size());
      waiting_.clear();
      count_down(1 + dropped);
    }
    pump();
  }
  workers_.signal();
}

void Step::room() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    pump();
  }
  workers_.signal();
}

}  // namespace thimble
