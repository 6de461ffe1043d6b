// The cast to fp8 in CUDA C++, see cuda.py.
//
// Note "Tiles". The cast is bound by memory: 2 bytes in, 1 and 1 out. A warp takes 16 rows and 64 columns of a tile at a
// time, or 8 and 128, a lane 4 rows and 8 columns of them: 4 loads of 16 bytes, which lanes beside each other put
// together to whole lines of 128. A lane converts its numbers in pairs; each of its rows leaves as 8 bytes, 8 lanes fill
// half a line, 16 a whole one. The 4 x 8 bytes are turned round in registers, to a word of 4 rows for each of 8 columns,
// which goes into shared memory. From there a thread takes 16 rows of a column at once: 128 rows of a column leave as a
// line.
//
// Note "Banks". Shared memory holds a tile by columns, in chunks of 16 bytes; chunk n lies in place n ^ (c % 8), c being
// the number of its 8 columns. Lanes that write have 8 different c and the 4 words of a chunk: 32 banks. Where they
// have 16 different c and 2 words, those of the upper 8 lie in the other half of their chunks: 32 banks, too. Lanes that
// read take 8 chunks beside each other of one c: 32 banks for each quarter of a warp.
//
// Note "Records". What is rare is not prepared for: the largest element is taken of bits, and where it shows a number
// that is not finite, or one that saturates, the block reads its tile again.

#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

// Of a tile; cuda.py chooses, and compiles a library for each choice.
#ifndef TILE_ROWS
#define TILE_ROWS 128
#define TILE_COLUMNS 64
#define TILE_THREADS 256
#define TILE_BLOCKS 6
#define TILE_STEPS 1
#define TILE_GROUP 8
#define TILE_ACROSS 64
#endif

