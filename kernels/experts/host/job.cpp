#include "kernels/experts/host/job.h"

#include <algorithm>
#include <cstring>

namespace thimble {
namespace {

constexpr int UP_ROWS = 128;      // of a tile for few tokens: 72 KiB of a real block
constexpr int UP_ROWS_MANY = 32;  // for many tokens, which pass over a tile's bytes again and again: they stay in L1
constexpr int DOWN_COLUMNS = 256;

int tiles_of(int size, int tile) { return (size + tile - 1) / tile; }

}  // namespace

Job::Job(const Context& context) : context_(context), up_(*this), down_(*this) {}

void Job::start(const uint8_t* block) {
  const Shape& shape = context_.catalog.shape;
  const size_t width = size_t(shape.width), count = size_t(fours());
  block_ = block;
  h_.resize(size_t(tokens()) * width);
  hq_.resize(MOST_TOKENS * width);
  alive_rows_.resize(count * width);
  alive_values_.resize(count * MOST_TOKENS * width);
  alive_counts_.resize(count);
  exponents_.resize(size_t(tokens()));
  up_rows_ = tokens() > MOST_TOKENS ? UP_ROWS_MANY : UP_ROWS;
  up_.prepare(tiles_of(shape.width, up_rows_));
  down_.prepare(tiles_of(shape.latent, DOWN_COLUMNS));
  context_.workers.publish(up_, false);
}

void Job::run_up(int tile) {
  const Shape& shape = context_.catalog.shape;
  const int begin = tile * up_rows_, end = std::min(begin + up_rows_, shape.width), count = end - begin;
  alignas(64) int64_t sums[MOST_TOKENS * UP_ROWS];
  for (int first = 0; first < tokens(); first += MOST_TOKENS) {
    const int some = std::min(MOST_TOKENS, tokens() - first);
    Input inputs[MOST_TOKENS];
    for (int t = 0; t < some; t++) inputs[t] = context_.inputs.of(rows[size_t(first + t)]);
    context_.kernels.up(shape, block_, inputs, some, begin, end, sums);
    for (int t = 0; t < some; t++) {
      const int exponent = context_.inputs.exponent(rows[size_t(first + t)]);
      rescale_relu2(sums + t * count, count, factor(context_.catalog.up_scales[size_t(key)], exponent),
                    h_.data() + int64_t(first + t) * shape.width + begin);
    }
  }
}

// From the real result of up: int16 values, and for each four tokens the neurons that any of them keeps alive.
void Job::list_alive() {
  const int width = context_.catalog.shape.width;
  for (int four = 0; four < fours(); four++) {
    const int first = four * MOST_TOKENS, some = std::min(MOST_TOKENS, tokens() - first);
    std::memset(hq_.data(), 0, hq_.size() * sizeof hq_[0]);
    for (int t = 0; t < some; t++) {
      int* exponent = &exponents_[size_t(first + t)];
      *exponent = 0;
      if (!quantise(h_.data() + int64_t(first + t) * width, width, hq_.data() + int64_t(t) * width, exponent))
        context_.bad_rows[size_t(rows[size_t(first + t)])].store(true, std::memory_order_relaxed);
    }
    int32_t* alive = alive_rows_.data() + int64_t(four) * width;
    int16_t* values = alive_values_.data() + int64_t(four) * MOST_TOKENS * width;
    const int16_t* hq = hq_.data();
    int count = 0;
    for (int n = 0; n < width; n++) {  // without a branch: which neurons live is not predictable
      alive[count] = n;
      int any = 0;
      for (int t = 0; t < some; t++) {
        values[t * width + count] = hq[t * width + n];
        any |= hq[t * width + n];
      }
      count += any != 0;
    }
    alive_counts_[size_t(four)] = count;
  }
  context_.workers.publish(down_, true);
  context_.workers.signal();
}

void Job::run_down(int tile) {
  const Shape& shape = context_.catalog.shape;
  const int begin = tile * DOWN_COLUMNS, end = std::min(begin + DOWN_COLUMNS, shape.latent), count = end - begin;
  alignas(64) int64_t sums[MOST_TOKENS * DOWN_COLUMNS];
  for (int four = 0; four < fours(); four++) {
    const int first = four * MOST_TOKENS, some = std::min(MOST_TOKENS, tokens() - first);
    Alive alive{alive_rows_.data() + int64_t(four) * shape.width, {}, alive_counts_[size_t(four)]};
    for (int t = 0; t < some; t++)
      alive.values[t] = alive_values_.data() + (int64_t(four) * MOST_TOKENS + t) * shape.width;
    context_.kernels.down(shape, block_, alive, some, begin, end, sums);
    for (int t = 0; t < some; t++)
      rescale(sums + t * count, count,
              factor(context_.catalog.down_scales[size_t(key)], exponents_[size_t(first + t)]),
              results + int64_t(first + t) * shape.latent + begin);
  }
}

}  // namespace thimble
