// The output layer and its cross-entropy in one: the sum over supervised tokens, and both gradients, fp32.
//
//   hidden [T, H], weight [V, H], labels [T] int32 (-100: not supervised)
//   LinearCrossEntropy: hidden weight labels -> loss [1], d_hidden [T, H], d_weight [V, H]
//
// The supervised tokens alone are taken, kTokens at a time: logits are held transposed, V x kTokens, and are gone with
// their chunk. The gradients are those of the sum itself; a caller scales them. Threads share a chunk by blocks of V
// and by blocks of d_hidden, so no sum is split between them and bits do not depend on their number. Source: the idea
// of gradients in the forward pass is Liger-Kernel's (arXiv 2410.10989), section 3.2.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "gemm.h"
#include "operator.h"

namespace ms_varlen {
namespace {

constexpr int kTokens = 384;
constexpr int kRows = 96;      // of the vocabulary
constexpr int kSlice = 256;    // of H, and of V where d_hidden sums over it
constexpr int kColumns = 128;  // of d_hidden, a thread's share
constexpr int32_t kIgnored = -100;
static_assert(kTokens % kPanel == 0 && kRows % kTileRows == 0 && kColumns % kPanel == 0 && kTokens % kRows == 0);

struct Problem {
  const float *hidden, *weight;
  const int32_t* labels;
  int tokens, size, vocabulary;
  float *d_hidden, *d_weight;
  int blocks() const { return (vocabulary + kRows - 1) / kRows; }
  int padded() const { return panels(size) * kPanel; }
};

// What a chunk of supervised tokens needs, shared by all threads.
struct Chunk {
  const int* token;  // where each one stands in T
  int count;
  float* rows;               // [count][size]
  float* transposed_panels;  // hidden^T, slice by slice of H
  float* panels;             // hidden
  float* logits;             // [V][kTokens], then their gradient
  float* block_max;          // [blocks][kTokens]
  float* block_sum;          // [blocks][kTokens]
  float* lse;                // [kTokens]
};

void gather_rows(const Problem& p, const Chunk& c) {
  for (int i = 0; i < c.count; ++i)
    std::memcpy(c.rows + static_cast<ptrdiff_t>(i) * p.size, p.hidden + static_cast<ptrdiff_t>(c.token[i]) * p.size,
                sizeof(float) * p.size);
  for (int d = 0; d < p.size; d += kSlice)
    pack_transposed(c.rows + d, p.size, std::min(kSlice, p.size - d), c.count,
                    c.transposed_panels + static_cast<ptrdiff_t>(d) * kTokens);
  pack(c.rows, p.size, c.count, p.size, c.panels);
}

// The logits of one block of the vocabulary, with each token's maximum and sum of exponentials over them.
void block_logits(const Problem& p, const Chunk& c, int block, Scratch* scratch) {
  const int first = block * kRows, rows = std::min(kRows, p.vocabulary - first);
  scratch->reserve(static_cast<size_t>(round_up(p.size, kSlice)) * kRows);
  float* weight_rows = scratch->take(static_cast<size_t>(round_up(p.size, kSlice)) * kRows);
  pack_slices<kSlice, kRows>(p.weight + static_cast<ptrdiff_t>(first) * p.size, p.size, rows, p.size, weight_rows);
  float* logits = c.logits + static_cast<ptrdiff_t>(first) * kTokens;
  gemm_slices<kSlice, kRows>(rows, c.count, p.size, weight_rows, c.transposed_panels, kSlice * kTokens, logits,
                             kTokens);
  for (int t = 0; t < c.count; t += kLanes) {
    Vec most = load(logits + t), sum{};
    for (int r = 1; r < rows; ++r) most = vmax(load(logits + r * kTokens + t), most);
    for (int r = 0; r < rows; ++r) sum += vexp(load(logits + r * kTokens + t) - most);
    store(c.block_max + block * kTokens + t, most);
    store(c.block_sum + block * kTokens + t, sum);
  }
}

// log of each token's sum of exponentials, and the chunk's loss.
double chunk_loss(const Problem& p, const Chunk& c) {
  for (int t = 0; t < c.count; t += kLanes) {
    Vec most = load(c.block_max + t), sum{};
    for (int b = 1; b < p.blocks(); ++b) most = vmax(load(c.block_max + b * kTokens + t), most);
    for (int b = 0; b < p.blocks(); ++b)
      sum += load(c.block_sum + b * kTokens + t) * vexp(load(c.block_max + b * kTokens + t) - most);
    for (int lane = 0; lane < kLanes; ++lane) c.lse[t + lane] = most[lane] + std::log(sum[lane]);
  }
  double loss = 0;
  for (int t = 0; t < c.count; ++t)
    loss += c.lse[t] - c.logits[static_cast<ptrdiff_t>(p.labels[c.token[t]]) * kTokens + t];
  return loss;
}

// Logits of one block become softmax - one_hot(label); their product with hidden is added to d_weight.
void block_weight_gradient(const Problem& p, const Chunk& c, int block, Scratch* scratch) {
  const int first = block * kRows, rows = std::min(kRows, p.vocabulary - first);
  float* d_logits = c.logits + static_cast<ptrdiff_t>(first) * kTokens;
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < c.count; t += kLanes) {
      float* at = d_logits + r * kTokens + t;
      store(at, vexp(load(at) - load(c.lse + t)));
    }
  for (int t = 0; t < c.count; ++t) {
    const int row = p.labels[c.token[t]] - first;
    if (row >= 0 && row < rows) d_logits[row * kTokens + t] -= 1.f;
  }
  scratch->reserve(static_cast<size_t>(kRows) * p.padded());
  float* sum = scratch->take(static_cast<size_t>(kRows) * p.padded());
  gemm<kTokens>(rows, p.size, c.count, d_logits, 1, c.panels, sum, p.padded(), false);
  for (int r = 0; r < rows; ++r) {
    float* to = p.d_weight + static_cast<ptrdiff_t>(first + r) * p.size;
    for (int i = 0; i < p.size; ++i) to[i] += sum[r * p.padded() + i];
  }
}

// d_hidden of the chunk's tokens [first, first + kRows), columns [column, column + kColumns).
void hidden_gradient(const Problem& p, const Chunk& c, int first, int column, Scratch* scratch) {
  const int count = std::min(kRows, c.count - first), columns = std::min(kColumns, p.size - column);
  scratch->reserve(kSlice * (kRows + kColumns) + kRows * kColumns);
  float* d_logits = scratch->take(kSlice * kRows);
  float* weight_panels = scratch->take(kSlice * kColumns);
  float* sum = scratch->take(kRows * kColumns);
  for (int v = 0; v < p.vocabulary; v += kSlice) {
    const int depth = std::min(kSlice, p.vocabulary - v);
    for (int k = 0; k < depth; ++k)
      std::memcpy(d_logits + k * kRows, c.logits + static_cast<ptrdiff_t>(v + k) * kTokens + first,
                  sizeof(float) * kRows);
    pack(p.weight + static_cast<ptrdiff_t>(v) * p.size + column, p.size, depth, columns, weight_panels);
    gemm<1>(count, columns, depth, d_logits, kRows, weight_panels, sum, kColumns, v > 0);
  }
  for (int i = 0; i < count; ++i)
    std::memcpy(p.d_hidden + static_cast<ptrdiff_t>(c.token[first + i]) * p.size + column, sum + i * kColumns,
                sizeof(float) * columns);
}

double chunk_step(const Problem& p, const Chunk& c) {
  gather_rows(p, c);
#pragma omp parallel for schedule(dynamic, 1)
  for (int b = 0; b < p.blocks(); ++b) {
    static thread_local Scratch scratch;
    block_logits(p, c, b, &scratch);
  }
  const double loss = chunk_loss(p, c);
#pragma omp parallel for schedule(dynamic, 1)
  for (int b = 0; b < p.blocks(); ++b) {
    static thread_local Scratch scratch;
    block_weight_gradient(p, c, b, &scratch);
  }
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
  for (int first = 0; first < c.count; first += kRows)
    for (int column = 0; column < p.size; column += kColumns) {
      static thread_local Scratch scratch;
      hidden_gradient(p, c, first, column, &scratch);
    }
  return loss;
}

}  // namespace
}  // namespace ms_varlen

