// float32: [32 k][16 n], 2 KiB.
#pragma once
#include "../expand.h"

namespace fs::weights {

struct f32 : PlainTiles<float> {
  static vf row(Tile tile, int k) { return load<vf>(tile + k * 16); }
};

}  // namespace fs::weights
