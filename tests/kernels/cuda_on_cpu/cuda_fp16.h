// See cuda_runtime.h.
#pragma once

using __half = _Float16;
inline float __half2float(__half value) { return value; }
