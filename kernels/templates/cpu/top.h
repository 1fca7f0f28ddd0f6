// The k largest logits of each row with their softmax probabilities: all that a drafter wants of an SSM's output.
#pragma once
#include "simd.h"

namespace fs {

// index and chance are [rows, k], falling, ties to the lower index; k <= V. A row whose largest logit is not finite, or
// that holds a NaN, gets probability 0 throughout: a diverged SSM must not stop the server.
inline void top_successors(int rows, int V, const float* logits, int k, int32_t* index, float* chance) {
  for (int r = 0; r < rows; r++, index += k, chance += k) {
    const float* x = logits + size_t(r) * V;
    auto lanes = [&](int i) {  // the row's end is padded with what no softmax sees
      vf v = splat(-__builtin_inff());
      std::memcpy(&v, x + i, size_t(V - i < 16 ? V - i : 16) * sizeof(float));
      return v;
    };
    vf most = splat(-__builtin_inff()), sum = {};
    vi nan = {};
    for (int i = 0; i < V; i += 16) {
      vf v = lanes(i);
      nan = nan | (v != v);
      most = vmax(most, v);
    }
    const float top = hmax(most);
    for (int i = 0; i < V; i += 16) sum = sum + fs_exp(lanes(i) - top);
    bool sound = top - top == 0.0f;
    for (int lane = 0; lane < 16; lane++) sound = sound && !nan[lane];

    int held = 0;  // chance holds the logits until the end
    for (int i = 0; i < V; i++) {
      if (held == k && !(x[i] > chance[k - 1])) continue;
      int at = held < k ? held++ : k - 1;
      for (; at > 0 && x[i] > chance[at - 1]; at--) chance[at] = chance[at - 1], index[at] = index[at - 1];
      chance[at] = x[i], index[at] = i;
    }
    const float total = hsum(sum);
    for (int j = 0; j < k; j++) chance[j] = sound ? fs_exp(splat(chance[j] - top))[0] / total : 0.0f;
  }
}

}  // namespace fs
