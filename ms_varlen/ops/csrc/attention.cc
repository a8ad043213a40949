// Causal attention inside each segment of a flat token axis, forward and backward, fp32.
//
//   q [T, N, D], k and v [T, NK, D] (NK divides N), ends [G] int32: running segment ends, the last one T
//   AttentionForward : q k v ends                    -> out [T, N, D], lse [N, T]
//   AttentionBackward: q k v ends out lse d_out      -> d_q, d_k, d_v
//
// Blocks of kBlock queries meet blocks of kBlock keys, nothing above the diagonal is computed (up to a tile), and
// memory stays linear in T. Scores are held transposed, keys x queries: then the softmax runs over rows and every
// vector lane is a query of its own, and all five products of the backward pass find their operands in the order they
// need. Each value is summed in one order that depends on the lengths only, so bits do not depend on the number of
// threads.
//
// Forward and backward together reach 0.75 (512 tokens a segment) to 0.85 (2048) of the rate of NumPy's matrix product,
// and 0.55 with segments of 180, where blocks on the diagonal and packing weigh more (AMD EPYC with AVX-512, D = 64;
// seven products a pair of tokens, the scores of the backward pass among them).
//
// Source: FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "gemm.h"
#include "operator.h"

namespace ms_varlen {
namespace {

constexpr int kBlock = 96;       // a multiple of every tile height and panel width
constexpr int kSlice = 64;       // the head axis is cut in slices, so that row strides are known to the compiler
constexpr int kKeyChunks = 8;    // at most so many partial d_q of one segment
constexpr int kChunkBlocks = 5;  // and none for less than so many blocks of keys: 480 of them fit in the L2 cache
static_assert(kBlock % kPanel == 0 && kBlock % kTileRows == 0);

struct Sizes {
  int tokens, heads, kv_heads, head;
  int group() const { return heads / kv_heads; }
  int slices() const { return (head + kSlice - 1) / kSlice; }
  int padded_head() const { return panels(head) * kPanel; }
  ptrdiff_t q_stride() const { return static_cast<ptrdiff_t>(heads) * head; }
  ptrdiff_t kv_stride() const { return static_cast<ptrdiff_t>(kv_heads) * head; }
  float scale() const { return 1.f / std::sqrt(static_cast<float>(head)); }
};

struct Segment {
  int start, length;
};

// A piece of work for one thread: the queries (forward) or keys (backward) [first, last) of one segment and head.
struct Item {
  Segment segment;
  int head, first, last;
  ptrdiff_t partial;  // backward: where its d_q goes, in rows of the partial buffer; -1: straight to d_q
  int64_t cost;
};

// False, with a line that says why, for ends that would give wrong numbers in silence.
bool read_segments(const int32_t* ends, int64_t count, int tokens, std::vector<Segment>* segments) {
  int start = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (ends[i] < start || ends[i] > tokens) {
      std::fprintf(stderr,
                   "ms_varlen: actual_seq_qlen[%lld] must be between the end before it (%d) and T (%d), got %d\n",
                   static_cast<long long>(i), start, tokens, ends[i]);
      return false;
    }
    if (ends[i] > start) segments->push_back({start, ends[i] - start});  // a repeated end adds nothing
    start = ends[i];
  }
  if (start != tokens)
    std::fprintf(stderr, "ms_varlen: the last of actual_seq_qlen must equal the number of tokens (%d), got %d\n",
                 tokens, start);
  return start == tokens;
}

void costliest_first(std::vector<Item>* items) {
  std::stable_sort(items->begin(), items->end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
}

// queries x head values -> the right operand of scores, one transposed panel set a slice.
void pack_queries(const float* src, ptrdiff_t stride, int queries, int head, float* dst) {
  for (int d = 0; d < head; d += kSlice, dst += kBlock * kSlice)
    pack_transposed(src + d, stride, std::min(kSlice, head - d), queries, dst);
}

// scores^T [keys][kBlock] = rows of keys times packed queries.
void scores(const float* key_rows, const float* packed_queries, int keys, int queries, int head, bool diagonal,
            float* out) {
  gemm_slices<kSlice, kBlock>(keys, queries, head, key_rows, packed_queries, kBlock * kSlice, out, kBlock,
                              diagonal ? Part::kRowsUpToColumn : Part::kAll);
}

IntVec lane_numbers(int first) {
  IntVec v{};
  for (int i = 0; i < kLanes; ++i) v[i] = first + i;
  return v;
}

// Sets what lies above the diagonal: `fill` where a lane's query comes before the key, from the first key that matters
// to any lane of this vector.
void mask_column(float* column, int first_query, int keys, float fill) {
  const IntVec query = lane_numbers(first_query);
  const int partial = std::min(keys, first_query + kLanes);
  for (int key = first_query + 1; key < partial; ++key) {
    const IntVec keys_here = key - IntVec{};
    store(column + key * kBlock, keys_here > query ? splat(fill) : load(column + key * kBlock));
  }
  for (int key = partial; key < keys; ++key) store(column + key * kBlock, splat(fill));
}

// One step of the running softmax over the keys of a block: products s become exp(scale (s - max)); max, sum and the
// factor for what was summed before are kept a query.
void softmax_step(float* s, float scale, int keys, int queries, bool diagonal, bool first, float* running_max,
                  float* running_sum, float* rescale) {
  const float to_exponent = scale * kLog2E;
  for (int c = 0; c < queries; c += kLanes) {
    float* column = s + c;
    if (diagonal) mask_column(column, c, keys, -std::numeric_limits<float>::infinity());
    const int last = diagonal ? std::min(keys, c + kLanes) : keys;
    const Vec before = first ? splat(-std::numeric_limits<float>::infinity()) : load(running_max + c);
    Vec most = before;
    for (int key = 0; key < last; ++key) most = vmax(load(column + key * kBlock), most);
    Vec sum{};
    for (int key = 0; key < last; ++key) {
      const Vec p = vexp2((load(column + key * kBlock) - most) * to_exponent);
      store(column + key * kBlock, p);
      sum += p;
    }
    if (diagonal) mask_column(column, c, keys, 0.f);
    const Vec factor = first ? Vec{} : vexp2((before - most) * to_exponent);
    store(running_max + c, most);
    store(running_sum + c, first ? sum : load(running_sum + c) * factor + sum);
    store(rescale + c, factor);
  }
}

struct ForwardTensors {
  const float *q, *k, *v;
  float *out, *lse;
};

void forward_item(const Sizes& z, const ForwardTensors& t, const Item& item, Scratch* scratch) {
  const int queries = item.last - item.first, padded = z.padded_head(), operand = kBlock * z.slices() * kSlice;
  scratch->reserve(2 * operand + 2 * kBlock * padded + kBlock * kBlock + 3 * kBlock);
  float* packed_q = scratch->take(operand);
  float* key_rows = scratch->take(operand);
  float* value_panels = scratch->take(kBlock * padded);
  float* out = scratch->take(kBlock * padded);
  float* p = scratch->take(kBlock * kBlock);
  float* running_max = scratch->take(kBlock);
  float* running_sum = scratch->take(kBlock);
  float* rescale = scratch->take(kBlock);

  const ptrdiff_t row = item.segment.start + item.first;
  pack_queries(t.q + row * z.q_stride() + item.head * z.head, z.q_stride(), queries, z.head, packed_q);
  for (int key = 0; key <= item.first; key += kBlock) {
    const bool diagonal = key == item.first;
    const int keys = std::min(kBlock, item.last - key);
    const ptrdiff_t at = (item.segment.start + key) * z.kv_stride() + item.head / z.group() * z.head;
    pack_slices<kSlice, kBlock>(t.k + at, z.kv_stride(), keys, z.head, key_rows);
    pack(t.v + at, z.kv_stride(), keys, z.head, value_panels);
    scores(key_rows, packed_q, keys, queries, z.head, diagonal, p);
    softmax_step(p, z.scale(), keys, queries, diagonal, key == 0, running_max, running_sum, rescale);
    for (int i = 0; key > 0 && i < queries; ++i)
      for (int d = 0; d < padded; d += kLanes) store(out + i * padded + d, load(out + i * padded + d) * rescale[i]);
    gemm<1>(queries, z.head, keys, p, kBlock, value_panels, out, padded, key > 0,
            diagonal ? Part::kDepthUpToRow : Part::kAll);
  }
  for (int i = 0; i < queries; ++i) {
    float* to = t.out + (row + i) * z.q_stride() + item.head * z.head;
    const float inverse = 1.f / running_sum[i];
    for (int d = 0; d < z.head; ++d) to[d] = out[i * padded + d] * inverse;
    t.lse[static_cast<ptrdiff_t>(item.head) * z.tokens + row + i] =
        running_max[i] * z.scale() + std::log(running_sum[i]);
  }
}

struct BackwardTensors {
  const float *q, *k, *v, *out, *lse, *d_out;
  float *d_q, *d_k, *d_v, *partial_d_q;
};

// p = exp(scale s - lse) over the products s, d_score = p (d_p - delta) over d_p.
void softmax_gradient(float* s, float* d_p, float scale, int keys, int queries, bool diagonal, const float* lse,
                      const float* delta) {
  const float to_exponent = scale * kLog2E;
  for (int c = 0; c < queries; c += kLanes) {
    const Vec log_sum = load(lse + c) * kLog2E, shift = load(delta + c);
    const int last = diagonal ? std::min(keys, c + kLanes) : keys;
    for (int key = 0; key < last; ++key) {
      const Vec p = vexp2(load(s + key * kBlock + c) * to_exponent - log_sum);
      store(s + key * kBlock + c, p);
      store(d_p + key * kBlock + c, p * (load(d_p + key * kBlock + c) - shift));
    }
    if (diagonal) {
      mask_column(s + c, c, keys, 0.f);
      mask_column(d_p + c, c, keys, 0.f);
    }
  }
}

// A block of queries in each form that the backward products need.
struct QueryBlock {
  float *q_transposed, *d_out_transposed, *q_panels, *d_out_panels, *lse, *delta, *d_q;

  void fill(const Sizes& z, const BackwardTensors& t, ptrdiff_t row, int head, int queries) {
    const ptrdiff_t at = row * z.q_stride() + head * z.head;
    pack_queries(t.q + at, z.q_stride(), queries, z.head, q_transposed);
    pack_queries(t.d_out + at, z.q_stride(), queries, z.head, d_out_transposed);
    pack(t.q + at, z.q_stride(), queries, z.head, q_panels);
    pack(t.d_out + at, z.q_stride(), queries, z.head, d_out_panels);
    for (int i = 0; i < kBlock; ++i) {
      lse[i] = i < queries ? t.lse[static_cast<ptrdiff_t>(head) * z.tokens + row + i] : 0.f;
      const ptrdiff_t at_row = at + i * z.q_stride();
      delta[i] = i < queries ? dot(t.out + at_row, t.d_out + at_row, z.head) : 0.f;
    }
  }
};

// A chunk of keys and values in each form, with their gradients.
struct KeyChunk {
  float *key_rows, *value_rows, *key_panels, *d_k, *d_v;
};

void backward_block(const Sizes& z, const KeyChunk& chunk, int block, int keys, const QueryBlock& queries, int count,
                    bool diagonal, bool first, float* p, float* d_s) {
  const int padded = z.padded_head(), operand = kBlock * z.slices() * kSlice;
  const Part below = diagonal ? Part::kDepthFromRow : Part::kAll;
  scores(chunk.key_rows + block * operand, queries.q_transposed, keys, count, z.head, diagonal, p);
  scores(chunk.value_rows + block * operand, queries.d_out_transposed, keys, count, z.head, diagonal, d_s);
  softmax_gradient(p, d_s, z.scale(), keys, count, diagonal, queries.lse, queries.delta);
  const ptrdiff_t at = static_cast<ptrdiff_t>(block) * kBlock * padded;
  gemm<kBlock>(keys, z.head, count, p, 1, queries.d_out_panels, chunk.d_v + at, padded, true, below);
  gemm<kBlock>(keys, z.head, count, d_s, 1, queries.q_panels, chunk.d_k + at, padded, true, below);
  gemm<1>(count, z.head, keys, d_s, kBlock, chunk.key_panels + at, queries.d_q, padded, !first,
          diagonal ? Part::kDepthUpToRow : Part::kAll);
}

void write_rows(const float* src, int padded, int rows, int head, float scale, ptrdiff_t stride, float* dst) {
  for (int r = 0; r < rows; ++r)
    for (int d = 0; d < head; ++d) dst[r * stride + d] = src[r * padded + d] * scale;
}

// Item: the keys [first, last) of one segment and KV head, against all query heads that share it.
void backward_item(const Sizes& z, const BackwardTensors& t, const Item& item, Scratch* scratch) {
  const int padded = z.padded_head(), operand = kBlock * z.slices() * kSlice;
  const int blocks = (item.last - item.first + kBlock - 1) / kBlock;
  const size_t rows = static_cast<size_t>(blocks) * kBlock * padded, operands = static_cast<size_t>(blocks) * operand;
  scratch->reserve(2 * operands + 3 * rows + 2 * operand + 3 * kBlock * padded + 2 * kBlock + 2 * kBlock * kBlock);
  KeyChunk chunk{scratch->take(operands), scratch->take(operands), scratch->take(rows), scratch->take(rows),
                 scratch->take(rows)};
  QueryBlock queries{scratch->take(operand),         scratch->take(operand), scratch->take(kBlock * padded),
                     scratch->take(kBlock * padded), scratch->take(kBlock),  scratch->take(kBlock),
                     scratch->take(kBlock * padded)};
  float* p = scratch->take(kBlock * kBlock);
  float* d_s = scratch->take(kBlock * kBlock);

  const ptrdiff_t kv_at = (item.segment.start + item.first) * z.kv_stride() + item.head * z.head;
  for (int b = 0; b < blocks; ++b) {
    const int keys = std::min(kBlock, item.last - item.first - b * kBlock);
    const ptrdiff_t at = kv_at + b * kBlock * z.kv_stride();
    pack_slices<kSlice, kBlock>(t.k + at, z.kv_stride(), keys, z.head, chunk.key_rows + b * operand);
    pack_slices<kSlice, kBlock>(t.v + at, z.kv_stride(), keys, z.head, chunk.value_rows + b * operand);
    pack(t.k + at, z.kv_stride(), keys, z.head, chunk.key_panels + static_cast<ptrdiff_t>(b) * kBlock * padded);
  }
  std::fill(chunk.d_k, chunk.d_k + rows, 0.f);
  std::fill(chunk.d_v, chunk.d_v + rows, 0.f);

  for (int g = 0; g < z.group(); ++g) {
    const int head = item.head * z.group() + g;
    for (int query = item.first; query < item.segment.length; query += kBlock) {
      const int count = std::min(kBlock, item.segment.length - query);
      const ptrdiff_t row = item.segment.start + query;
      queries.fill(z, t, row, head, count);
      for (int b = 0; b < blocks && item.first + b * kBlock <= query; ++b) {
        const int key = item.first + b * kBlock;
        backward_block(z, chunk, b, std::min(kBlock, item.last - key), queries, count, key == query, b == 0, p, d_s);
      }
      float* d_q = item.partial < 0 ? t.d_q + row * z.q_stride()
                                    : t.partial_d_q + (item.partial + query - item.first) * z.q_stride();
      write_rows(queries.d_q, padded, count, z.head, z.scale(), z.q_stride(), d_q + head * z.head);
    }
  }
  write_rows(chunk.d_k, padded, item.last - item.first, z.head, z.scale(), z.kv_stride(), t.d_k + kv_at);
  write_rows(chunk.d_v, padded, item.last - item.first, z.head, 1.f, z.kv_stride(), t.d_v + kv_at);
}

// Adds the partial d_q of a segment's later key chunks, in their order.
void add_partials(const Sizes& z, const std::vector<Item>& items, const float* partial_d_q, float* d_q) {
  for (const Item& item : items) {
    if (item.partial < 0 || item.head > 0) continue;
    const ptrdiff_t from = (item.segment.start + item.first) * z.q_stride();
    const ptrdiff_t count = (item.segment.length - item.first) * z.q_stride();
#pragma omp parallel for schedule(static)
    for (ptrdiff_t i = 0; i < count; ++i) d_q[from + i] += partial_d_q[item.partial * z.q_stride() + i];
  }
}

Sizes sizes_of(int64_t** shapes) {
  return {static_cast<int>(shapes[0][0]), static_cast<int>(shapes[0][1]), static_cast<int>(shapes[1][1]),
          static_cast<int>(shapes[0][2])};
}

std::vector<Item> forward_items(const Sizes& z, const std::vector<Segment>& segments) {
  std::vector<Item> items;
  for (const Segment& s : segments)
    for (int first = 0; first < s.length; first += kBlock)
      for (int head = 0; head < z.heads; ++head) {
        const int last = std::min(s.length, first + kBlock);
        items.push_back({s, head, first, last, -1, static_cast<int64_t>(last - first) * (first + last)});
      }
  costliest_first(&items);
  return items;
}

// Items in the order of segments, keys, heads; `partial_rows` is how many rows of partial d_q they need.
std::vector<Item> backward_items(const Sizes& z, const std::vector<Segment>& segments, ptrdiff_t* partial_rows) {
  std::vector<Item> items;
  *partial_rows = 0;
  for (const Segment& s : segments) {
    const int chunk = std::max(kChunkBlocks * kBlock, round_up((s.length + kKeyChunks - 1) / kKeyChunks, kBlock));
    for (int first = 0; first < s.length; first += chunk) {
      const int last = std::min(s.length, first + chunk);
      const int64_t cost = static_cast<int64_t>(last - first) * (2 * s.length - first - last);
      for (int head = 0; head < z.kv_heads; ++head)
        items.push_back({s, head, first, last, first ? *partial_rows : -1, cost});
      if (first) *partial_rows += s.length - first;
    }
  }
  return items;
}

}  // namespace
}  // namespace ms_varlen