namespace {

constexpr int kRows = TILE_ROWS;
constexpr int kColumns = TILE_COLUMNS;
constexpr int kThreads = TILE_THREADS;
// Blocks that a multiprocessor shall hold: how many registers a thread may have.
constexpr int kBlocks = TILE_BLOCKS;
// Tiles below each other that a block takes, one after the other.
constexpr int kSteps = TILE_STEPS;
// Blocks below each other that are started one after the other: what they write in columns is near in memory.
constexpr int kGroup = TILE_GROUP;

constexpr int kWarps = kThreads / 32;
// What a warp takes at a time.
constexpr int kUnitColumns = TILE_ACROSS;
constexpr int kUnitRows = 32 * 4 * 8 / kUnitColumns;
constexpr int kLanesAcross = kUnitColumns / 8;
constexpr int kUnitsAcross = kColumns / kUnitColumns;
constexpr int kUnits = kRows / kUnitRows * kUnitsAcross / kWarps;
// Pieces of 16 bytes of a column.
constexpr int kChunks = kRows / 16;
static_assert(kUnits * kWarps * kUnitRows * kUnitColumns == kRows * kColumns, "warps take whole units");
static_assert(kUnitColumns == 64 || kUnitColumns == 128, "a warp is 8 or 16 lanes wide");
static_assert(kColumns % kUnitColumns == 0 && kRows % kUnitRows == 0, "tiles are whole units");
// so that a scale of 128 x 128 is that of a whole tile
static_assert(128 % kRows == 0 && 128 % kColumns == 0, "tiles divide blocks of 128");

constexpr int kElementTile = 64;
constexpr int kElementThreads = 256;

enum Format { kE4M3 = 0, kE5M2 = 1 };
enum Scales { kOfTiles = 0, kOfRows = 1, kOfColumns = 2, kOfAnything = 3 };
enum Element { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// The arguments of a call; cuda.py has the same fields.
struct Cast {
  const void* x;                  // [M, K]
  const float* scale;             // [m, k], powers of two
  uint8_t* rows;                  // [M, K], or none
  uint8_t* columns;               // [K, M], or none
  unsigned* seen;                 // the largest finite |x| as bits, or none
  unsigned long long* saturated;  // or none
  float* scale_copy;              // or none
  int M;
  int K;
  int scale_columns;  // k
  int block_rows;     // rows that share a scale; 0: all
  int block_columns;
};

template <Format format>
constexpr float kLargest = format == kE4M3 ? 448.0f : 57344.0f;

// 2^-e of 2^e, by its bits.
__device__ __forceinline__ float inverse_of(float scale) {
  return __uint_as_float((254u << 23) - __float_as_uint(scale));
}

// Two neighbours of a row -> two bytes, the first one below. What is not finite becomes NaN: x * 0 does, of infinity
// too, and changes nothing else, for zero has the sign of x.
template <Format format>
__device__ __forceinline__ unsigned in_fp8(float first, float second, float first_inverse, float second_inverse) {
  const float2 both = make_float2(fmaf(first, first_inverse, first * 0.0f), fmaf(second, second_inverse, second * 0.0f));
  return __nv_cvt_float2_to_fp8x2(both, __NV_SATFINITE, format == kE4M3 ? __NV_E4M3 : __NV_E5M2);
}

// The two bf16 of a word.
__device__ __forceinline__ float first_of(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float second_of(unsigned pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// A word of four columns in each of four rows -> one of four rows in each of four columns.
__device__ __forceinline__ void turn(const unsigned (&row)[4], unsigned (&column)[4]) {
  const unsigned upper_01 = __byte_perm(row[0], row[1], 0x5140);
  const unsigned upper_23 = __byte_perm(row[0], row[1], 0x7362);
  const unsigned lower_01 = __byte_perm(row[2], row[3], 0x5140);
  const unsigned lower_23 = __byte_perm(row[2], row[3], 0x7362);
  column[0] = __byte_perm(upper_01, lower_01, 0x5410);
  column[1] = __byte_perm(upper_01, lower_01, 0x7632);
  column[2] = __byte_perm(upper_23, lower_23, 0x5410);
  column[3] = __byte_perm(upper_23, lower_23, 0x7632);
}

// Where a lane's 4 rows and 8 columns lie.
struct Place {
  int row;     // of the tile
  int column;  // of the tile
};

__device__ __forceinline__ Place place_of(int unit) {
  const int lane = threadIdx.x % 32;
  const int number = threadIdx.x / 32 + unit * kWarps;
  return {number / kUnitsAcross * kUnitRows + lane / kLanesAcross * 4,
          number % kUnitsAcross * kUnitColumns + lane % kLanesAcross * 8};
}

// Whether a column's chunks lie with their halves swapped, see note "Banks".
__device__ __forceinline__ bool is_swapped(int column) { return kUnitColumns == 128 && column / 64 % 2 == 1; }

// Of the matrix, where a tile begins.
struct Corner {
  int m;
  int k;
};

// Sides of the matrix are multiples of 16, so a lane's rows and columns are all inside or all outside.
__device__ __forceinline__ bool is_inside(const Cast& cast, Corner corner, int row, int column) {
  return corner.m + row < cast.M && corner.k + column < cast.K;
}

// Where a number of the tile lies in memory by rows.
__device__ __forceinline__ int64_t place_in_rows(const Cast& cast, Corner corner, int row, int column) {
  // what is the same for a block is counted in 64 bits; within a tile 32 are enough
  return static_cast<int64_t>(corner.m) * cast.K + corner.k + (row * cast.K + column);
}

// Eight bf16 that are read once: they shall not take the place of what the next kernel reads.
__device__ __forceinline__ uint4 load_8(const uint16_t* from) { return __ldcs(reinterpret_cast<const uint4*>(from)); }

__device__ __forceinline__ void load(const Cast& cast, Corner corner, uint4 (&x)[kUnits][4]) {
  const int64_t row_step = cast.K;
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    const Place place = place_of(unit);
    const bool inside = is_inside(cast, corner, place.row, place.column);
    const uint16_t* from =
        static_cast<const uint16_t*>(cast.x) + place_in_rows(cast, corner, place.row, place.column);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[unit][j] = make_uint4(0, 0, 0, 0);
      if (inside) x[unit][j] = load_8(from + j * row_step);
    }
  }
}

// What a block has seen, when something of it is not finite or saturates: its elements, once again.
template <Format format>
__device__ void record_again(const Cast& cast, Corner corner, float inverse) {
  const uint16_t* const x = static_cast<const uint16_t*>(cast.x);
  float largest = 0.0f;
  unsigned over = 0;
#pragma unroll 1
  for (int n = threadIdx.x; n < kRows * kColumns / 8; n += kThreads) {
    const int row = n / (kColumns / 8);
    const int column = n % (kColumns / 8) * 8;
    if (!is_inside(cast, corner, row, column)) continue;
    const uint4 pairs = load_8(x + place_in_rows(cast, corner, row, column));
    const unsigned words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float size = fabsf(i % 2 == 0 ? first_of(words[i / 2]) : second_of(words[i / 2]));
      if (size < INFINITY) {
        largest = fmaxf(largest, size);
        over += size * inverse > kLargest<format>;
      }
    }
  }
  // numbers without sign are ordered as their bits
  const unsigned top = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(largest));
  const unsigned count = __reduce_add_sync(0xFFFFFFFFu, over);
  if (threadIdx.x % 32 == 0) {
    if (cast.seen != nullptr) atomicMax(cast.seen, top);
    if (cast.saturated != nullptr && count > 0) atomicAdd(cast.saturated, static_cast<unsigned long long>(count));
  }
}