using namespace ms_varlen;

constexpr int kBadLabel = 1;  // not 0 makes MindSpore raise

MS_VARLEN_SHAPES(std::vector<Shape>, LinearCrossEntropy) {
  return {{1}, shape_of(ndims, shapes, 0), shape_of(ndims, shapes, 1)};
}

MS_VARLEN_KERNEL(LinearCrossEntropy) {
  const Problem p{static_cast<float*>(params[0]), static_cast<float*>(params[1]), static_cast<int32_t*>(params[2]),
                  static_cast<int>(shapes[0][0]), static_cast<int>(shapes[0][1]), static_cast<int>(shapes[1][0]),
                  static_cast<float*>(params[4]), static_cast<float*>(params[5])};
  std::vector<int> supervised;
  for (int t = 0; t < p.tokens; ++t) {
    if (p.labels[t] == kIgnored) continue;
    if (p.labels[t] < 0 || p.labels[t] >= p.vocabulary) {
      std::fprintf(stderr, "ms_varlen: labels[%d] must be -100 or in [0, %d), got %d\n", t, p.vocabulary, p.labels[t]);
      return kBadLabel;
    }
    supervised.push_back(t);
  }
  std::fill(p.d_hidden, p.d_hidden + static_cast<ptrdiff_t>(p.tokens) * p.size, 0.f);
  std::fill(p.d_weight, p.d_weight + static_cast<ptrdiff_t>(p.vocabulary) * p.size, 0.f);

  Scratch scratch;  // given back after the call: it is as large as the vocabulary
  const size_t rows = static_cast<size_t>(kTokens) * p.padded(), maxima = static_cast<size_t>(p.blocks()) * kTokens;
  scratch.reserve(3 * rows + static_cast<size_t>(p.vocabulary) * kTokens + 2 * maxima + kTokens);
  Chunk c{nullptr,
          0,
          scratch.take(rows),
          scratch.take(rows),
          scratch.take(rows),
          scratch.take(static_cast<size_t>(p.vocabulary) * kTokens),
          scratch.take(maxima),
          scratch.take(maxima),
          scratch.take(kTokens)};
  double loss = 0;
  for (size_t first = 0; first < supervised.size(); first += kTokens) {
    c.token = supervised.data() + first;
    c.count = static_cast<int>(std::min<size_t>(kTokens, supervised.size() - first));
    loss += chunk_step(p, c);
  }
  *static_cast<float*>(params[3]) = static_cast<float>(loss);
  return 0;
}