using namespace ms_varlen;

constexpr int kBadEnds = 1;  // not 0 makes MindSpore raise

MS_VARLEN_SHAPES(std::vector<Shape>, AttentionForward) {
  return {shape_of(ndims, shapes, 0), {axis_size(ndims, shapes, 0, 1), axis_size(ndims, shapes, 0, 0)}};
}

MS_VARLEN_KERNEL(AttentionForward) {
  const Sizes z = sizes_of(shapes);
  std::vector<Segment> segments;
  if (!read_segments(static_cast<const int32_t*>(params[3]), shapes[3][0], z.tokens, &segments)) return kBadEnds;
  const ForwardTensors t{static_cast<float*>(params[0]), static_cast<float*>(params[1]), static_cast<float*>(params[2]),
                         static_cast<float*>(params[4]), static_cast<float*>(params[5])};
  const std::vector<Item> items = forward_items(z, segments);
#pragma omp parallel for schedule(dynamic, 1)
  for (size_t i = 0; i < items.size(); ++i) {
    static thread_local Scratch scratch;
    forward_item(z, t, items[i], &scratch);
  }
  return 0;
}

MS_VARLEN_SHAPES(std::vector<Shape>, AttentionBackward) {
  return {shape_of(ndims, shapes, 0), shape_of(ndims, shapes, 1), shape_of(ndims, shapes, 2)};
}

MS_VARLEN_KERNEL(AttentionBackward) {
  const Sizes z = sizes_of(shapes);
  std::vector<Segment> segments;
  if (!read_segments(static_cast<const int32_t*>(params[3]), shapes[3][0], z.tokens, &segments)) return kBadEnds;
  ptrdiff_t partial_rows;
  const std::vector<Item> items = backward_items(z, segments, &partial_rows);
  std::vector<Item> by_cost = items;
  costliest_first(&by_cost);
  std::vector<float> partial(static_cast<size_t>(partial_rows) * z.q_stride());
  const BackwardTensors t{static_cast<float*>(params[0]), static_cast<float*>(params[1]),
                          static_cast<float*>(params[2]), static_cast<float*>(params[4]),
                          static_cast<float*>(params[5]), static_cast<float*>(params[6]),
                          static_cast<float*>(params[7]), static_cast<float*>(params[8]),
                          static_cast<float*>(params[9]), partial.data()};
#pragma omp parallel for schedule(dynamic, 1)
  for (size_t i = 0; i < by_cost.size(); ++i) {
    static thread_local Scratch scratch;
    backward_item(z, t, by_cost[i], &scratch);
  }
  add_partials(z, items, partial.data(), t.d_q);
  return 0;
}