// The inverse of a scale that a whole tile shares.
__device__ __forceinline__ float inverse_of_tile(const Cast& cast, Corner corner) {
  int at = 0;
  if (cast.block_rows != 0) at = corner.m / 128 * cast.scale_columns;
  if (cast.block_columns != 0) at += corner.k / 128;
  return inverse_of(__ldg(cast.scale + at));
}

// Of bf16 with sides that are multiples of 16; blocks have 1 or 128 rows and columns, or all.
template <Format format, Scales scales>
__global__ void __launch_bounds__(kThreads, kBlocks) cast_tiles(const __grid_constant__ Cast cast) {
  __shared__ uint4 turned[kRows * kColumns / 16];
  __shared__ unsigned tops[kWarps];
  unsigned* const words = reinterpret_cast<unsigned*>(turned);

  const int first_tile = static_cast<int>(blockIdx.z * kGroup + blockIdx.x) * kSteps;
  Corner corner{first_tile * kRows, static_cast<int>(blockIdx.y) * kColumns};
  if (corner.m >= cast.M) return;

  const int64_t row_step = cast.K;
  const int64_t column_step = cast.M;
  uint4 x[kUnits][4];
  load(cast, corner, x);

#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    float inverse = 1.0f;
    if constexpr (scales == kOfTiles) inverse = inverse_of_tile(cast, corner);

    unsigned top = 0;
    // of each unit, 4 rows: columns 0 to 3 and 4 to 7
    unsigned low[kUnits][4];
    unsigned high[kUnits][4];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const Place place = place_of(unit);
      const bool inside = is_inside(cast, corner, place.row, place.column);
      const int m = corner.m + place.row;
      const int k = corner.k + place.column;
      float of_columns[8];
      if constexpr (scales == kOfColumns) {
        const float* const line = cast.scale + (cast.block_rows != 0 ? corner.m / 128 * cast.scale_columns : 0);
#pragma unroll
        for (int i = 0; i < 8; ++i) of_columns[i] = inside ? inverse_of(__ldg(line + k + i)) : 1.0f;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned pairs[4] = {x[unit][j].x, x[unit][j].y, x[unit][j].z, x[unit][j].w};
        if constexpr (scales == kOfRows) {
          const int at = (m + j) * cast.scale_columns + (cast.block_columns != 0 ? corner.k / 128 : 0);
          inverse = inside ? inverse_of(__ldg(cast.scale + at)) : 1.0f;
        }
        unsigned bytes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // bits of bf16 without sign are ordered, infinity above all numbers and NaN above it
          if constexpr (scales == kOfTiles) top = __vmaxu2(top, pairs[i] & 0x7FFF7FFFu);
          float first_inverse = inverse;
          float second_inverse = inverse;
          if constexpr (scales == kOfColumns) {
            first_inverse = of_columns[2 * i];
            second_inverse = of_columns[2 * i + 1];
          }
          bytes[i] = in_fp8<format>(first_of(pairs[i]), second_of(pairs[i]), first_inverse, second_inverse);
        }
        low[unit][j] = bytes[0] | bytes[1] << 16;
        high[unit][j] = bytes[2] | bytes[3] << 16;
      }
      if (cast.rows != nullptr && inside) {
        uint8_t* const to = cast.rows + place_in_rows(cast, corner, place.row, place.column);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          *reinterpret_cast<uint2*>(to + j * row_step) = make_uint2(low[unit][j], high[unit][j]);
        }
      }
    }

    const Corner here = corner;
    corner.m += kRows;
    // on its way while this tile is turned round
    if (step + 1 < kSteps) load(cast, corner, x);

    if (cast.columns != nullptr) {
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        const Place place = place_of(unit);
        const int swizzle = place.column / 8 % 8;
        const int first = (place.column * kChunks + place.row / 16) ^ swizzle;
        const int word = place.row / 4 % 4 ^ (is_swapped(place.column) ? 2 : 0);
        unsigned of_column[8];
        turn(low[unit], reinterpret_cast<unsigned(&)[4]>(of_column[0]));
        turn(high[unit], reinterpret_cast<unsigned(&)[4]>(of_column[4]));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          // ((column + i) * kChunks + row / 16) ^ swizzle, of which i changes what is known here
          const int chunk = (first ^ (i * kChunks % 8)) + i * kChunks / 8 * 8;
          words[chunk * 4 + word] = of_column[i];
        }
      }
    }

    bool is_odd = false;
    if constexpr (scales == kOfTiles) {
      top = max(top & 0xFFFFu, top >> 16) << 16;
      const unsigned of_warp = __reduce_max_sync(0xFFFFFFFFu, top);
      if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = of_warp;
      is_odd = !(__uint_as_float(top) * inverse <= kLargest<format>);
    }
    is_odd = __syncthreads_or(is_odd);

    if (cast.columns != nullptr) {
      const int first = threadIdx.x / kChunks;
      const int row = threadIdx.x % kChunks * 16;
      uint8_t* const to = cast.columns + (here.k + first) * column_step + here.m + row;
#pragma unroll
      for (int i = 0; i < kColumns * kChunks / kThreads; ++i) {
        const int further = i * (kThreads / kChunks);
        const int column = first + further;
        uint4 chunk = turned[(threadIdx.x + i * kThreads) ^ (column / 8 % 8)];
        if (is_swapped(column)) chunk = make_uint4(chunk.z, chunk.w, chunk.x, chunk.y);
        if (is_inside(cast, here, row, column)) *reinterpret_cast<uint4*>(to + further * column_step) = chunk;
      }
    }

    if constexpr (scales == kOfTiles) {
      if (is_odd) {
        if (cast.seen != nullptr || cast.saturated != nullptr) record_again<format>(cast, here, inverse);
      } else if (cast.seen != nullptr && threadIdx.x == 0) {
        unsigned largest = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) largest = max(largest, tops[warp]);
        atomicMax(cast.seen, largest);
      }
    }
    if (step + 1 < kSteps) __syncthreads();
  }
  const bool is_first = blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0;
  if (cast.scale_copy != nullptr && is_first) *cast.scale_copy = *cast.scale;
}

