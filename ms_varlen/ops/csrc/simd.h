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

// a0 b0 a1 b1 ... from the lower (half 0) or upper (half 1) halves of a and b.
template <int Half, size_t... I>
inline Vec interleave(Vec a, Vec b, std::index_sequence<I...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (I / 2 + Half * kLanes / 2 + I % 2 * kLanes)...);
#else
  return __builtin_shuffle(a, b, IntVec{static_cast<int32_t>(I / 2 + Half * kLanes / 2 + I % 2 * kLanes)...});
#endif
}

// A square of kLanes x kLanes values at src (row stride ld), transposed to dst: log2(kLanes) rounds of interleaving rows
// with the rows half the square below them.
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

// exp to 2 units in the last place; NaN stays NaN (a comparison with NaN is false, so the clamps let it through).
// Source: Cephes expf, range reduction by ln 2 in two parts and a polynomial of degree 5 on [-ln2/2, ln2/2].
inline Vec vexp(Vec x) {
  x = x < splat(-87.3f) ? splat(-87.3f) : x;
  x = x > splat(88.7f) ? splat(88.7f) : x;
  const Vec shift = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const Vec shifted = x * 1.44269504088896341f + shift;
  const Vec n = shifted - shift;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  const IntVec exponent = ((IntVec)shifted - 0x4B400000 + 127) << 23;
  return p * (Vec)exponent;
}

}  // namespace ms_varlen
