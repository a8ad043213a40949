// What a step does with its gradient: the sum of its squares, and AdamW in one pass over memory, in place, fp32.
//
// Sums go in blocks of fixed size and in one order: bits do not depend on the number of threads.
#include <algorithm>
#include <cmath>
#include <vector>

#include "operator.h"

namespace ms_varlen {
namespace {

constexpr int64_t kBlock = 16384;  // values a thread takes at once

double block_squares(const float* x, int64_t count) {
  Vec lanes{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) lanes += load(x + i) * load(x + i);
  double sum = sum_lanes(lanes);
  for (; i < count; ++i) sum += static_cast<double>(x[i]) * x[i];
  return sum;
}

}  // namespace
}  // namespace ms_varlen

using namespace ms_varlen;

MS_VARLEN_SHAPES(Shape, SquareSum) { return {1}; }

// x [...] -> sum of x * x, [1]
MS_VARLEN_KERNEL(SquareSum) {
  const float* x = static_cast<float*>(params[0]);
  const int64_t count = values_of(ndims, shapes, 0), blocks = (count + kBlock - 1) / kBlock;
  std::vector<double> sums(blocks);
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < blocks; ++b) sums[b] = block_squares(x + b * kBlock, std::min(kBlock, count - b * kBlock));
  double sum = 0;
  for (const double part : sums) sum += part;
  *static_cast<float*>(params[1]) = static_cast<float>(sum);
  return 0;
}

MS_VARLEN_SHAPES(Shape, AdamW) { return {1}; }

// weight m v gradient [...], constants [3] = (beta1, beta2, decay), rate, eps, decay_scale, scale [] -> 0, [1].
// The first three are updated in place with scale * gradient; the gradient becomes 0.
MS_VARLEN_KERNEL(AdamW) {
  float *weight = static_cast<float*>(params[0]), *m = static_cast<float*>(params[1]);
  float *v = static_cast<float*>(params[2]), *gradient = static_cast<float*>(params[3]);
  const float* constants = static_cast<float*>(params[4]);
  const float beta1 = constants[0], beta2 = constants[1];
  const float rate = *static_cast<float*>(params[5]), eps = *static_cast<float*>(params[6]);
  const float decay = constants[2] * *static_cast<float*>(params[7]), scale = *static_cast<float*>(params[8]);
  const int64_t count = values_of(ndims, shapes, 0);
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < count; block += kBlock) {
    const int64_t end = std::min(count, block + kBlock);
#pragma omp simd
    for (int64_t i = block; i < end; ++i) {
      const float g = gradient[i] * scale;
      m[i] = beta1 * m[i] + (1.f - beta1) * g;
      v[i] = beta2 * v[i] + (1.f - beta2) * g * g;
      weight[i] -= rate * (m[i] / (std::sqrt(v[i]) + eps) + decay * weight[i]);
      gradient[i] = 0.f;
    }
  }
  *static_cast<float*>(params[9]) = 0.f;
  return 0;
}