template <Element element>
__device__ __forceinline__ float element_at(const void* x, int64_t at) {
  if constexpr (element == kFloat32) {
    return static_cast<const float*>(x)[at];
  } else if constexpr (element == kBFloat16) {
    return __uint_as_float(static_cast<unsigned>(static_cast<const uint16_t*>(x)[at]) << 16);
  } else {
    return __half2float(static_cast<const __half*>(x)[at]);
  }
}

// All other formats, sizes and blocks, an element at a time.
template <Element element, Format format>
__global__ void __launch_bounds__(kElementThreads) cast_elements(const __grid_constant__ Cast cast) {
  // a row is 17 words, so that lanes that read a column have banks of their own
  __shared__ uint8_t tile[kElementTile][kElementTile + 4];
  const int lines = kElementThreads / kElementTile;
  const int inner = threadIdx.x % kElementTile;
  const int outer = threadIdx.x / kElementTile;
  const int first_m = static_cast<int>(blockIdx.x) * kElementTile;
  const int first_k = static_cast<int>(blockIdx.y) * kElementTile;

  float largest = 0.0f;
  unsigned over = 0;
  const int k = first_k + inner;
#pragma unroll 4
  for (int row = outer; row < kElementTile; row += lines) {
    const int m = first_m + row;
    if (m >= cast.M || k >= cast.K) continue;
    const int64_t place = static_cast<int64_t>(m) * cast.K + k;
    const float x = element_at<element>(cast.x, place);
    int64_t at = 0;
    if (cast.block_rows != 0) at = static_cast<int64_t>(m / cast.block_rows) * cast.scale_columns;
    if (cast.block_columns != 0) at += k / cast.block_columns;
    const float inverse = inverse_of(__ldg(cast.scale + at));
    const float size = fabsf(x);
    if (size < INFINITY) {
      largest = fmaxf(largest, size);
      over += size * inverse > kLargest<format>;
    }
    const uint8_t byte = static_cast<uint8_t>(in_fp8<format>(x, 0.0f, inverse, 1.0f) & 0xFFu);
    tile[row][inner] = byte;
    if (cast.rows != nullptr) cast.rows[place] = byte;
  }

  const unsigned top = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(largest));
  const unsigned count = __reduce_add_sync(0xFFFFFFFFu, over);
  if (threadIdx.x % 32 == 0) {
    if (cast.seen != nullptr) atomicMax(cast.seen, top);
    if (cast.saturated != nullptr && count > 0) atomicAdd(cast.saturated, static_cast<unsigned long long>(count));
  }
  const bool is_first = blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0;
  if (cast.scale_copy != nullptr && is_first) *cast.scale_copy = *cast.scale;

  if (cast.columns == nullptr) return;
  __syncthreads();
  const int m = first_m + inner;
  for (int column = outer; column < kElementTile; column += lines) {
    if (m >= cast.M || first_k + column >= cast.K) continue;
    cast.columns[static_cast<int64_t>(first_k + column) * cast.M + m] = tile[inner][column];
  }
}

