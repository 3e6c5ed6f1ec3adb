// One expert of a step and its tokens: two pieces of work, up and then down. Owns the memory between the two.
#pragma once

#include <functional>
#include <vector>

#include "kernels/experts/cpu/quantise.h"
#include "kernels/experts/host/cache.h"
#include "kernels/workers/workers.h"

namespace thimble {

class Job {
 public:
  // What a job needs of its step; set once.
  struct Context {
    const Catalog& catalog;
    const Kernels& kernels;
    const Inputs& inputs;
    Workers& workers;
    std::vector<std::atomic<bool>>& bad_rows;  // set for a token whose h overflows
    std::function<void(Job&)> finished;        // on the worker that ran the last tile
  };

  explicit Job(const Context&);

  Key key = NO_KEY;
  Lease lease;
  std::vector<int> rows;       // the tokens that name this expert, each once
  float* results = nullptr;    // [rows.size(), latent], the step's memory

  void start(const uint8_t* block);  // publishes the first piece; the block must stay until finished

 private:
  // Tiles of `up` are neurons, for all tokens in fours. Those of `down` are parts of the alive rows, whole rows since memory
  // likes long pieces; the parts' sums are integers and add up to the same in any order. With more than four tokens,
  // when most rows live for somebody, they are fours of tokens.
  struct Up : Work {
    explicit Up(Job& of) : job(of) {}
    void run(int tile) override { job.run_up(tile); }
    void finish() override { job.list_alive(); }
    Job& job;
  };
  struct Down : Work {
    explicit Down(Job& of) : job(of) {}
    void run(int tile) override { job.run_down(tile); }
    void finish() override { job.add_parts(); }
    Job& job;
  };

  int tokens() const { return int(rows.size()); }
  int fours() const { return (tokens() + MOST_TOKENS - 1) / MOST_TOKENS; }
  void run_up(int tile);
  void list_alive();
  void run_down(int tile);
  void run_part(int part);
  void run_four(int four);
  void add_parts();
  Alive alive(int four, int begin, int end) const;

  const Context& context_;
  Up up_;
  Down down_;
  const uint8_t* block_ = nullptr;
  int up_rows_ = 0;                     // neurons a tile
  std::vector<float> h_;                // [tokens, width]
  std::vector<int16_t> hq_;             // [4, width], of the four in hand
  std::vector<int32_t> alive_rows_;     // [fours, width]
  std::vector<int16_t> alive_values_;   // [fours, 4, width]
  std::vector<int32_t> alive_counts_;   // [fours]
  std::vector<int> exponents_;          // [tokens] of h
  std::vector<int> parts_;              // where each part of the alive rows begins, and the end
  std::vector<int64_t> sums_;           // [parts, tokens, latent]
};

}  // namespace thimble
