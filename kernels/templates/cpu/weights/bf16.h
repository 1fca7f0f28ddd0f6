// bfloat16: [16 pairs of k][16 n][2], 1 KiB, what AMX's TDPBF16PS reads; the vector path splits a pair with one shift.
#pragma once
#include "../expand.h"

namespace fs::weights {

struct bf16 : PlainTiles<fs::bf16> {
  template <int N>
  static vfN<N> row(Tile tile, int k, int lane) {
    vuN<N> pair = load<vuN<N>>(tile + k / 2 * 32 + lane * 2);
    return (vfN<N>)(k % 2 ? pair & 0xffff0000u : pair << 16);
  }
};

}  // namespace fs::weights
