// The makers of each file's policies, for make_policy() alone.
#pragma once

#include "kernels/experts/host/policy.h"

namespace thimble {

std::unique_ptr<Policy> make_decay(PolicySizes, double lookups_per_slot);  // policy_decay.cpp
std::unique_ptr<Policy> make_layered(PolicySizes);                          // policy_layered.cpp
std::unique_ptr<Policy> make_s3fifo(PolicySizes);                         // policy_queues.cpp
std::unique_ptr<Policy> make_sieve(PolicySizes);
std::unique_ptr<Policy> make_quota(PolicySizes);                            // policy_quota.cpp

}  // namespace thimble
