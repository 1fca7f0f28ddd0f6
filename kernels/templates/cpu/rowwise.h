// Everything that works on a row at a time: embedding, norms, rotary embedding, element-wise expressions, row selection.
#pragma once
#include "context.h"

namespace fs {

// Rows of the packed (tied) embedding: element (v, k) sits in tile (v/16, k/32). One matrix serves both ends.
template <class E, class W, int K>
FS_KERNEL void embedding(Ctx& c, int tid, int T, const int32_t* ids, const char* w, Rows<float> y) {
  constexpr size_t panel = W::panel_bytes(round_up(K, kTileK) / kTileK);
  Range rows = share(T, tid, c.team.size());
  for (int t = rows.lo; t < rows.hi; t++) {
    const char* block = w + size_t(ids[t] / 16) * panel;
    float* out = y.row(t);
    for (int k = 0; k < K; k++) out[k] = Expand<E, W>::one(W::tile(block, k / 32), k % 32, ids[t] % 16);
  }
}

// Sum over D floats in 16 lanes, tail masked; the order is the same for every row.
template <int D>
inline float sum_squares(const float* x) {
  vf acc = {};
  int i = 0;
  for (; i + 16 <= D; i += 16) acc = acc + load<vf>(x + i) * load<vf>(x + i);
  float tail = 0;
  for (; i < D; i++) tail += x[i] * x[i];
  return hsum(acc) + tail;
}

// RMSNorm over D columns of each of `heads` groups in a row (heads = 1 for the hidden state). x and y may be the same.
template <class Out, int D>
FS_KERNEL void rms_norm(Ctx& c, int tid, int T, int heads, Rows<float> x, const float* w, float eps, Rows<Out> y) {
  Range rows = share(T, tid, c.team.size());
  for (int t = rows.lo; t < rows.hi; t++)
    for (int h = 0; h < heads; h++) {
      const float* in = x.row(t) + h * D;
      Out* out = y.row(t) + h * D;
      float scale = 1.0f / __builtin_sqrtf(sum_squares<D>(in) / D + eps);
      int i = 0;
      for (; i + 16 <= D; i += 16) Elem<Out>::put(out + i, load<vf>(in + i) * scale * load<vf>(w + i));
      for (; i < D; i++) Elem<Out>::put_one(out + i, in[i] * scale * w[i]);
    }
}

// Rotary embedding, half-split pairs (i, i + D/2); cos and sin tables are [max_positions, D/2].
template <int D>
FS_KERNEL void rope(Ctx& c, int tid, int T, int heads, Rows<float> x, const int32_t* positions, const float* cos_t,
                 const float* sin_t, Rows<float> y) {
  constexpr int half = D / 2;
  Range rows = share(T, tid, c.team.size());
  for (int t = rows.lo; t < rows.hi; t++) {
    const float* co = cos_t + size_t(positions[t]) * half;
    const float* si = sin_t + size_t(positions[t]) * half;
    for (int h = 0; h < heads; h++) {
      const float* in = x.row(t) + h * D;
      float* out = y.row(t) + h * D;
      int i = 0;
      for (; i + 16 <= half; i += 16) {
        vf a = load<vf>(in + i), b = load<vf>(in + i + half), c16 = load<vf>(co + i), s16 = load<vf>(si + i);
        store(out + i, a * c16 - b * s16);
        store(out + i + half, b * c16 + a * s16);
      }
      for (; i < half; i++) {
        float a = in[i], b = in[i + half];
        out[i] = a * co[i] - b * si[i];
        out[i + half] = b * co[i] + a * si[i];
      }
    }
  }
}

// y = f(x0, x1) element by element, 16 lanes at a time; rows are padded to 16 columns in the arena.
template <class Out, class F>
FS_KERNEL void elementwise(Ctx& c, int tid, int T, int columns, Rows<float> x0, Rows<float> x1, Rows<Out> y, const F& f) {
  Range rows = share(T, tid, c.team.size());
  for (int t = rows.lo; t < rows.hi; t++) {
    int i = 0;
    for (; i + 16 <= columns; i += 16) Elem<Out>::put(y.row(t) + i, f(load<vf>(x0.row(t) + i), load<vf>(x1.row(t) + i)));
    for (; i < columns; i++) Elem<Out>::put_one(y.row(t) + i, f(splat(x0.row(t)[i]), splat(x1.row(t)[i]))[0]);
  }
}

template <class Out>
FS_KERNEL void select_rows(Ctx& c, int tid, int L, int columns, Rows<float> x, const int32_t* rows, Rows<Out> y) {
  Range mine = share(L, tid, c.team.size());
  for (int l = mine.lo; l < mine.hi; l++)
    for (int i = 0; i < columns; i++) Elem<Out>::put_one(y.row(l) + i, x.row(rows[l])[i]);
}

template <class In, class Out>
FS_KERNEL void copy_rows(Ctx& c, int tid, int T, int columns, Rows<In> x, Rows<Out> y) {
  Range mine = share(T, tid, c.team.size());
  for (int t = mine.lo; t < mine.hi; t++)
    for (int i = 0; i < columns; i++) Elem<Out>::put_one(y.row(t) + i, Elem<In>::one(x.row(t) + i));
}

}  // namespace fs
