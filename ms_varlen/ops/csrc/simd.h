// Vectors of floats in the compiler's portable notation (GCC and Clang), as wide as the machine's registers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

namespace ms_varlen {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kRegisters = 32;
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
// What MindSpore hands over is aligned to a float, no more.
typedef Vec LooseVec __attribute__((aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<LooseVec*>(p) = v; }
inline Vec splat(float x) { return x - Vec{}; }
inline Vec vmax(Vec a, Vec b) { return a > b ? a : b; }

inline float sum_lanes(Vec v) {
  float s = 0;
  for (int i = 0; i < kLanes; ++i) s += v[i];
  return s;
}

inline float dot(const float* a, const float* b, int count) {
  Vec v{};
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) v += load(a + i) * load(b + i);
  float s = sum_lanes(v);
  for (; i < count; ++i) s += a[i] * b[i];
  return s;
}

constexpr float kLog2E = 1.44269504088896341f;
// 2^x on [-1/2, 1/2], least relative error; exact at 0, so that the largest score of a row weighs 1.
constexpr float kExp2[] = {1.f,           0.693147182f, 0.240226462f, 0.0555032864f, 0.00961848907f, 0.00133999309f,
                           0.00015345811f};

// a0 b0 a1 b1 ... from the lower (half 0) or upper (half 1) halves of a and b.
template <int Half, size_t... I>
inline Vec interleave(Vec a, Vec b, std::index_sequence<I...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (I / 2 + Half * kLanes / 2 + I % 2 * kLanes)...);
#else
  return __builtin_shuffle(a, b, IntVec{static_cast<int32_t>(I / 2 + Half * kLanes / 2 + I % 2 * kLanes)...});
#endif
}

// A square of kLanes x kLanes values at src (row stride ld), transposed to dst: log2(kLanes) rounds of interleaving
// rows with the rows half the square below them.
inline void transpose(const float* src, ptrdiff_t ld, float* dst, ptrdiff_t dst_ld) {
  constexpr auto lanes = std::make_index_sequence<kLanes>();
  Vec rows[kLanes], next[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = load(src + i * ld);
  for (int round = 1; round < kLanes; round *= 2) {
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = interleave<0>(rows[i], rows[i + kLanes / 2], lanes);
      next[2 * i + 1] = interleave<1>(rows[i], rows[i + kLanes / 2], lanes);
    }
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
  for (int i = 0; i < kLanes; ++i) store(dst + i * dst_ld, rows[i]);
}

// 2 to the power x for x <= 127, to 2 units in the last place; 2^-126 below that; NaN stays NaN (a comparison with NaN
// is false, so the clamp lets it through). On [-1/2, 1/2] a polynomial of degree 6.
inline Vec vexp2(Vec x) {
  x = x < splat(-126.f) ? splat(-126.f) : x;
  const Vec shift = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const Vec shifted = x + shift;
  const Vec r = x - (shifted - shift);
  Vec p = splat(kExp2[6]);
  for (int i = 5; i >= 0; --i) p = p * r + kExp2[i];
  const IntVec exponent = ((IntVec)shifted - 0x4B400000 + 127) << 23;
  return p * (Vec)exponent;
}

// e to the power x; its relative error grows with |x|, which takes no harm where it is added to 1 or to other terms.
inline Vec vexp(Vec x) {
  x = x > splat(88.f) ? splat(88.f) : x;
  return vexp2(x * kLog2E);
}

}  // namespace ms_varlen
