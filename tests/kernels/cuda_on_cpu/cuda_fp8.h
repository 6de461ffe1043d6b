// See cuda_runtime.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda_runtime.h"

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

namespace on_cpu {

// To nearest, ties to even; beyond the largest number the largest, NaN without sign for NaN.
inline unsigned to_fp8(float value, int mantissa, int least_exponent, double largest) {
  if (std::isnan(value)) return 0x7F;
  const unsigned sign = std::signbit(value) ? 0x80 : 0;
  double size = std::fmin(std::fabs(static_cast<double>(value)), largest);
  int exponent = size > 0 ? std::ilogb(size) : least_exponent;
  if (exponent < least_exponent) exponent = least_exponent;
  // in steps of the last bit; the first number of the next power of two follows by itself
  const double steps = std::nearbyint(std::ldexp(size, mantissa - exponent));
  const int above = (exponent - least_exponent) << mantissa;
  return sign | (static_cast<unsigned>(steps) + above);
}

}  // namespace on_cpu

inline uint16_t __nv_cvt_float2_to_fp8x2(float2 pair, __nv_saturation_t, __nv_fp8_interpretation_t format) {
  const int mantissa = format == __NV_E4M3 ? 3 : 2;
  const int least = format == __NV_E4M3 ? -6 : -14;
  const double largest = format == __NV_E4M3 ? 448.0 : 57344.0;
  return on_cpu::to_fp8(pair.x, mantissa, least, largest) | on_cpu::to_fp8(pair.y, mantissa, least, largest) << 8;
}
