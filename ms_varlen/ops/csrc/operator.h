// What every operator here shares: MindSpore's calling convention for `ops.Custom(func_type="aot")`, and scratch
// memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "simd.h"

namespace mindspore {
class AotExtra;
}

namespace ms_varlen {

using Shape = std::vector<int64_t>;

// While a graph is compiled a size may be -1 (any), and an unknown rank has one axis of -2.
inline int64_t axis_size(const int* ndims, int64_t** shapes, int input, int axis) {
  return axis < ndims[input] ? shapes[input][axis] : -1;
}
inline Shape shape_of(const int* ndims, int64_t** shapes, int input) {
  return Shape(shapes[input], shapes[input] + ndims[input]);
}
inline int64_t values_of(const int* ndims, int64_t** shapes, int input) {
  int64_t values = 1;
  for (int i = 0; i < ndims[input]; ++i) values *= shapes[input][i];
  return values;
}

// Kernels read as far as one input's shape says: another one that is smaller would be read past its end.
constexpr int kBadShape = 9;
inline bool fits(bool holds, const char* name, const char* rule) {
  if (!holds) std::fprintf(stderr, "ms_varlen: %s: %s\n", name, rule);
  return holds;
}

// A growing buffer that hands out aligned pieces and is used again by the next call: fresh pages cost more than the
// arithmetic of a short sequence.
class Scratch {
 public:
  // Starts over with room for `floats`, in up to 16 pieces.
  void reserve(size_t floats) {
    used_ = 0;
    if (size_ >= floats + 17 * kAlign) return;
    size_ = floats + 17 * kAlign;
    buffer_.reset(new float[size_]);
  }
  float* take(size_t floats) {
    const size_t misaligned = (reinterpret_cast<uintptr_t>(buffer_.get() + used_) / sizeof(float)) % kAlign;
    used_ += misaligned ? kAlign - misaligned : 0;
    float* piece = buffer_.get() + used_;
    used_ += floats;
    return piece;
  }

 private:
  static constexpr size_t kAlign = 16;  // 64 bytes, a cache line
  std::unique_ptr<float[]> buffer_;
  size_t size_ = 0, used_ = 0;
};

}  // namespace ms_varlen

#define MS_VARLEN_KERNEL(name)                                \
  extern "C" __attribute__((visibility("default"))) int name( \
      int, [[maybe_unused]] void** params, [[maybe_unused]] int* ndims, int64_t** shapes, const char**, void*, void*)
// One output: its shape. Several outputs: a list of shapes. MindSpore reads garbage when the type does not match.
#define MS_VARLEN_SHAPES(type, name)                                                                   \
  extern "C" __attribute__((visibility("default"))) type name##InferShape([[maybe_unused]] int* ndims, \
                                                                          int64_t** shapes, mindspore::AotExtra*)
