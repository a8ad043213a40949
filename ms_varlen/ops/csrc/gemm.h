// Matrix products on blocks that fit in the cache: C (+)= A B, A read one value at a time, B in panels of kPanel
// columns.
//
// A panel holds its K rows one after another, kPanel floats each, so the inner loop walks straight through memory. Sums
// run over K in one fixed order in every cell of C, whatever the thread, so the bits of a result never change.
#pragma once
#include <algorithm>
#include <cstring>

#include "simd.h"

namespace ms_varlen {

constexpr int kTileRows = kRegisters == 32 ? 12 : 6;  // 2 x 12 (or 2 x 6) accumulators, the rest for operands
constexpr int kPanel = 2 * kLanes;

inline int round_up(int n, int step) { return (n + step - 1) / step * step; }
inline int panels(int columns) { return (columns + kPanel - 1) / kPanel; }

// rows x columns at src (row stride ld) -> panels of kPanel columns, filled up with zeros.
inline void pack(const float* src, ptrdiff_t ld, int rows, int columns, float* dst) {
  for (int c = 0; c < columns; c += kPanel) {
    const int width = std::min(kPanel, columns - c);
    for (int r = 0; r < rows; ++r, dst += kPanel) {
      const float* row = src + r * ld + c;
      if (width == kPanel) {
        store(dst, load(row));
        store(dst + kLanes, load(row + kLanes));
      } else {
        for (int x = 0; x < kPanel; ++x) dst[x] = x < width ? row[x] : 0.f;
      }
    }
  }
}

// The same for the transpose: src is columns x rows.
inline void pack_transposed(const float* src, ptrdiff_t ld, int rows, int columns, float* dst) {
  for (int c = 0; c < columns; c += kPanel, dst += static_cast<ptrdiff_t>(rows) * kPanel)
    for (int x = 0; x < kPanel; x += kLanes) {
      const int width = std::max(0, std::min(kLanes, columns - c - x));
      for (int r = 0; r < rows; r += kLanes) {
        const float* from = src + (c + x) * ld + r;
        float* to = dst + r * kPanel + x;
        if (width == kLanes && r + kLanes <= rows) {
          transpose(from, ld, to, kPanel);
        } else {
          for (int y = 0; y < std::min(kLanes, rows - r); ++y)
            for (int lane = 0; lane < kLanes; ++lane) to[y * kPanel + lane] = lane < width ? from[lane * ld + y] : 0.f;
        }
      }
    }
}

// rows x depth values -> slices of [Rows][Slice]: the left operand, with a row stride that the compiler knows.
template <int Slice, int Rows>
void pack_slices(const float* src, ptrdiff_t ld, int rows, int depth, float* dst) {
  for (int d = 0; d < depth; d += Slice, dst += Slice * Rows)
    for (int r = 0; r < rows; ++r) {
      const float* from = src + r * ld + d;
      if (depth - d >= Slice) {
        for (int i = 0; i < Slice; i += kLanes) store(dst + r * Slice + i, load(from + i));
      } else {
        std::memcpy(dst + r * Slice, from, sizeof(float) * (depth - d));
      }
    }
}

// One tile of R rows and V vectors. A's value (i, k) is a[i * RowStride + k * ak]. Its sum starts from zero and is then
// added to C: one running sum over all slices would lose accuracy as their number grows (a vocabulary has hundreds).
template <int R, int V, int RowStride>
inline __attribute__((always_inline)) void tile(const float* a, ptrdiff_t ak, const float* b, float* c, ptrdiff_t ldc,
                                                int depth, bool add) {
  Vec acc[R][V];
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < V; ++j) acc[i][j] = Vec{};
  for (int k = 0; k < depth; ++k, a += ak, b += kPanel) {
    Vec bv[V];
    for (int j = 0; j < V; ++j) bv[j] = load(b + j * kLanes);
    for (int i = 0; i < R; ++i) {
      const float x = a[i * RowStride];
      for (int j = 0; j < V; ++j) acc[i][j] += x * bv[j];
    }
  }
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < V; ++j) {
      float* to = c + i * ldc + j * kLanes;
      store(to, add ? load(to) + acc[i][j] : acc[i][j]);
    }
}

template <int V, int RowStride, int R = kTileRows>
inline void tile_rows(int rows, const float* a, ptrdiff_t ak, const float* b, float* c, ptrdiff_t ldc, int depth,
                      bool add) {
  if constexpr (R > 1) {
    if (rows < R) return tile_rows<V, RowStride, R - 1>(rows, a, ak, b, c, ldc, depth, add);
  }
  tile<R, V, RowStride>(a, ak, b, c, ldc, depth, add);
}

// Which part of a product on the diagonal block of a causal score matrix is not zero by definition.
enum class Part {
  kAll,
  kRowsUpToColumn,  // C is scores^T (keys x queries): a key is needed up to the last query of its panel
  kDepthUpToRow,    // A is P (queries x keys): a query has keys up to itself
  kDepthFromRow,    // A is P^T (keys x queries): a key has queries from itself on
};

// C[rows x columns] (+)= A[rows x depth] B[depth x columns]; C's rows are written in whole vectors.
template <int RowStride>
inline void gemm(int rows, int columns, int depth, const float* a, ptrdiff_t ak, const float* b, float* c,
                 ptrdiff_t ldc, bool add, Part part = Part::kAll) {
  for (int j = 0; j < columns; j += kPanel, b += static_cast<ptrdiff_t>(depth) * kPanel) {
    const int needed = part == Part::kRowsUpToColumn ? std::min(rows, j + kPanel) : rows;
    for (int i = 0; i < needed; i += kTileRows) {
      const int r = std::min(kTileRows, needed - i);
      const int first = part == Part::kDepthFromRow ? std::min(i, depth) : 0;
      const int last = part == Part::kDepthUpToRow ? std::min(i + r, depth) : depth;
      const float* at = a + static_cast<ptrdiff_t>(i) * RowStride + first * ak;
      const float* bt = b + static_cast<ptrdiff_t>(first) * kPanel;
      float* ct = c + i * ldc + j;
      if (columns - j > kLanes)
        tile_rows<2, RowStride>(r, at, ak, bt, ct, ldc, last - first, add);
      else
        tile_rows<1, RowStride>(r, at, ak, bt, ct, ldc, last - first, add);
    }
  }
}

// The same with `a` from pack_slices and the matching rows of B packed apart, slice by slice, `step` floats each.
template <int Slice, int Rows>
inline void gemm_slices(int rows, int columns, int depth, const float* a, const float* b, ptrdiff_t step, float* c,
                        ptrdiff_t ldc, Part part = Part::kAll) {
  for (int d = 0; d < depth; d += Slice, a += Slice * Rows, b += step)
    gemm<Slice>(rows, columns, std::min(Slice, depth - d), a, 1, b, c, ldc, d > 0, part);
}

}  // namespace ms_varlen
