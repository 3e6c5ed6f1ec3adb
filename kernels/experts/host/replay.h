// A trace of routing, replayed through the shipped slot table, policies, hints and trial, with a clock in place of disk and
// processor. Owns the clock and the order of events, which is step.cpp's and cache.cpp's; decides nothing that they decide.
//
// The clock is the formula of services/tools/predict.py, layer by layer: a layer's step begins a gap after the last one ended,
// computes its experts, and ends when the last missing one has arrived and been computed. The disk serves one read after the
// other; a block is usable a while after its turn (late_ns), which holds up no other. A prefetch is begun once the disk has all but what it is reading of what was demanded, and gives way to the next demand but for
// the pieces that are under way (cache.h).
#pragma once

#include <cstdint>

namespace thimble {

constexpr int MOST_AHEAD = 2;

struct ReplayTrace {
  int layers, experts, top_k;
  int64_t steps;
  const int32_t* layer;  // [steps]
  const int64_t* first;  // [steps + 1]: a step's first row
  const int32_t* ids;    // [rows, top_k] in router rank
  // What was guessed at a step, by score, for the following layers: [rows, top_k], -1: nothing; or null.
  const int32_t* guesses[MOST_AHEAD];
};

struct ReplayOptions {
  double gap_ns, expert_ns, read_ns, late_ns;
  double ahead_ns;  // reading that what was begun ahead has under way at once
  int beside;       // prefetches begin before the last demanded block has been checked
  int overlapped;   // experts in RAM are computed while others are read
  int prefetch;     // a Prefetching
  int ranks;        // of each token's guesses, so many of the first are hints
  int ahead;        // for so many layers
  int in_flight;    // prefetches on their way at once
};

struct ReplayCounts {
  int64_t decode_lookups, decode_hits, decode_reads;
  int64_t sweep_lookups, sweep_hits, sweep_reads;
  int64_t prefetch_issued, prefetch_useful, prefetch_wasted, evictions;
  int64_t decode_ns, decode_waited_ns, sweep_ns;
};

}  // namespace thimble
