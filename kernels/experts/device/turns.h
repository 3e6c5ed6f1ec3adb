// The host's side of the hand-off with a CUDA graph (the GPU's is ../handoff.py, which describes the memory and its order).
// Owns no memory that the GPU sees and starts no thread: `serve` runs in the thread that launched the graph, and is one of
// the step's workers while there is something to compute.
//
// A turn is one MoE layer of one token (or batch of tokens):
//
//   GPU   posts ids and x --+                          waits for the plan -> its experts --+--> waits for results -> adds up
//   host                    +-> leases, shares, plans --^   its experts -> results ---------^
//
// Blocks shared with the GPU stay leased until the GPU posts its next turn, which in stream order is after it has read them,
// or until `retire`, for whoever knows that the graph has ended.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "kernels/experts/device/copy_lanes.h"
#include "kernels/experts/device/vram_slots.h"
#include "kernels/experts/host/step.h"

namespace thimble {

// Addresses in page-locked memory that the GPU sees too. Numbers count turns and are never reused.
struct TurnMemory {
  const uint32_t* posted;  // written by the GPU
  uint32_t* planned;       // by us; one for each wave, each CACHE_LINE bytes after the last
  uint32_t* finished;      // by us
  const int32_t* ids;      // [lookups], then guesses at the next layer's, then the layer's number
  const float* x;          // [rows, latent]
  int64_t* plan;           // as laid out by PlanWords in ../decode_step.py
  float* results;          // [lookups + 1, latent]; the last vector is NaN
  const int64_t* waited_ns;  // written by the GPU: how long it waited for the last turn's results
  const uint32_t* stopped;   // written by the GPU: not 0 = a wait ran out of time, and it posts nothing more
};

struct TurnShape {
  int rows, top_k, items;  // items: most experts that the GPU takes
  int guesses, hints;      // guesses: 0, or rows * top_k; hints: so many of a row's first are prefetched
  int plan_count, plan_table, plan_scale, plan_source;  // first words of the plan's parts
  std::vector<int> wave_ends;  // items up to the first end are announced by the first flag, and so on
};

// How an expert's bytes reach the GPU.
enum class Route : int {
  in_place = 0,     // the GPU reads them from RAM
  copy_up = 1,      // `up` is copied, `down` is read in place: the published method
  copy_block = 2,   // all is copied
};

class Turns final : private Partner {
 public:
  static constexpr int CACHE_LINE = 128;

  Turns(Step&, Cache&, const Catalog&, const TurnMemory&, const TurnShape&);

  // Copies go to `staging` (device address, items * block_bytes), announced wave by wave.
  void copy_through(const CudaDriver&, CudaDriver::Handle context, Route, CudaDriver::Address staging, int lanes);

  // Blocks that the GPU has in its own memory; they must outlive us.
  void use(const VramSlots* vram) { vram_ = vram; }

  // Which part of the hits the GPU takes: a fixed number of experts a turn; or negative: as many as makes both finish
  // together, found while running from `initial`.
  void set_share(int fixed, double initial);
  double share_now() const { return share_; }

  // Serves `turns` turns and returns how many it has. Fewer, if the GPU stopped waiting for the last of them: that turn is
  // answered now, and the token can go on from its first wait (../handoff.py). Throws std::runtime_error on a block that
  // cannot be had, or a GPU that has not posted within timeout_us; it then goes through its graph by its own time limits.
  int serve(int turns, int64_t timeout_us);
  // No graph is running and none will go on: the GPU holds no block, and turns count on from what it has posted.
  void retire();

  struct Times {
    int64_t turns = 0, gpu_experts = 0, host_experts = 0;
    int64_t vram_experts = 0;  // of the GPU's, those whose blocks it had
    int64_t host_ns = 0;   // from the post to the host's results, the plan included
    int64_t plan_ns = 0;   // of it, until the GPU is told what it computes
    int64_t idle_ns = 0;   // from those to the next post: the GPU computes what follows, or is later than we
    int64_t waited_ns = 0;  // the GPU's wait for the host's results
  };
  const Times& times() const { return times_; }

 private:
  int layer() const { return memory_.ids[shape_.rows * shape_.top_k + shape_.guesses]; }
  int room() const override { return shape_.items; }
  const uint8_t* own(Key key) const override { return vram_ ? vram_->find(key) : nullptr; }
  int share(int ready, int waiting, int own) override;
  void begin(const std::vector<Item>& items, const std::vector<int32_t>& source) override;
  void demanded() override;
  void adapt(int64_t host_ns);

  Step& step_;
  Cache& cache_;
  const Catalog& catalog_;
  const TurnMemory memory_;
  const TurnShape shape_;
  uint32_t turn_;

  Route route_ = Route::in_place;
  std::unique_ptr<CopyLanes> lanes_;
  CudaDriver::Address staging_ = 0;
  const VramSlots* vram_ = nullptr;

  int fixed_share_ = 0;
  double share_ = 0, carry_ = 0;
  std::vector<Key> hints_;
  int taken_ = 0, left_ = 0;  // experts of the turn in hand: the GPU's out of RAM, and the workers'
  bool comparable_ = false;   // both could have had all of them at once: none came from the disk
  std::chrono::steady_clock::time_point seen_;  // when the turn in hand was
  Times times_;
};

}  // namespace thimble
