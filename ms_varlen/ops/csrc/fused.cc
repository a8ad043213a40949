// RMSNorm, rotary embedding, SwiGLU and the output layer's cross-entropy, each in one pass over memory, fp32.
//
// Every sum over tokens goes in blocks of fixed size and in one order: bits do not depend on the number of threads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "gemm.h"
#include "operator.h"

namespace ms_varlen {
namespace {

int64_t rows_of(const int* ndims, int64_t** shapes, int input) {
  int64_t rows = 1;
  for (int i = 0; i + 1 < ndims[input]; ++i) rows *= shapes[input][i];
  return rows;
}

// The axes of `input` but the last.
Shape row_axes(const int* ndims, int64_t** shapes, int input) {
  Shape rows = shape_of(ndims, shapes, input);
  if (rows.size() > 1) rows.pop_back();
  return rows;
}

// ---- RMSNorm: x [..., H], weight [H], eps [1] -> y [..., H], inverse [...] = 1 / sqrt(mean(x * x) + eps)
// With a residual path: total = x + other first.

constexpr int kNormRows = 256;

// `other` and `total` may be null: then x is the total.
void norm_rows(const float* x, const float* other, const float* weight, float eps, float* total, float* y,
               float* inverse, int64_t rows, int size) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < rows; ++t) {
    const float* a = x + t * size;
    if (total) {
      const float* b = other + t * size;
      float* sum = total + t * size;
#pragma omp simd
      for (int i = 0; i < size; ++i) sum[i] = a[i] + b[i];
      a = sum;
    }
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < size; ++i) squares += a[i] * a[i];
    const float r = 1.f / std::sqrt(squares / size + eps);
    inverse[t] = r;
    float* out = y + t * size;
#pragma omp simd
    for (int i = 0; i < size; ++i) out[i] = a[i] * r * weight[i];
  }
}

// One block of rows: d_x, plus what comes back along the residual path (`d_total`, may be null), and the block's share
// of d_weight.
void norm_block_gradient(const float* x, const float* weight, const float* inverse, const float* d_total,
                         const float* d_y, float* d_x, float* d_weight, int64_t rows, int size) {
  for (int64_t t = 0; t < rows; ++t, x += size, d_y += size, d_x += size) {
    const float r = inverse[t];
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int i = 0; i < size; ++i) dot += d_y[i] * weight[i] * x[i];
    const float shrink = dot * r * r * r / size;
#pragma omp simd
    for (int i = 0; i < size; ++i) {
      d_x[i] = d_y[i] * weight[i] * r - x[i] * shrink;
      d_weight[i] += d_y[i] * x[i] * r;
    }
    if (!d_total) continue;
#pragma omp simd
    for (int i = 0; i < size; ++i) d_x[i] += d_total[i];
    d_total += size;
  }
}

void norm_gradient(const float* x, const float* weight, const float* inverse, const float* d_total, const float* d_y,
                   float* d_x, float* d_weight, int64_t rows, int size) {
  const int64_t blocks = (rows + kNormRows - 1) / kNormRows;
  std::vector<float> shares(blocks * size, 0.f);
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t first = b * kNormRows, at = first * size;
    norm_block_gradient(x + at, weight, inverse + first, d_total ? d_total + at : nullptr, d_y + at, d_x + at,
                        shares.data() + b * size, std::min<int64_t>(kNormRows, rows - first), size);
  }
  std::fill(d_weight, d_weight + size, 0.f);
  for (int64_t b = 0; b < blocks; ++b)
    for (int i = 0; i < size; ++i) d_weight[i] += shares[b * size + i];
}

// ---- Rotary: x [T, N, D], cos and sin [T, D/2]; value i turns with value i + D/2. `sign` -1 turns back.

