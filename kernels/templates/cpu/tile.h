// The one matrix-product primitive: C[rows, 16*NB] (+)= A[rows, 32*nk] * B, with B in tiles of 32 k by 16 n.
//
// A is of element type E. B is of any weight format W and expanded to E on the way (expand.h); K and V caches are tiles
// of the format that stores E as it is, so one primitive serves linear layers and attention.
// Every row is one accumulation chain over k in ascending order, whatever the number of rows: results are row-invariant
// bit for bit, and a chain can be stopped in memory and taken up again (attention's tail does that).
#pragma once
#include <type_traits>

#include "expand.h"

#if defined(__AMX_BF16__)
#define FS_AMX 1
#else
#define FS_AMX 0
#endif

namespace fs {

#if FS_AMX
// Tiles 0-3 accumulate, 4-5 hold A, 6-7 hold B. `rows` rows of C and A are live.
inline int& amx_rows() {
  static thread_local int rows = 0;
  return rows;
}
inline void amx_config(int rows) {
  if (rows == amx_rows()) return;
  alignas(64) uint8_t c[64] = {};
  c[0] = 1;
  for (int i = 0; i < 8; i++) {
    uint16_t bytes = 64;
    std::memcpy(c + 16 + 2 * i, &bytes, 2);
    c[48 + i] = uint8_t(i < 6 ? rows : 16);
  }
  _tile_loadconfig(c);
  amx_rows() = rows;
}
#endif

// Brackets a thread's part of a step. Other libraries configure tiles on the same thread (oneDNN does), so nothing is
// assumed on entry, and tiles are released on exit, which keeps context switches cheap.
inline void begin_step() {
#if FS_AMX
  amx_rows() = 0;
#endif
}
inline void end_step() {
#if FS_AMX
  _tile_release();
#endif
}

// The accumulators that fit in registers beside their operands: rows x column blocks at once, and blocks of a single row.
constexpr int kChunkRows = kRegisterLanes == 4 ? 2 : 4;
constexpr int kChunkBlocks = kRegisterLanes == 16 ? 4 : 1;
constexpr int kRowBlocks = kRegisterLanes == 16 ? 4 : kRegisterLanes == 8 ? 2 : 1;

// B(k, nb) -> the tile of k block k and column block nb.
template <class E, class W = typename PlainFormat<E>::type>
struct TileProduct {
  using Weights = Expand<E, W>;
  template <int MR, int NB, class B>
  static void chunk(const E* a, int lda, const B& b, int nk, float* c, int ldc, bool init) {
    constexpr int per_block = 16 / kRegisterLanes, NV = NB * per_block;  // registers of a block and of a row
    vr acc[MR][NV];
    for (int r = 0; r < MR; r++)
      for (int v = 0; v < NV; v++) acc[r][v] = init ? vr{} : load<vr>(c + r * ldc + v * kRegisterLanes);
    for (int k = 0; k < nk; k++) {
      typename W::Tile tile[NB];
      for (int n = 0; n < NB; n++) tile[n] = b(k, n);
      const E* ak = a + k * kTileK;
      if constexpr (sizeof(E) == 2) {
        for (int p = 0; p < 16; p++) {
          vr lo[NV], hi[NV];
          for (int v = 0; v < NV; v++)
            Weights::pair(tile[v / per_block], p, v % per_block * kRegisterLanes, lo[v], hi[v]);
          for (int r = 0; r < MR; r++) {
            uint32_t both;  // one load gives the pair to all lanes
            std::memcpy(&both, ak + r * lda + 2 * p, sizeof(both));
            vur x = vur{} + both;
            vr x0 = (vr)(x << 16), x1 = (vr)(x & 0xffff0000u);
            for (int v = 0; v < NV; v++) acc[r][v] = acc[r][v] + x0 * lo[v];
            for (int v = 0; v < NV; v++) acc[r][v] = acc[r][v] + x1 * hi[v];
          }
        }
      } else {
        for (int p = 0; p < 32; p++) {
          vr b_p[NV];
          for (int v = 0; v < NV; v++) b_p[v] = Weights::row(tile[v / per_block], p, v % per_block * kRegisterLanes);
          for (int r = 0; r < MR; r++) {
            vr x = ak[r * lda + p] - vr{};  // minus zero keeps every bit, and costs nothing
            for (int v = 0; v < NV; v++) acc[r][v] = acc[r][v] + x * b_p[v];
          }
        }
      }
    }
    for (int r = 0; r < MR; r++)
      for (int v = 0; v < NV; v++) store(c + r * ldc + v * kRegisterLanes, acc[r][v]);
  }

