// float32: [32 k][16 n], 2 KiB.
#pragma once
#include "../expand.h"

namespace fs::weights {

struct f32 : PlainTiles<float> {
  template <int N>
  static vfN<N> row(Tile tile, int k, int lane) {
    return load<vfN<N>>(tile + k * 16 + lane);
  }
};

}  // namespace fs::weights
