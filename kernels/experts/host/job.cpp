#include "kernels/experts/host/job.h"

#include <algorithm>
#include <cstring>

namespace thimble {
namespace {

constexpr int UP_ROWS = 128;      // of a tile for few tokens: 72 KiB of a real block
constexpr int UP_ROWS_MANY = 32;  // for many tokens, which pass over a tile's bytes again and again: they stay in L1
constexpr int PART_ROWS = 48;  // alive rows a tile of `down`, about: a quarter of a real expert's
constexpr int MOST_PARTS = 8;
constexpr int STRIP = 256;  // outputs at a time for many tokens

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
  if (fours() == 1) {
    const int count = alive_counts_[0], parts = std::max(1, std::min(MOST_PARTS, count / PART_ROWS));
    parts_.assign(1, 0);
    for (int part = 1; part <= parts; part++) {
      int at = std::max(parts_.back(), count * part / parts);
      while (at < count && alive_rows_[size_t(at)] / GROUP == alive_rows_[size_t(at) - 1] / GROUP) at++;
      parts_.push_back(at);  // at the border of a group: its scales are read once
    }
    sums_.resize(size_t(parts) * size_t(tokens()) * size_t(context_.catalog.shape.latent));
    down_.prepare(parts);
  } else {
    down_.prepare(fours());
  }
  context_.workers.publish(down_, true);
  context_.workers.signal();
}

Alive Job::alive(int four, int begin, int end) const {
  const int64_t width = context_.catalog.shape.width;
  Alive found{alive_rows_.data() + four * width + begin, {}, end - begin};
  for (int t = 0; t < MOST_TOKENS; t++) found.values[t] = alive_values_.data() + (four * MOST_TOKENS + t) * width + begin;
  return found;
}

void Job::run_down(int tile) {
  if (fours() == 1)
    run_part(tile);
  else
    run_four(tile);
}

void Job::run_part(int part) {
  const Shape& shape = context_.catalog.shape;
  int64_t* sums = sums_.data() + int64_t(part) * tokens() * shape.latent;
  const Alive some = alive(0, parts_[size_t(part)], parts_[size_t(part) + 1]);
  context_.kernels.down(shape, block_, some, tokens(), 0, shape.latent, sums);
}

void Job::run_four(int four) {
  const Shape& shape = context_.catalog.shape;
  const int first = four * MOST_TOKENS, some = std::min(MOST_TOKENS, tokens() - first);
  const float scale = context_.catalog.down_scales[size_t(key)];
  alignas(64) int64_t sums[MOST_TOKENS * STRIP];
  for (int begin = 0; begin < shape.latent; begin += STRIP) {
    const int end = std::min(begin + STRIP, shape.latent), count = end - begin;
    context_.kernels.down(shape, block_, alive(four, 0, alive_counts_[size_t(four)]), some, begin, end, sums);
    for (int t = 0; t < some; t++)
      rescale(sums + t * count, count, factor(scale, exponents_[size_t(first + t)]),
              results + int64_t(first + t) * shape.latent + begin);
  }
}

void Job::add_parts() {
  const int64_t latent = context_.catalog.shape.latent;
  if (fours() == 1) {
    const int64_t size = tokens() * latent;
    for (size_t part = 1; part + 1 < parts_.size(); part++)
      for (int64_t i = 0; i < size; i++) sums_[size_t(i)] += sums_[part * size_t(size) + size_t(i)];
    const float scale = context_.catalog.down_scales[size_t(key)];
    for (int t = 0; t < tokens(); t++)
      rescale(sums_.data() + t * latent, int(latent), factor(scale, exponents_[size_t(t)]), results + t * latent);
  }
  context_.finished(*this);
}

}  // namespace thimble
