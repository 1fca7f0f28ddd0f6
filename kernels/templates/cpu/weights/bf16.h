// bfloat16: [16 pairs of k][16 n][2], 1 KiB, what AMX's TDPBF16PS reads; the vector path splits a pair with one shift.
#pragma once
#include "../expand.h"

namespace fs::weights {

struct bf16 : PlainTiles<fs::bf16> {
  static vf row(Tile tile, int k) {
    vu pair = load<vu>(tile + k / 2 * 32);
    return as_f(k % 2 ? pair & 0xffff0000u : pair << 16);
  }
};

}  // namespace fs::weights
