// How functions leave the library: plain C names, seen from outside.
#pragma once

#define THIMBLE_API extern "C" __attribute__((visibility("default")))
