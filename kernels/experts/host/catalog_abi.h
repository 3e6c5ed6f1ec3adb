// How Python describes the blocks of a model and the drives that hold them; binding.py's CatalogView has the same members.
#pragma once

#include "kernels/experts/host/blocks.h"

namespace thimble {

struct CatalogView {
  const int64_t* sizes;  // latent, width, the four offsets of a block, its bytes
  int64_t layers, experts, drive_count;
  void* const* drives;  // from thimble_drive_*, must outlive whatever is made of this
  const int64_t* const* offsets;  // of each drive, per key (layer * experts + expert); NOT_THERE: not on that drive
  const uint64_t* checksums;
  const float *up_scales, *down_scales;
};

Catalog catalog_from(const CatalogView&);
std::vector<Drive*> drives_of(const CatalogView&);

}  // namespace thimble