unsigned tiles_of(int size, int tile) { return static_cast<unsigned>((size - 1) / tile + 1); }

using Kernel = void (*)(Cast);

template <Format format>
Kernel kernel_of(int element, int scales) {
  switch (scales) {
    case kOfTiles:
      return cast_tiles<format, kOfTiles>;
    case kOfRows:
      return cast_tiles<format, kOfRows>;
    case kOfColumns:
      return cast_tiles<format, kOfColumns>;
    default:
      break;
  }
  switch (element) {
    case kFloat32:
      return cast_elements<kFloat32, format>;
    case kBFloat16:
      return cast_elements<kBFloat16, format>;
    default:
      return cast_elements<kFloat16, format>;
  }
}

}  // namespace

// Starts the kernel on a stream. -> 0, or CUDA's error. `scales`: kOfAnything takes elements one at a time. `arguments`:
// a Cast, whose type is unknown outside of this file: a function that names it would not be exported.
extern "C" int megaspec_fp8_cast(
    const void* arguments, int element, int format, int scales, int device, void* stream) {
  const Cast* cast = static_cast<const Cast*>(arguments);
  // of the runtime that is linked in here, which may not be the one of who calls
  int current = -1;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;

  cudaLaunchConfig_t config = {};
  config.stream = static_cast<cudaStream_t>(stream);
  if (scales == kOfAnything) {
    config.gridDim = dim3(tiles_of(cast->M, kElementTile), tiles_of(cast->K, kElementTile), 1);
    config.blockDim = dim3(kElementThreads, 1, 1);
  } else {
    const unsigned blocks = tiles_of(cast->M, kRows * kSteps);
    // blocks are started with the first dimension running fastest
    config.gridDim = dim3(blocks < kGroup ? blocks : kGroup, tiles_of(cast->K, kColumns), tiles_of(blocks, kGroup));
    config.blockDim = dim3(kThreads, 1, 1);
  }
  const Kernel kernel = format == kE4M3 ? kernel_of<kE4M3>(element, scales) : kernel_of<kE5M2>(element, scales);
  return cudaLaunchKernelEx(&config, kernel, *cast);
}

extern "C" const char* megaspec_cuda_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