  // rows <= 16. With AMX up to 16 rows of A and C are read and written, so both buffers are padded to 16 rows.
  template <int NB, class B>
  static void run(const E* a, int lda, int rows, const B& b, int nk, float* c, int ldc, bool init) {
    static_assert(NB >= 1 && NB <= 4);
#if FS_AMX
    if constexpr (std::is_same<W, weights::bf16>::value && sizeof(E) == 2) {
      amx<NB>(a, lda, rows, b, nk, c, ldc, init);
      return;
    }
#endif
    int r = 0;
    for (; r + kChunkRows <= rows; r += kChunkRows)
      blocks<kChunkRows, NB, kChunkBlocks>(a + r * lda, lda, b, nk, c + r * ldc, ldc, init);
    for (; r < rows; r++) blocks<1, NB, kRowBlocks>(a + r * lda, lda, b, nk, c + r * ldc, ldc, init);
  }

  // NB column blocks in chunks of at most `Most`.
  template <int MR, int NB, int Most, class B>
  static void blocks(const E* a, int lda, const B& b, int nk, float* c, int ldc, bool init, int from = 0) {
    constexpr int now = NB < Most ? NB : Most;
    chunk<MR, now>(a, lda, [&](int k, int n) { return b(k, from + n); }, nk, c, ldc, init);
    if constexpr (NB > now) blocks<MR, NB - now, Most>(a, lda, b, nk, c + now * 16, ldc, init, from + now);
  }

#if FS_AMX
  template <int NB, class B>
  static void amx(const E* a, int lda, int rows, const B& b, int nk, float* c, int ldc, bool init) {
    amx_config(rows);
    if (init) {
      _tile_zero(0);
      if constexpr (NB > 1) _tile_zero(1);
      if constexpr (NB > 2) _tile_zero(2);
      if constexpr (NB > 3) _tile_zero(3);
    } else {
      _tile_loadd(0, c, ldc * 4);
      if constexpr (NB > 1) _tile_loadd(1, c + 16, ldc * 4);
      if constexpr (NB > 2) _tile_loadd(2, c + 32, ldc * 4);
      if constexpr (NB > 3) _tile_loadd(3, c + 48, ldc * 4);
    }
    for (int k = 0; k < nk; k++) {
      _tile_loadd(4, a + k * kTileK, lda * 2);
      _tile_loadd(6, b(k, 0), 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (NB > 1) { _tile_loadd(7, b(k, 1), 64); _tile_dpbf16ps(1, 4, 7); }
      if constexpr (NB > 2) { _tile_loadd(6, b(k, 2), 64); _tile_dpbf16ps(2, 4, 6); }
      if constexpr (NB > 3) { _tile_loadd(7, b(k, 3), 64); _tile_dpbf16ps(3, 4, 7); }
    }
    _tile_stored(0, c, ldc * 4);
    if constexpr (NB > 1) _tile_stored(1, c + 16, ldc * 4);
    if constexpr (NB > 2) _tile_stored(2, c + 32, ldc * 4);
    if constexpr (NB > 3) _tile_stored(3, c + 48, ldc * 4);
  }
#endif
};

}  // namespace fs
