#include "kernels/experts/device/turns.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace thimble {
namespace {

using Clock = std::chrono::steady_clock;

int64_t ns_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(b - a).count();
}

void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

uint32_t load(const uint32_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

void publish(uint32_t* flag, uint32_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }

}  // namespace

Turns::Turns(Step& step, Cache& cache, const Catalog& catalog, const TurnMemory& memory, const TurnShape& shape)
    : step_(step), cache_(cache), catalog_(catalog), memory_(memory), shape_(shape), turn_(load(memory.posted)) {
  float* nan = memory_.results + int64_t(shape_.rows) * shape_.top_k * catalog_.shape.latent;
  std::fill(nan, nan + catalog_.shape.latent, std::numeric_limits<float>::quiet_NaN());
}

void Turns::copy_through(const CudaDriver& driver, CudaDriver::Handle context, Route route, CudaDriver::Address staging,
                         int lanes) {
  lanes_ = std::make_unique<CopyLanes>(driver, context, lanes);
  route_ = route;
  staging_ = staging;
}

void Turns::set_share(int fixed, double initial) {
  fixed_share_ = fixed;
  share_ = initial;
  carry_ = 0;
}

int Turns::serve(int turns, int64_t timeout_us) {
  if (lanes_) lanes_->bind();
  int64_t host_ns = 0;
  Clock::time_point finished = Clock::now();
  for (int served = 0; served < turns; served++) {
    while (load(memory_.posted) == turn_) {
      // The GPU stops before it would post, so a stop that is seen here is of a turn that was answered too late.
      if (load(memory_.stopped) && load(memory_.posted) == turn_) return served;
      if (ns_between(finished, Clock::now()) > timeout_us * 1000) {  // or this thread has not run for so long
        if (load(memory_.posted) != turn_) break;
        if (load(memory_.stopped)) continue;
        throw std::runtime_error("the GPU has not reached its next layer in time");
      }
      rest();
    }
    const Clock::time_point seen = Clock::now();
    turn_++;
    if (served) {
      times_.idle_ns += ns_between(finished, seen);
      adapt(host_ns);
    }
    step_.retire();
    const Clock::time_point began = seen_ = Clock::now();
    const std::string error =
        step_.run_shared(layer(), shape_.rows, shape_.top_k, memory_.ids, memory_.x, memory_.results, *this);
    if (!error.empty()) throw std::runtime_error(error);
    publish(memory_.finished, turn_);
    finished = Clock::now();
    host_ns = ns_between(began, finished);
    times_.turns++;
    times_.host_ns += host_ns;
  }
  return turns;
}

void Turns::retire() {
  if (lanes_) lanes_->drain();
  step_.retire();
  turn_ = load(memory_.posted);
}

int Turns::share(int ready, int waiting, int own) {
  const int most = std::min(ready, shape_.items - own);
  const auto take = [&](int taken) {
    taken_ = taken;
    left_ = ready + waiting - taken;
    comparable_ = ready > 0 && !waiting;
    times_.host_experts += left_;
    return taken;
  };
  if (fixed_share_ >= 0) return take(std::min(most, fixed_share_));
  // Fractions are carried to the next turn, so that a share of 8.4 is 8 and 9 in turn.
  const double wanted = share_ * double(ready) / double(std::max(1, ready + waiting + own)) + carry_;
  const int taken = std::min(most, std::max(0, int(wanted)));
  carry_ = std::min(1.0, std::max(0.0, wanted - taken));
  return take(taken);
}

void Turns::begin(const std::vector<Item>& items, const std::vector<int32_t>& source) {
  const int count = int(items.size());
  int32_t word[2] = {count, 0};
  std::memcpy(memory_.plan + shape_.plan_count, word, sizeof word);
  const bool copies = route_ != Route::in_place;
  for (int item = 0; item < count; item++) {
    const auto in_place = reinterpret_cast<int64_t>(items[size_t(item)].block);
    const bool own = items[size_t(item)].own;
    times_.vram_experts += own;
    const int64_t staged = int64_t(staging_) + item * catalog_.shape.block_bytes;
    memory_.plan[shape_.plan_table + 2 * item] = copies && !own ? staged : in_place;
    memory_.plan[shape_.plan_table + 2 * item + 1] = route_ == Route::copy_block && !own ? staged : in_place;
    const float scales[2] = {catalog_.up_scales[size_t(items[size_t(item)].key)],
                             catalog_.down_scales[size_t(items[size_t(item)].key)]};
    std::memcpy(memory_.plan + shape_.plan_scale + item, scales, sizeof scales);
  }
  std::memcpy(memory_.plan + shape_.plan_source, source.data(), source.size() * sizeof source[0]);
  times_.gpu_experts += count;
  if (!copies) {
    for (size_t wave = 0; wave < shape_.wave_ends.size(); wave++) publish(memory_.planned + wave * CACHE_LINE / 4, turn_);
    times_.plan_ns += ns_between(seen_, Clock::now());
    return;
  }
  // A wave is announced by the copy stream itself, after its last copy.
  const size_t bytes = size_t(route_ == Route::copy_block ? catalog_.shape.block_bytes : catalog_.shape.down_values);
  int item = 0;
  for (size_t wave = 0; wave < shape_.wave_ends.size(); wave++) {
    for (; item < std::min(count, shape_.wave_ends[wave]); item++)
      if (!items[size_t(item)].own)
        lanes_->copy(staging_ + uint64_t(item) * uint64_t(catalog_.shape.block_bytes), items[size_t(item)].block, bytes);
    lanes_->announce(reinterpret_cast<uint64_t>(memory_.planned) + wave * CACHE_LINE, turn_);
  }
  times_.plan_ns += ns_between(seen_, Clock::now());
}

// Of all rows the first choices first, since those are most often right.
void Turns::demanded() {
  const int next = layer() + 1, lookups = shape_.rows * shape_.top_k;
  if (!shape_.guesses || next >= catalog_.layers) return;
  hints_.clear();
  for (int rank = 0; rank < shape_.hints; rank++) {
    for (int row = 0; row < shape_.rows; row++) {
      const int32_t id = memory_.ids[lookups + row * shape_.top_k + rank];
      if (id < 0) continue;  // no guess
      const Key key = next * catalog_.experts + id;
      if (own(key)) continue;
      if (std::find(hints_.begin(), hints_.end(), key) == hints_.end()) hints_.push_back(key);
    }
  }
  cache_.prefetch(next, hints_.data(), hints_.size());
}

// Both should finish together. Moving d experts to the GPU takes d host experts' time off the host's side and adds d of the
// GPU's to its own: where the GPU waited, that gives d. Where it did not wait it may have been late, by how much is not
// known, and the share goes down by a little; so too where it took all, or it would for ever. A quarter of each step is
// made, since turns differ. A wait for the disk says nothing of how fast either is.
void Turns::adapt(int64_t host_ns) {
  const int64_t waited_ns = *memory_.waited_ns;
  times_.waited_ns += waited_ns;
  if (fixed_share_ >= 0 || !comparable_) return;
  const double waited = double(waited_ns) / double(host_ns);
  if (left_ && waited > 0.03) {
    const double host_expert = 1.0 / left_, gpu_expert = taken_ ? (1.0 - std::min(1.0, waited)) / taken_ : host_expert;
    share_ += 0.25 * std::min(2.0, waited / (host_expert + gpu_expert));
  } else {
    share_ -= 0.05;
  }
  share_ = std::min(double(shape_.items), std::max(0.0, share_));
}

}  // namespace thimble
