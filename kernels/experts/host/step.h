// One MoE layer's routed experts for a batch of tokens: from ids, weights and inputs to outputs. Owns the order of the work;
// the bytes are the cache's, the threads the workers', the arithmetic ../reference.py's.
//
// An expert that some token names is a job, whatever the number of its tokens: its block moves at most once and is read from
// RAM once. A job goes through
//
//   waiting (no slot yet) -> coming (being read) -> ready -> active: up tiles -> its last tile lists the alive neurons
//   -> down tiles -> its lease is given back
//
// Jobs whose blocks are in RAM are leased and started before others may evict anything. More experts than slots: the rest
// wait until a job is done and its slot can be had again. When all are done, tiles of tokens add up the results in router
// rank; only then does run() return, so no order of arrival shows in a bit.
//
// What orders what: lists of jobs and their states change under mutex_. A job's results are written by its tiles and read by
// combining tiles, which are published after the last job was counted under mutex_. Readers call arrived() and room() on
// their own threads; the lock is ours first, the cache's second, never the other way round.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "kernels/experts/cpu/quantise.h"
#include "kernels/experts/host/cache.h"
#include "kernels/experts/host/heat.h"
#include "kernels/experts/host/job.h"
#include "kernels/experts/host/partner.h"
#include "kernels/workers/workers.h"

namespace thimble {

struct StepTimes {
  std::atomic<int64_t> disk_wait_ns{0};  // nothing to compute, blocks on their way
  std::atomic<int64_t> total_ns{0};
};

class Step : private Waiter {
 public:
  Step(const Catalog&, Cache&, Workers&, const Kernels&);
  ~Step();

  // ids [rows, top_k] (valid experts; column = router rank), weights [rows, top_k], x [rows, latent] -> out [rows, latent].
  // Empty, or which block could not be had; `out` then means nothing. One caller at a time.
  std::string run(int layer, int rows, int top_k, const int32_t* ids, const float* weights, const float* x, float* out);

  // The same with a partner, which computes some of the experts and adds up all results: `y` [rows * top_k, latent] gets the
  // workers' (Partner::begin says which is where). What was lent to the partner stays leased until retire().
  std::string run_shared(int layer, int rows, int top_k, const int32_t* ids, const float* x, float* y, Partner&);
  void retire();

  const StepTimes& times() const { return times_; }
  Heat& heat() { return heat_; }

 private:
  class Combine;

  std::string run_call(int layer, int rows, int top_k, const int32_t* ids, const float* x);
  void make_jobs();
  void lend();
  void void_bad_rows();
  void demand_all();
  void pump();
  void finished(Job&);
  void count_down(int jobs);
  void arrived(int tag, const std::string& error) override;
  void room() override;

  const Catalog& catalog_;
  Cache& cache_;
  Workers& workers_;
  const Kernels& kernels_;
  StepTimes times_;
  Heat heat_;

  // The call in hand; fixed while it runs.
  int layer_ = 0, rows_ = 0, top_k_ = 0;
  const int32_t* ids_ = nullptr;
  const float *weights_ = nullptr, *x_ = nullptr;
  float* out_ = nullptr;
  Inputs inputs_;
  std::vector<std::atomic<bool>> bad_;  // rows whose output is NaN
  std::unique_ptr<Job::Context> context_;
  std::vector<std::unique_ptr<Job>> jobs_;  // only the first job_count_ are this call's; the rest keep their memory
  size_t job_count_ = 0;
  std::vector<int> job_of_expert_;      // or -1
  std::vector<const float*> results_;   // [rows, top_k]: each one's y
  std::vector<int> job_of_result_;      // [rows, top_k]
  Partner* partner_ = nullptr;
  float* shared_y_ = nullptr;
  std::vector<int> own_;  // jobs whose blocks the partner has
  std::vector<Lease> lent_;
  std::vector<Partner::Item> items_;
  std::vector<int32_t> source_;
  std::vector<float> y_;
  std::unique_ptr<Combine> combine_;
  std::atomic<bool> done_{false};

  std::mutex mutex_;  // guards what follows
  std::deque<int> waiting_, ready_;
  int active_ = 0, left_ = 0;
  std::atomic<int> computing_{0};  // active jobs, for whoever only wants to know why nothing is to be done
  std::string error_;
};

}  // namespace thimble