void rotate(const float* x, const float* cos, const float* sin, float* y, int64_t tokens, int heads, int half,
            float sign) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; ++t) {
    const float *c = cos + t * half, *s = sin + t * half;
    for (int n = 0; n < heads; ++n) {
      const float* a = x + (t * heads + n) * 2 * half;
      float* out = y + (t * heads + n) * 2 * half;
#pragma omp simd
      for (int i = 0; i < half; ++i) {
        out[i] = a[i] * c[i] - sign * a[i + half] * s[i];
        out[i + half] = a[i + half] * c[i] + sign * a[i] * s[i];
      }
    }
  }
}

// ---- SwiGLU: y = gate * sigmoid(gate) * up, value by value

constexpr int64_t kStripe = 4096;  // values a thread takes at once

// Calls `body` with vectors at [0, count) of up to four arrays; the rest of less than a vector goes through copies.
template <int Inputs, int Outputs, typename Body>
void each_vector(const float* const (&in)[Inputs], float* const (&out)[Outputs], int64_t count, const Body& body) {
#pragma omp parallel for schedule(static)
  for (int64_t stripe = 0; stripe < count; stripe += kStripe) {
    const int64_t end = std::min(count, stripe + kStripe);
    for (int64_t i = stripe; i < end; i += kLanes) {
      const int width = static_cast<int>(std::min<int64_t>(kLanes, end - i));
      Vec a[Inputs]{}, r[Outputs];
      for (int n = 0; n < Inputs; ++n) {
        if (width == kLanes)
          a[n] = load(in[n] + i);
        else
          std::memcpy(&a[n], in[n] + i, sizeof(float) * width);
      }
      body(a, r);
      for (int n = 0; n < Outputs; ++n) {
        if (width == kLanes)
          store(out[n] + i, r[n]);
        else
          std::memcpy(out[n] + i, &r[n], sizeof(float) * width);
      }
    }
  }
}

inline Vec sigmoid(Vec x) { return 1.f / (1.f + vexp(-x)); }

}  // namespace
}  // namespace ms_varlen

using namespace ms_varlen;

MS_VARLEN_SHAPES(std::vector<Shape>, RmsNormForward) {
  return {shape_of(ndims, shapes, 0), row_axes(ndims, shapes, 0)};
}

MS_VARLEN_KERNEL(RmsNormForward) {
  if (!fits(shapes[1][0] == shapes[0][ndims[0] - 1], "RmsNorm", "weight must be as long as the last axis of x"))
    return kBadShape;
  const float *x = static_cast<float*>(params[0]), *weight = static_cast<float*>(params[1]);
  const float eps = *static_cast<float*>(params[2]);
  norm_rows(x, nullptr, weight, eps, nullptr, static_cast<float*>(params[3]), static_cast<float*>(params[4]),
            rows_of(ndims, shapes, 0), static_cast<int>(shapes[1][0]));
  return 0;
}

// x weight inverse d_y -> d_x d_weight
MS_VARLEN_SHAPES(std::vector<Shape>, RmsNormBackward) {
  return {shape_of(ndims, shapes, 0), shape_of(ndims, shapes, 1)};
}

MS_VARLEN_KERNEL(RmsNormBackward) {
  norm_gradient(static_cast<float*>(params[0]), static_cast<float*>(params[1]), static_cast<float*>(params[2]), nullptr,
                static_cast<float*>(params[3]), static_cast<float*>(params[4]), static_cast<float*>(params[5]),
                rows_of(ndims, shapes, 0), static_cast<int>(shapes[1][0]));
  return 0;
}

// x other weight eps -> total y inverse
MS_VARLEN_SHAPES(std::vector<Shape>, AddRmsNormForward) {
  return {shape_of(ndims, shapes, 0), shape_of(ndims, shapes, 0), row_axes(ndims, shapes, 0)};
}

MS_VARLEN_KERNEL(AddRmsNormForward) {
  if (!fits(shape_of(ndims, shapes, 1) == shape_of(ndims, shapes, 0), "AddRmsNorm", "x and y must have one shape") ||
      !fits(shapes[2][0] == shapes[0][ndims[0] - 1], "AddRmsNorm", "weight must be as long as the last axis of x"))
    return kBadShape;
  const float *x = static_cast<float*>(params[0]), *other = static_cast<float*>(params[1]);
  const float *weight = static_cast<float*>(params[2]), eps = *static_cast<float*>(params[3]);
  norm_rows(x, other, weight, eps, static_cast<float*>(params[4]), static_cast<float*>(params[5]),
            static_cast<float*>(params[6]), rows_of(ndims, shapes, 0), static_cast<int>(shapes[2][0]));
  return 0;
}

// total weight inverse d_total d_y -> d_x d_weight; d_other is d_x
MS_VARLEN_SHAPES(std::vector<Shape>, AddRmsNormBackward) {
  return {shape_of(ndims, shapes, 0), shape_of(ndims, shapes, 1)};
}

MS_VARLEN_KERNEL(AddRmsNormBackward) {
  norm_gradient(static_cast<float*>(params[0]), static_cast<float*>(params[1]), static_cast<float*>(params[2]),
                static_cast<float*>(params[3]), static_cast<float*>(params[4]), static_cast<float*>(params[5]),
                static_cast<float*>(params[6]), rows_of(ndims, shapes, 0), static_cast<int>(shapes[1][0]));
  return 0;
}

MS_VARLEN_SHAPES(Shape, RotaryForward) { return shape_of(ndims, shapes, 0); }
MS_VARLEN_SHAPES(Shape, RotaryBackward) { return shape_of(ndims, shapes, 0); }

MS_VARLEN_KERNEL(RotaryForward) {
  rotate(static_cast<float*>(params[0]), static_cast<float*>(params[1]), static_cast<float*>(params[2]),
         static_cast<float*>(params[3]), shapes[0][0], static_cast<int>(shapes[0][1]), static_cast<int>(shapes[1][1]),
         1.f);
  return 0;
}

MS_VARLEN_KERNEL(RotaryBackward) {
  rotate(static_cast<float*>(params[0]), static_cast<float*>(params[1]), static_cast<float*>(params[2]),
         static_cast<float*>(params[3]), shapes[0][0], static_cast<int>(shapes[0][1]), static_cast<int>(shapes[1][1]),
         -1.f);
  return 0;
}

MS_VARLEN_SHAPES(Shape, SwigluForward) { return shape_of(ndims, shapes, 0); }
MS_VARLEN_SHAPES(std::vector<Shape>, SwigluBackward) {
  return {shape_of(ndims, shapes, 0), shape_of(ndims, shapes, 1)};
}

MS_VARLEN_KERNEL(SwigluForward) {
  if (!fits(shape_of(ndims, shapes, 1) == shape_of(ndims, shapes, 0), "Swiglu", "gate and up must have one shape"))
    return kBadShape;
  const int64_t count = values_of(ndims, shapes, 0);
  each_vector<2, 1>({static_cast<float*>(params[0]), static_cast<float*>(params[1])}, {static_cast<float*>(params[2])},
                    count, [](const Vec* a, Vec* y) { y[0] = a[0] * sigmoid(a[0]) * a[1]; });
  return 0;
}

// gate up d_y -> d_gate d_up
MS_VARLEN_KERNEL(SwigluBackward) {
  const int64_t count = values_of(ndims, shapes, 0);
  each_vector<3, 2>({static_cast<float*>(params[0]), static_cast<float*>(params[1]), static_cast<float*>(params[2])},
                    {static_cast<float*>(params[3]), static_cast<float*>(params[4])}, count, [](const Vec* a, Vec* d) {
                      const Vec s = sigmoid(a[0]), silu = a[0] * s;
                      d[0] = a[2] * a[1] * (s + silu * (1.f - s));
                      d[1] = a[2] * silu;
                    });
  return 0;
}
